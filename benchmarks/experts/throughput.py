"""Share of the in-process speed that callers reach over gRPC, by number of callers and batch size.

    client process: callers, threads that share one connection ── gRPC, loopback ──> server process: one ffn, Adam
    this process:   the same module, all rows of a lap in one batch, no server: the ideal
    bare:           gRPC streams that batch waiting calls for the same module, without checks, keys, deadlines or
                    guards. Its distance from the ideal is the cost of gRPC and Python, without torchweft

The last rows are processor time of both ends: of one single-row forward relative to bare gRPC, and of 32 single rows
that one thread gathers.

A lap is one call of every caller. The server repeats the forward in a backward, unless the graph is kept. Both are
measured, and the better one is judged. The peer has the same callers in one process, and its own server.
"""

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

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
"""Number of callers, and rows per call."""
IDEAL, WEFT, KEPT, BARE, PEER = "ideal", "torchweft", "kept graph", "bare gRPC", "hivemind"
LARGE = 32
SPEEDUP = 5.0
"""Required speed of single rows, relative to the peer."""
KEEP = 256_000_000
TOLERANCE = 1e-5
OF_BARE = 1.7
"""Largest processor time of both ends of a single-row forward, relative to bare gRPC."""
GATHERED, GATHER_MS = 32, 14.0
"""Single rows that are gathered, and the largest processor time of both ends, in milliseconds."""


@dataclass(frozen=True)
class Point:
    """Number of callers, rows per call, and whether they train."""

    callers: int
    rows: int
    train: bool

    @property
    def required(self) -> float | None:
        """Required share of the ideal, or None without a requirement."""
        if self.rows >= LARGE:
            return 0.9
        if self.train:
            return 0.45
        return {1: 0.4, 32: 0.6}.get(self.callers)


class Servers:
    """Servers and clients of torchweft, of bare gRPC and of the peer. ``why`` is the reason for a missing peer."""

    def __init__(self, stack: ExitStack, width: int, with_peer: bool) -> None:
        options = {"experts": [[UID, width, 0, "float32"]], "keep": KEEP}
        server = stack.enter_context(Helper("torchweft_server", options, python=sys.executable))
        self.client = stack.enter_context(
            Helper("torchweft_client", {"uid": UID, "width": width}, python=sys.executable)
        )
        self.client.hear()
        self.client.ask({"address": server.hear()["address"]})
        bare = stack.enter_context(Helper("bare_server", {"width": width}, python=sys.executable))
        self.bare = stack.enter_context(Helper("bare_client", {"width": width}, python=sys.executable))
        self.bare.hear()
        self.bare.ask(bare.hear())
        self.ends = {WEFT: (server, self.client), BARE: (bare, self.bare)}
        self.width, self.why = width, "not requested"
        self.peer: Helper | None = None
        helpers = [server, self.client, bare, self.bare]
        if with_peer:
            try:
                progress(f"starting {peer.NAME}")
                peer_server, self.peer = peer.start(stack, UID, width)
                helpers += [peer_server, self.peer]
                _check_outputs(self.peer, width)
            except (peer.NoPeer, HelperLost) as fault:
                self.lose(fault)
        _check_outputs(self.client, width)
        self.processes = [process for helper in helpers for process in helper.processes]

    def lose(self, fault: Exception) -> None:
        """Continue without the peer."""
        self.peer, self.why = None, str(fault)
        progress(f"{peer.NAME} is omitted: {fault}")

    def race(self, point: Point, seconds: float, rounds: int) -> Race:
        """Race all candidates. If the peer fails, repeat the race without it."""
        candidates: dict[str, Lap] = {
            IDEAL: ideal(self.width, point.callers * point.rows, point.train),
            WEFT: _laps(self.client, point, keep=False),
            BARE: _laps(self.bare, point, keep=False),
        }
        if point.train:
            candidates[KEPT] = _laps(self.client, point, keep=True)
        if self.peer is not None:
            try:
                return laps({**candidates, PEER: _laps(self.peer, point, keep=False)}, seconds, rounds, self.processes)
            except HelperLost as fault:
                self.lose(fault)
        return laps(candidates, seconds, rounds, self.processes)


