"""Candidates that are measured by how often they are called in some seconds, in turns.

As `harness.race`, whose results, turns and rejection of disturbed rounds these are; but many callers at once are not
timed call by call: each sample says how long a lap took, one call of each caller, on average.
"""

from collections.abc import Callable, Iterable, Mapping

from benchmarks.harness import FOREIGN, PATIENCE, Race
from benchmarks.load import LoadMeter

Lap = Callable[[float], float]
"""Works for so many seconds, and returns the seconds of a lap."""


def laps(candidates: Mapping[str, Lap], seconds: float, rounds: int, helpers: Iterable[int] = ()) -> Race:
    """So many undisturbed rounds, each with a sample of each candidate. ``helpers`` work for a candidate."""
    meter, names = LoadMeter(helpers), list(candidates)
    taken: list[tuple[float, dict[str, float]]] = []
    for number in range(rounds * PATIENCE):
        if sum(foreign <= FOREIGN for foreign, _ in taken) == rounds:
            break
        first = number % len(names)
        meter.start()
        found = {name: candidates[name](seconds) for name in names[first:] + names[:first]}
        taken.append((meter.foreign(), found))
    best = sorted(taken, key=lambda one: one[0])[:rounds]
    return Race(
        {name: [found[name] for _, found in best] for name in names},
        rejected=len(taken) - len(best),
        foreign=[foreign for foreign, _ in best],
    )
