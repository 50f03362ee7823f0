"""Races: candidates that do the same work, run in turn, round by round.

    round    1          2          3
    runs     A  B  C    B  C  A    C  A  B    ...      each a sample: some calls, of which the median counts

A machine's speed drifts; what runs side by side drifts together. So ratios are taken within a round, and the
median over the rounds is reported. A round during which other processes worked is run again (see `load`).
"""

import math
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import torch

from benchmarks.load import LoadMeter

Work = Callable[[], object]
FOREIGN = 0.1  # cores that others may keep busy during a round
PATIENCE = 3  # times as many rounds as asked for are run, at most


@dataclass
class Race:
    """The seconds per call of every candidate, one number per round."""

    seconds: dict[str, list[float]]
    rejected: int = 0
    foreign: list[float] = field(default_factory=list[float])
    """Per round that counts, the cores that other processes kept busy."""

    def median(self, name: str) -> float:
        """Seconds per call, in the middle of all rounds."""
        return median(self.seconds[name])

    def ratio(self, of: str, to: str) -> float:
        """Seconds of one candidate over those of another, in the middle of all rounds."""
        return median(a / b for a, b in zip(self.seconds[of], self.seconds[to], strict=True))

    def difference(self, of: str, to: str) -> float:
        """Seconds of one candidate less those of another, in the middle of all rounds."""
        return median(a - b for a, b in zip(self.seconds[of], self.seconds[to], strict=True))

    def spread(self, name: str) -> str:
        """The fastest and the slowest round, relative to the median."""
        middle = self.median(name)
        low, high = min(self.seconds[name]) / middle - 1, max(self.seconds[name]) / middle - 1
        return f"{low:+.0%} {high:+.0%}"

    def note(self) -> str:
        """Notes for the reader about the circumstances."""
        worst = max(self.foreign, default=0.0)
        text = f"{len(self.foreign)} rounds, {self.rejected} rejected"
        return text + (f"; DISTURBED: other processes used up to {worst:.2f} cores" if worst > FOREIGN else "")


@contextmanager
def intra_op_threads(count: int) -> Generator[None, None, None]:
    """Let PyTorch divide its operators over `count` threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def race(candidates: Mapping[str, Work], *, rounds: int, sample: float = 0.1, helpers: Iterable[int] = ()) -> Race:
    """Run the candidates in turn, each for about `sample` seconds per round.

    Rounds that were disturbed are repeated while patience lasts; after that the least disturbed ones of them
    count as well, and `Race.note` says so. `helpers` are processes of our own that work for a candidate.
    """
    calls = {name: _calls(work, sample) for name, work in candidates.items()}
    return in_turns(candidates, lambda name: _sample(candidates[name], calls[name]), rounds=rounds, helpers=helpers)


def in_turns(
    names: Iterable[str],
    sample: Callable[[str], float],
    *,
    rounds: int,
    helpers: Iterable[int] = (),
    patience: float | None = None,
) -> Race:
    """So many undisturbed rounds of one `sample` of each name, in seconds; the order turns from round to round.

    Disturbed rounds are run again: up to `PATIENCE` times as many as asked for, or until `patience` seconds have
    passed. Then the least disturbed count.
    """
    meter, order = LoadMeter(helpers), list(names)
    taken: list[tuple[float, dict[str, float]]] = []
    end = math.inf if patience is None else time.perf_counter() + patience
    most = rounds * PATIENCE if patience is None else math.inf
    while sum(foreign <= FOREIGN for foreign, _ in taken) < rounds:
        if len(taken) >= most or (len(taken) >= rounds and time.perf_counter() > end):
            break
        first = len(taken) % len(order)
        meter.start()
        times = {name: sample(name) for name in order[first:] + order[:first]}
        taken.append((meter.foreign(), times))
    best = sorted(taken, key=lambda one: one[0])[:rounds]
    return Race(
        {name: [times[name] for _, times in best] for name in order},
        rejected=len(taken) - len(best),
        foreign=[foreign for foreign, _ in best],
    )


def _calls(work: Work, sample: float) -> int:
    """Warm up, and find how many calls make a sample."""
    work()
    start = time.perf_counter()
    work()
    return max(1, round(sample / (time.perf_counter() - start)))


def _sample(work: Work, calls: int) -> float:
    """The median seconds of so many calls."""
    seconds: list[float] = []
    for _ in range(calls):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def progress(text: str) -> None:
    """Report the current measurement on stderr; stdout belongs to the tables."""
    print(f"  ... {text}", file=sys.stderr, flush=True)
