"""Races against the clock: as many rounds as fit into some seconds, where one round may take half a minute.

    seconds   |- round -|- round -|- round -|                    short works: many calls make a sample
    seconds   |------------------ round ------------------|      a long one: one call each, and one round

`harness.race` runs everything twice before the first round and as many rounds as it was told; works that take 16 s
want less. And a sample lasts as long as it was meant to, however slow a candidate becomes: two threads that fight for
cores with other processes can take a thousand times longer. Turns, ratios and the rejection of disturbed rounds are
as there.
"""

import time
from collections.abc import Mapping
from statistics import median

from benchmarks.harness import PATIENCE, Race, Work, in_turns

SAMPLE = 0.1
"""Seconds that a sample takes at least: ten ticks of the clock that knows what other processes do."""
LONG = 5.0
"""Seconds of a round from which one is enough."""


def race_for(
    candidates: Mapping[str, Work],
    seconds: float,
    *,
    most: int = 9,
    expected: Mapping[str, float] | None = None,
    patience: float = PATIENCE,
) -> Race:
    """Run the candidates in turn for about `seconds`, but at least two rounds, or one if it is long.

    They must have run before. `expected` are the seconds of each where they are known well enough; without, every
    candidate is run once more to learn them. Disturbed rounds are run again, up to `patience` times the seconds; then
    the least disturbed ones count, and `Race.note` says so.
    """
    times = expected or {name: _sample(work, 0.0) for name, work in candidates.items()}
    lap = sum(max(each, SAMPLE) for each in times.values())
    rounds = min(max(int(seconds / lap), 1 if lap > LONG else 2), most)
    return in_turns(
        candidates,
        lambda name: _sample(candidates[name], SAMPLE),
        rounds=rounds,
        patience=patience * max(seconds, lap),
    )


def _sample(work: Work, least: float) -> float:
    """The median seconds of a call, of as many as take `least` seconds; of one, if that takes longer."""
    seconds: list[float] = []
    now = begun = time.perf_counter()
    while now - begun < least or not seconds:
        start = time.perf_counter()
        work()
        now = time.perf_counter()
        seconds.append(now - start)
    return median(seconds)
