"""A pipe over processes against `torch.distributed.pipelining` and a loop of isend and irecv, in one run.

    this process --"run NAME"--> rank 0 ... rank n       each runs its part of the step
                 <--seconds----- rank 0 ... rank n       a step ends with its last rank

Candidates take turns, and ratios are taken within a round. The table has wall time and processor time, which other
programs disturb less. The plain loop does not communicate. If it varies by more than a fifth, the times of that
comparison are left out. The variation is the interquartile range of its rounds, relative to the median.

A shared host can halve the speed of a core for a second, and no counter of this machine shows it. Every sample
therefore times a fixed probe before and after the steps. Rounds with a slow probe are repeated. Rounds are short, so
that the speed is the same for all candidates of a round.

The ranks are processes of this host with gloo, one thread each, and the environment of torchrun. They are killed at the
end of a comparison, or if one of them does not answer in time.
"""

import math
import signal
import time
from collections.abc import Mapping
from multiprocessing import forkserver, set_forkserver_preload
from statistics import median, quantiles
from typing import Any, NamedTuple

from benchmarks.harness import FOREIGN, Race, progress
from benchmarks.load import LoadMeter
from benchmarks.pipeline import rank_checks, rank_steps
from benchmarks.table import Row, Table, at_least, at_most
from tests.pipeline.processes.launch import Ranks, fresh_ranks
from torchweft.pipeline.simulate import StageCost, forecast

SLEEP = {"gpipe": 0.97, "1f1b": 0.97, "interleaved x2": 0.0, "zero bubble x2": 1.03, "zbv": 1.03, "dualpipev": 1.03}
"""Required share of the ideal, relative to torch. 0 means no requirement."""
OVERHEAD = {"gpipe": 0.6, "1f1b": 1.05, "interleaved x2": 0.45, "zero bubble x2": 0.6}
"""Allowed overhead, relative to torch."""
RAW = {"gpipe": 1.5, "1f1b": 1.3}
"""Allowed overhead, relative to the hand-written loop."""
FUSED = 1.02
"""Allowed time of zero bubble relative to 1F1B if no backward can be split: equal except for noise."""
TRANSFORMER = ["gpipe", "1f1b", "interleaved x2", "zero bubble x2"]
STEADY = 0.2
SLOW = 1.25
"""Allowed time of the probe in a round that counts, relative to the fastest round."""
_COLUMNS = {
    "wall": ("torchweft", "peer", "ratio", "required", "verdict"),
    "processor": ("CPU torchweft", "CPU peer", "CPU ratio"),
}


class Round(NamedTuple):
    """Wall and processor seconds of each candidate, cores used by other processes, and seconds of the probe."""

    wall: dict[str, float]
    processor: dict[str, float]
    foreign: float
    probe: float

    def disturbance(self, fastest: float) -> float:
        """At most 1 if the round counts."""
        return max(self.foreign / FOREIGN, (self.probe / fastest - 1) / (SLOW - 1))


