"""Races: candidates that do the same work, run in turn, round by round.

    round    1          2          3
    runs     A  B  C    B  C  A    C  A  B    ...      each run is a sample: the median of several calls

The speed of a machine drifts, but it is nearly the same for all candidates of one round. Ratios are therefore taken
within a round, and their median over the rounds is reported. Rounds disturbed by other processes are repeated.
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
FOREIGN = 0.1  # cores that other processes can use in an undisturbed round
PATIENCE = 3  # limit of all rounds, as a multiple of the requested rounds


@dataclass
class Race:
    """Seconds per call of every candidate, one number per round."""

    seconds: dict[str, list[float]]
    rejected: int = 0
    foreign: list[float] = field(default_factory=list[float])
    """Cores that other processes kept busy, for each round that counts."""

    def median(self, name: str) -> float:
        """Median seconds per call over the rounds."""
        return median(self.seconds[name])

    def ratio(self, of: str, to: str) -> float:
        """Median over the rounds of the seconds of `of` divided by those of `to`."""
        return median(a / b for a, b in zip(self.seconds[of], self.seconds[to], strict=True))

    def difference(self, of: str, to: str) -> float:
        """Median over the rounds of the seconds of `of` minus those of `to`."""
        return median(a - b for a, b in zip(self.seconds[of], self.seconds[to], strict=True))

    def spread(self, name: str) -> str:
        """The fastest and the slowest round, relative to the median."""
        middle = self.median(name)
        low, high = min(self.seconds[name]) / middle - 1, max(self.seconds[name]) / middle - 1
        return f"{low:+.0%} {high:+.0%}"

    def note(self) -> str:
        """Number of rounds, and whether other processes disturbed them."""
        worst = max(self.foreign, default=0.0)
        text = f"{len(self.foreign)} rounds, {self.rejected} rejected"
        return text + (f"; DISTURBED: other processes used up to {worst:.2f} cores" if worst > FOREIGN else "")


@contextmanager
def intra_op_threads(count: int) -> Generator[None, None, None]:
    """Set PyTorch's number of intra-op threads to `count` within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def race(candidates: Mapping[str, Work], *, rounds: int, sample: float = 0.1, helpers: Iterable[int] = ()) -> Race:
    """Run the candidates in turn, each for about `sample` seconds per round.

    Disturbed rounds are repeated, up to `PATIENCE` times as many rounds as requested. If too few are undisturbed, the
    least disturbed ones count too, and `Race.note` says so. `helpers` are processes that work for a candidate.
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
    """Take undisturbed rounds with one `sample` of each name, in seconds. The order rotates from round to round.

    Disturbed rounds are repeated until there are `PATIENCE` times as many rounds as requested, or until `patience`
    seconds have passed. Then the least disturbed rounds count.
    """
    meter, order = LoadMeter(helpers), list(names)
    all_rounds: list[tuple[float, dict[str, float]]] = []
    end = math.inf if patience is None else time.perf_counter() + patience
    most = rounds * PATIENCE if patience is None else math.inf
    while sum(foreign <= FOREIGN for foreign, _ in all_rounds) < rounds:
        if len(all_rounds) >= most or (len(all_rounds) >= rounds and time.perf_counter() > end):
            break
        first = len(all_rounds) % len(order)
        meter.start()
        times = {name: sample(name) for name in order[first:] + order[:first]}
        all_rounds.append((meter.foreign(), times))
    best = sorted(all_rounds, key=lambda entry: entry[0])[:rounds]
    return Race(
        {name: [times[name] for _, times in best] for name in order},
        rejected=len(all_rounds) - len(best),
        foreign=[foreign for foreign, _ in best],
    )


def _calls(work: Work, sample: float) -> int:
    """Warm up, and estimate how many calls take `sample` seconds."""
    work()
    start = time.perf_counter()
    work()
    return max(1, round(sample / (time.perf_counter() - start)))


def _sample(work: Work, calls: int) -> float:
    seconds: list[float] = []
    for _ in range(calls):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def progress(text: str) -> None:
    """Report the current measurement on stderr; stdout has only the tables."""
    print(f"  ... {text}", file=sys.stderr, flush=True)
