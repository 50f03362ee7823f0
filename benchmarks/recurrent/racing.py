"""Races with a time limit: as many rounds as fit into some seconds. One round can take half a minute.

    seconds   |- round -|- round -|- round -|                    short work: a sample has many calls
    seconds   |------------------ round ------------------|      long work: one call per candidate, and one round

`harness.race` runs every candidate twice before the first round, and takes a fixed number of rounds. That is too long
for calls of 16 s. Here the duration of a sample is fixed instead of its number of calls, because two threads that
compete with other processes for cores can be a thousand times slower. All else is as in `harness`.
"""

import time
from collections.abc import Mapping
from statistics import median

from benchmarks.harness import PATIENCE, Race, Work, in_turns

SAMPLE = 0.1
"""Minimum seconds of a sample: ten ticks of the clock that counts the load of other processes."""
LONG = 5.0
"""Seconds of a round above which one round is enough."""


def race_for(
    candidates: Mapping[str, Work],
    seconds: float,
    *,
    most: int = 9,
    expected: Mapping[str, float] | None = None,
    patience: float = PATIENCE,
) -> Race:
    """Run the candidates in turn for about `seconds`, with at least two rounds, or one if rounds are long.

    Every candidate must have run before. `expected` has their seconds per call. Without it, each is run once more to
    measure them. Disturbed rounds are repeated, up to `patience` times the planned seconds. Then the least disturbed
    ones count, and `Race.note` says so.
    """
    times = expected or {name: _sample(work, 0.0) for name, work in candidates.items()}
    lap = sum(max(duration, SAMPLE) for duration in times.values())
    rounds = min(max(int(seconds / lap), 1 if lap > LONG else 2), most)
    return in_turns(
        candidates,
        lambda name: _sample(candidates[name], SAMPLE),
        rounds=rounds,
        patience=patience * max(seconds, lap),
    )


def _sample(work: Work, least: float) -> float:
    """Median seconds of the calls that fit into `least` seconds, at least one."""
    seconds: list[float] = []
    now = begun = time.perf_counter()
    while now - begun < least or not seconds:
        start = time.perf_counter()
        work()
        now = time.perf_counter()
        seconds.append(now - start)
    return median(seconds)