class Comparison:
    """Steps run in turn by ranks: `rounds` undisturbed rounds, or the least disturbed within `patience` seconds."""

    def __init__(self, ranks: Ranks, names: list[str], *, rounds: int, calls: int, patience: float) -> None:
        self._ranks, self._calls = ranks, calls
        # The first two steps make plans and connections.
        first_samples: dict[str, list[rank_steps.Sample]] = {}
        for _ in range(1 if rounds == 1 else 2):
            first_samples = {name: self._sample(name) for name in names}
        losses = {
            name: next((sample.loss for sample in by_rank if sample.loss is not None), None)
            for name, by_rank in first_samples.items()
        }
        # The plain loop of sleeping stages runs only one micro-batch, so its loss differs.
        known = [loss for name, loss in losses.items() if loss is not None and name != "plain"]
        if any(not math.isclose(known[0], loss, rel_tol=1e-3, abs_tol=1e-6) for loss in known):
            raise RuntimeError(f"the candidates do not do the same work; their losses are {losses}")
        meter, end, all_rounds = LoadMeter(ranks.pids), time.perf_counter() + patience, list[Round]()
        best: list[Round] = []
        fastest = math.inf
        while len(best) < rounds or (best[-1].disturbance(fastest) > 1 and time.perf_counter() < end):
            first = len(all_rounds) % len(names)
            all_rounds.append(self._round(names[first:] + names[:first], meter))
            fastest = min(entry.probe for entry in all_rounds)
            best = sorted(all_rounds, key=lambda entry: entry.disturbance(fastest))[:rounds]
        self.race = Race(
            {name: [entry.wall[name] for entry in best] for name in names},
            rejected=len(all_rounds) - len(best),
            foreign=[entry.foreign for entry in best],
        )
        self._processor = {name: [entry.processor[name] for entry in best] for name in names}
        self._slowest = max(entry.probe for entry in best) / fastest

    def _sample(self, name: str) -> list[rank_steps.Sample]:
        return self._ranks.run(rank_steps.sample, name, self._calls)

    def _round(self, names: list[str], meter: LoadMeter) -> Round:
        meter.start()
        samples = {name: self._sample(name) for name in names}
        return Round(
            {name: max(sample.wall for sample in by_rank) for name, by_rank in samples.items()},
            {name: sum(sample.processor for sample in by_rank) / len(by_rank) for name, by_rank in samples.items()},
            meter.foreign(),
            max(sample.probe for by_rank in samples.values() for sample in by_rank),
        )

    def processor(self, name: str) -> float:
        """Processor seconds of a step: mean over the ranks, median over the rounds."""
        return median(self._processor[name])

    def rows(self, measure: str, rows: list[Row]) -> list[Row]:
        """`rows` without unsteady times, then rows with the reasons and the state of the rounds."""
        plain = {"wall": self.race.seconds["plain"], "processor": self._processor["plain"]}
        steady, notes = only_steady(rows, plain)
        slow = f"; SLOW: the probe took up to {self._slowest:.2f} times its fastest" if self._slowest > SLOW else ""
        return [*steady, *({"measure": measure, "case": note} for note in [*notes, self.race.note() + slow])]


def only_steady(rows: list[Row], plain: Mapping[str, list[float]]) -> tuple[list[Row], list[str]]:
    """Remove wall or processor times if the plain loop varies too much. Return the rows and a note for each kind."""
    notes: list[str] = []
    for kind, seconds in plain.items():
        if (share := _variation(seconds)) > STEADY:
            rows = [{key: text for key, text in row.items() if key not in _COLUMNS[kind]} for row in rows]
            notes.append(f"{kind} times not reported: the plain loop varies by {share:.0%}")
    return [row for row in rows if {*row} - {"measure", "case"}], notes


def _variation(seconds: list[float]) -> float:
    """Interquartile range relative to the median, or 0 for too few rounds."""
    if len(seconds) < 3:
        return 0.0
    low, _, high = quantiles(seconds, n=4)
    return (high - low) / median(seconds)


def _row(measure: str, case: str, values: tuple[str, str], ratio: float, more: Mapping[str, str]) -> Row:
    ours, peer = values
    return {"measure": measure, "case": case, "torchweft": ours, "peer": peer, "ratio": f"{ratio:.2f}", **more}


def _processor(comparison: Comparison, ours: str, peer: str, unit: float) -> Row:
    mine, theirs = comparison.processor(ours), comparison.processor(peer)
    return {
        "CPU torchweft": f"{mine * unit:.0f}",
        "CPU peer": f"{theirs * unit:.0f}",
        "CPU ratio": f"{mine / theirs:.2f}",
    }