def run(quick: bool) -> Table:
    """Shares of the ideal, and speed relative to the peer."""
    points = [Point(*size, train) for train, size in product((False, True), ((1, 1), (2, 1)) if quick else CALLERS)]
    rows: list[Row] = []
    notes = ["  shares are of the ideal, in calls per second; callers are threads of one process with one connection"]
    for width in (32,) if quick else WIDTHS:
        with ExitStack() as stack:
            servers = Servers(stack, width, with_peer=not quick)
            for point in points:
                progress(f"width {width}, {point.callers} x {point.rows}, {_kind(point)}")
                race = servers.race(point, 0.02 if quick else 0.5, 1 if quick else 7)
                rows.append(_row(width, point, race))
            progress(f"width {width}, processor time")
            rows += _processor_rows(servers, 0.05 if quick else 1.0, 1 if quick else 7)
            if servers.peer is None:
                notes.append(f"  {peer.NAME} at width {width}: {servers.why}")
    return Table("an ffn expert with Adam over gRPC, compared with the same module in this process", rows, notes)


def _processor_rows(servers: Servers, seconds: float, rounds: int) -> list[Row]:
    """Processor time of both ends, in turns. The process clocks of Linux tell it."""
    single = {"callers": 1, "rows": 1, "train": False, "keep": False, "seconds": seconds}
    gathered = {**single, "gather": GATHERED}
    samples = [
        [
            _processor_ms(servers.ends[name], question)
            for name, question in [(WEFT, single), (BARE, single), (WEFT, gathered)]
        ]
        for _ in range(rounds)
    ]
    weft, bare, many = (median(column) for column in zip(*samples, strict=True))
    ratio = median(sample[0] / sample[1] for sample in samples)
    head = {"width": f"{servers.width}", "work": "processor time, both ends"}
    return [
        head
        | {"callers x batch": "1 x 1", WEFT: f"{weft * 1e3:.0f} us", BARE: f"{bare * 1e3:.0f} us"}
        | {"required": f"<= {OF_BARE:g} x bare", "verdict": _verdict(ratio <= OF_BARE, f"{ratio:.2f} x")},
        head
        | {"callers x batch": f"gather of {GATHERED}", WEFT: f"{many:.1f} ms"}
        | {"required": f"<= {GATHER_MS:g} ms", "verdict": _verdict(many <= GATHER_MS, "")},
    ]


def _processor_ms(ends: tuple[Helper, Helper], question: dict[str, Any]) -> float:
    """Processor time of the processes of server and client, in milliseconds per lap."""
    before = sum(map(_processor_seconds, ends))
    laps = ends[1].ask(question, question["seconds"])["rate"] * question["seconds"]
    return (sum(map(_processor_seconds, ends)) - before) / laps * 1e3


def _processor_seconds(helper: Helper) -> float:
    # The number of a process's clock on Linux, see clock_getcpuclockid(3).
    return time.clock_gettime(~helper.process << 3 | 2)


def _verdict(holds: bool, measured: str) -> str:
    return f"{'holds' if holds else 'falls short'} {measured}".strip()


def _laps(client: Helper, point: Point, *, keep: bool) -> Lap:
    def lap(seconds: float) -> float:
        job = {"callers": point.callers, "rows": point.rows, "train": point.train, "keep": keep, "seconds": seconds}
        return point.callers / client.ask(job, seconds)["rate"]

    return lap


def _check_outputs(client: Helper, width: int) -> None:
    """Raise RuntimeError if outputs differ from those of the ideal. Must run before any training."""
    x = torch.linspace(-1, 1, 2 * width).reshape(2, width)
    outputs = torch.tensor(client.ask({"inputs": x.tolist()})["outputs"])
    difference = float((outputs - feed_forward(width)(x)).detach().abs().max())
    if not difference <= TOLERANCE:
        raise RuntimeError(f"{client.name} does not do the same work: outputs differ by {difference:.1g}")


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
    speedup = race.ratio(PEER, best) if PEER in shares else None
    row |= {} if speedup is None else {"times hivemind": f"{speedup:.1f}"}
    return row | _judged(point, shares[best], speedup) | {"rounds": race.note()}


def _judged(point: Point, share: float, speedup: float | None) -> Row:
    conditions: list[tuple[str, bool]] = []
    if point.required is not None:
        conditions.append((f">= {point.required:g}", share >= point.required))
    if point.rows == 1 and speedup is not None:
        conditions.append((f"{SPEEDUP:g} x hivemind", speedup >= SPEEDUP))
    if not conditions:
        return {}
    holds = all(met for _, met in conditions)
    return {"required": ", ".join(text for text, _ in conditions), "verdict": "holds" if holds else "falls short"}
