"""Races between candidates with several callers, measured by the number of calls in some seconds.

Concurrent callers cannot be timed call by call, as `harness.race` does. Each sample is therefore the mean duration of
a lap, which is one call of every caller. Turns, results and disturbed rounds are as in `harness`.
"""

from collections.abc import Callable, Iterable, Mapping

from benchmarks.harness import Race, in_turns

Lap = Callable[[float], float]
"""Function that runs for some seconds and returns the mean seconds of a lap."""


def laps(candidates: Mapping[str, Lap], seconds: float, rounds: int, helpers: Iterable[int] = ()) -> Race:
    """Take undisturbed rounds with a sample of each candidate. ``helpers`` are processes that work for one."""
    return in_turns(candidates, lambda name: candidates[name](seconds), rounds=rounds, helpers=helpers)
