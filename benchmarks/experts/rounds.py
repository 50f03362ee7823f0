"""Candidates that are measured by how often they are called in some seconds, in turns.

As `harness.race`, whose results, turns and rejection of disturbed rounds these are; but many callers at once are not
timed call by call: each sample says how long a lap took, one call of each caller, on average.
"""

from collections.abc import Callable, Iterable, Mapping

from benchmarks.harness import Race, in_turns

Lap = Callable[[float], float]
"""Works for so many seconds, and returns the seconds of a lap."""


def laps(candidates: Mapping[str, Lap], seconds: float, rounds: int, helpers: Iterable[int] = ()) -> Race:
    """So many undisturbed rounds, each with a sample of each candidate. ``helpers`` work for a candidate."""
    return in_turns(candidates, lambda name: candidates[name](seconds), rounds=rounds, helpers=helpers)