def run(quick: bool) -> Table:
    """Bytes on the wire, set-up, failures, overhead, sleeping stages and a real model."""
    # Ranks are forked from a server that has imported everything.
    set_forkserver_preload(["torch.distributed.pipelining", "benchmarks.pipeline.rank_steps", rank_checks.__name__])
    forkserver.ensure_running()
    rows: list[Row] = []
    for section in (_wire_and_links, _failures, _overhead, _sleeping, _transformer):
        progress(section.__name__.strip("_"))
        rows += section(quick)
    title = "a pipe over processes, compared with torch.distributed.pipelining and a loop of isend and irecv"
    notes = [
        "  overhead: microseconds per micro-batch and rank beyond the plain loop's share of an ideal pipeline; its CPU",
        "  columns are processor microseconds per micro-batch and rank, layers included. Elsewhere: per step.",
    ]
    return Table(title, rows, notes)


def _wire_and_links(quick: bool) -> list[Row]:
    rows: list[Row] = []
    for ranks in (2, 4):
        with fresh_ranks(ranks) as group:
            seconds = [max(group.run(rank_checks.seconds_to_link)) for _ in range(2 if quick else 5)]
            rows.append({"measure": "set-up of links, ms", "case": f"{ranks} ranks", "torchweft": _spread(seconds)})
            if ranks == 4:
                rows += [_wire(group, "U-Net", rank_checks.unet(), "1f1b")]
                rows += [_wire(group, "dense, 4 blocks", rank_checks.dense(4), "1f1b")]
                rows += [_wire(group, "dense, 8 blocks", rank_checks.dense(8), "interleaved")]
    return rows


def _wire(group: Ranks, case: str, skips: rank_checks.Skips, schedule: str) -> Row:
    """Check that every value crossed exactly once per destination rank and direction."""
    blocks = len(skips.writes)
    workers = [stage % group.size for stage in range(blocks)]
    sent = group.run(rank_checks.wire_of, skips, schedule)
    actual = {(rank, other): sizes for rank, by_rank in enumerate(sent) for other, sizes in by_rank.items()}
    expected = rank_checks.expected_bytes(skips, workers)
    total, ideal = (sum(map(sum, sizes.values())) for sizes in (actual, expected))
    verdict = "holds" if actual == expected else "falls short"
    row = _row("wire, bytes of a step", case, (f"{total:,}", f"{ideal:,}"), total / ideal, {"required": "exact"})
    return {**row, "verdict": verdict}


def _spread(seconds: list[float]) -> str:
    return f"{median(seconds) * 1e3:.0f} ({min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f})"


def _failures(quick: bool) -> list[Row]:
    raised, killed = list[float](), list[float]()
    for _ in range(1 if quick else 3):
        with fresh_ranks(3) as group:
            times = group.run(rank_checks.fail_on, 1)
            raised.append(max(known for _, known in times) - max(at for at, _ in times))
            group.start(rank_checks.fail_on, None)
            time.sleep(0.5)
            killed_at = time.monotonic()
            group.signal(1, signal.SIGKILL)
            outcomes: list[Any] = group.collect(without=(1,))
            if any(outcomes[rank] is None or outcomes[rank].text for rank in (0, 2)):
                raise RuntimeError(f"the other ranks did not survive the kill of rank 1: {outcomes}")
            killed.append(max(outcomes[rank].result[1] for rank in (0, 2)) - killed_at)
    cases = {"an exception": raised, "SIGKILL": killed}
    return [
        {"measure": "failure known on all, ms", "case": case, "torchweft": _spread(seconds)}
        for case, seconds in cases.items()
    ]


def _overhead(quick: bool) -> list[Row]:
    return [row for kind in OVERHEAD for row in overhead_of(kind, quick)]


