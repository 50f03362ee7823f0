"""The share of the in-process speed that callers get over gRPC: one or many, with small and large batches.

    client process: callers, threads that share one connection ── gRPC, loopback ──> server process: one ffn, Adam
    this process:   the same module, all rows of a lap in one batch, no server: the ideal
    bare:           gRPC streams with the same module behind them, batches of what waits, and nothing else: no checks,
                    keys, deadlines or guards. What is missing there to the ideal, gRPC and Python take, not torchweft

A lap is one call of every caller. Backward runs the forward again on the server; with a kept graph it does not. Both
are measured, and the better one is judged. The peer does the same with threads in one process, and its own server.
"""

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product

import torch

from benchmarks.experts import peer
from benchmarks.experts.helper import Helper, HelperLost
from benchmarks.experts.local import ideal
from benchmarks.experts.processes.module import feed_forward
from benchmarks.experts.rounds import Lap, laps
from benchmarks.harness import Race, progress
from benchmarks.table import Row, Table

UID = "ffn.0"
WIDTHS = (512, 1024)
CALLERS = ((1, 1), (4, 1), (32, 1), (1, 32), (4, 32), (1, 256))
"""Callers, and rows of each call."""
IDEAL, WEFT, KEPT, BARE, PEER = "ideal", "torchweft", "kept graph", "bare gRPC", "hivemind"
LARGE = 32
TIMES = 5.0
"""How much faster than the peer single rows should be."""
KEEP = 256_000_000
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Point:
    """Callers times rows, and whether they train."""

    callers: int
    rows: int
    train: bool

    @property
    def wanted(self) -> float | None:
        """The share of the ideal that holds; None where none was named."""
        if self.rows >= LARGE:
            return 0.9
        if self.train:
            return 0.45
        return {1: 0.4, 32: 0.6}.get(self.callers)


class Servers:
    """Server and client of torchweft, and of the peer where there is one. ``why`` not, otherwise."""

    def __init__(self, stack: ExitStack, width: int, with_peer: bool) -> None:
        given = {"experts": [[UID, width, 0, "float32"]], "keep": KEEP}
        server = stack.enter_context(Helper("torchweft_server", given, python=sys.executable))
        self.client = stack.enter_context(
            Helper("torchweft_client", {"uid": UID, "width": width}, python=sys.executable)
        )
        self.client.hear()
        self.client.ask({"address": server.hear()["address"]})
        bare = stack.enter_context(Helper("bare_server", {"width": width}, python=sys.executable))
        self.bare = stack.enter_context(Helper("bare_client", {"width": width}, python=sys.executable))
        self.bare.hear()
        self.bare.ask(bare.hear())
        self.width, self.why = width, "not asked for"
        self.peer: Helper | None = None
        helpers = [server, self.client, bare, self.bare]
        if with_peer:
            try:
                progress(f"starting {peer.NAME}")
                there, self.peer = peer.start(stack, UID, width)
                helpers += [there, self.peer]
                _same_work(self.peer, width)
            except (peer.NoPeer, HelperLost) as fault:
                self.lose(fault)
        _same_work(self.client, width)
        self.processes = [number for each in helpers for number in each.processes]

    def lose(self, fault: Exception) -> None:
        """Go on without the peer."""
        self.peer, self.why = None, str(fault)
        progress(f"{peer.NAME} is left out: {fault}")

    def race(self, point: Point, seconds: float, rounds: int) -> Race:
        """Ideal, torchweft and the peer in turns; without the peer from where it fails."""
        found: dict[str, Lap] = {
            IDEAL: ideal(self.width, point.callers * point.rows, point.train),
            WEFT: _asked(self.client, point, keep=False),
            BARE: _asked(self.bare, point, keep=False),
        }
        if point.train:
            found[KEPT] = _asked(self.client, point, keep=True)
        if self.peer is not None:
            try:
                return laps({**found, PEER: _asked(self.peer, point, keep=False)}, seconds, rounds, self.processes)
            except HelperLost as fault:
                self.lose(fault)
        return laps(found, seconds, rounds, self.processes)


def run(quick: bool) -> Table:
    """Shares of the ideal, and times the peer."""
    points = [Point(*each, train) for train, each in product((False, True), ((1, 1), (2, 1)) if quick else CALLERS)]
    rows: list[Row] = []
    notes = ["  shares are of the ideal, in calls per second; callers are threads of one process with one connection"]
    for width in (32,) if quick else WIDTHS:
        with ExitStack() as stack:
            servers = Servers(stack, width, with_peer=not quick)
            for point in points:
                progress(f"width {width}, {point.callers} x {point.rows}, {_kind(point)}")
                race = servers.race(point, 0.02 if quick else 0.5, 1 if quick else 7)
                rows.append(_row(width, point, race))
            if servers.peer is None:
                notes.append(f"  {peer.NAME} at width {width}: {servers.why}")
    return Table("an ffn expert with Adam over gRPC, beside the same module in this process", rows, notes)


def _asked(client: Helper, point: Point, *, keep: bool) -> Lap:
    def lap(seconds: float) -> float:
        word = {"callers": point.callers, "rows": point.rows, "train": point.train, "keep": keep, "seconds": seconds}
        return point.callers / client.ask(word, seconds)["rate"]

    return lap


def _same_work(client: Helper, width: int) -> None:
    """Before anybody has trained. Raises RuntimeError if the outputs are not those of the ideal."""
    x = torch.linspace(-1, 1, 2 * width).reshape(2, width)
    seen = torch.tensor(client.ask({"inputs": x.tolist()})["outputs"])
    apart = float((seen - feed_forward(width)(x)).detach().abs().max())
    if not apart <= TOLERANCE:
        raise RuntimeError(f"{client.name} does not do the same work: outputs are apart by {apart:.1g}")


def _kind(point: Point) -> str:
    return "forward, backward, step" if point.train else "forward"


def _row(width: int, point: Point, race: Race) -> Row:
    shares = {name: race.ratio(IDEAL, name) for name in race.seconds if name != IDEAL}
    best = max((WEFT, KEPT), key=lambda name: shares.get(name, 0.0))
    row = {
        "width": f"{width}",
        "callers x batch": f"{point.callers} x {point.rows}",
        "work": _kind(point),
        "ideal ms": f"{race.median(IDEAL) * 1e3:.3f}",
        **{name: f"{shares[name]:.2f}" if name in shares else "" for name in (WEFT, KEPT, BARE, PEER)},
    }
    times = race.ratio(PEER, best) if PEER in shares else None
    row |= {} if times is None else {"times hivemind": f"{times:.1f}"}
    return row | _judged(point, shares[best], times) | {"rounds": race.note()}


def _judged(point: Point, share: float, times: float | None) -> Row:
    wants: list[tuple[str, bool]] = []
    if point.wanted is not None:
        wants.append((f">= {point.wanted:g}", share >= point.wanted))
    if point.rows == 1 and times is not None:
        wants.append((f"{TIMES:g} x hivemind", times >= TIMES))
    if not wants:
        return {}
    holds = all(each for _, each in wants)
    return {"required": ", ".join(text for text, _ in wants), "verdict": "holds" if holds else "falls short"}