def overhead_of(kind: str, quick: bool, patience: float = 60.0) -> list[Row]:
    """Rows of one schedule, compared alone so that rounds are short."""
    chunks = 8 if quick else 32
    with fresh_ranks(2) as group:
        names = group.run(rank_steps.prepare_tiny, chunks, [kind])[0]
        rounds, calls = (1, 1) if quick else (25, 1)
        comparison = Comparison(group, names, rounds=rounds, calls=calls, patience=0.0 if quick else patience)
    measure, seconds = "overhead, us", comparison.race.seconds

    def beyond(name: str) -> list[float]:
        """Seconds per round beyond the ideal: half of the plain loop, plus the bubble of one micro-batch."""
        ideal = [plain * (chunks + 1) / (2 * chunks) for plain in seconds["plain"]]
        return [(measured - best) / chunks for measured, best in zip(seconds[name], ideal, strict=True)]

    def row(peer: str, most: float) -> Row:
        ours, theirs = beyond(f"torchweft {kind}"), beyond(f"{peer} {kind}")
        cpu = _processor(comparison, f"torchweft {kind}", f"{peer} {kind}", 1e6 / chunks)
        if median(theirs) <= 0:
            return {"measure": measure, "case": f"{kind}, {peer}: the peer took less than its ideal", **cpu}
        # On a busy machine the peer can seem to cost nothing in some rounds, so use the ratio of the medians.
        ratio = median(ours) / median(theirs)
        values = (f"{median(ours) * 1e6:.0f}", f"{median(theirs) * 1e6:.0f}")
        return _row(measure, f"{kind}, {peer}", values, ratio, {**cpu, **at_most(ratio, most)})

    limits = {"raw": RAW[kind]} if kind in RAW else {}
    return comparison.rows(measure, [row(peer, most) for peer, most in {**limits, "torch": OVERHEAD[kind]}.items()])


def _sleeping(quick: bool) -> list[Row]:
    ranks, chunks, seconds = 4, 8, 0.002 if quick else 0.02
    with fresh_ranks(ranks) as group:
        names = group.run(rank_steps.prepare_sleep, seconds, chunks, list(SLEEP))[0]
        comparison = Comparison(group, names, rounds=1 if quick else 3, calls=1, patience=0.0 if quick else 25.0)
    measure, race = "sleeping stages, share", comparison.race

    def row(kind: str, least: float) -> Row:
        table = rank_steps.table_of(kind, ranks, chunks)
        nap = seconds * ranks / table.stages
        best = forecast(table, [StageCost(nap, 2 * nap)] * table.stages).total
        ours, torchs = f"torchweft {kind}", f"torch {kind}"
        ratio = race.ratio(torchs, ours)
        shares = f"{best / race.median(ours):.3f}", f"{best / race.median(torchs):.3f}"
        more = {**_processor(comparison, ours, torchs, 1e3), **(at_least(ratio, least) if least else {})}
        return _row(measure, f"{kind}, torch", shares, ratio, more)

    rows = [row(kind, least) for kind, least in SLEEP.items()]
    zero_bubble, one_f_one_b = "fused zero bubble x1", "fused 1f1b"
    ratio = race.ratio(zero_bubble, one_f_one_b)
    times = f"{race.median(zero_bubble) * 1e3:.0f}", f"{race.median(one_f_one_b) * 1e3:.0f}"
    more = {**_processor(comparison, zero_bubble, one_f_one_b, 1e3), **at_most(ratio, FUSED)}
    return comparison.rows(measure, [*rows, _row("fused zero bubble, ms", "torchweft 1f1b", times, ratio, more)])


def _transformer(quick: bool) -> list[Row]:
    with fresh_ranks(2) as group:
        sequence, rows_each = (16, 1) if quick else (64, 2)
        names = group.run(rank_steps.prepare_transformer, sequence, rows_each, 8, TRANSFORMER)[0]
        comparison = Comparison(group, names, rounds=1 if quick else 5, calls=1, patience=0.0 if quick else 25.0)
    measure, race = "4-layer transformer, ms", comparison.race

    best = min((name for name in names if name.startswith("torch")), key=race.median)
    fastest = min((name for name in names if name.startswith("torchweft")), key=race.median)
    rows: list[Row] = []
    for kind in TRANSFORMER:
        name = f"torchweft {kind}"
        ratio = race.ratio(best, name)
        values = f"{race.median(name) * 1e3:.0f}", f"{race.median(best) * 1e3:.0f}"
        more = {**_processor(comparison, name, best, 1e3), **(at_least(ratio, 1.0) if name == fastest else {})}
        rows.append(_row(measure, f"{kind}, {best}", values, ratio, more))
    return comparison.rows(measure, rows)
