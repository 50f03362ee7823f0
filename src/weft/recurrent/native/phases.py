"""When each value is made: in bulk for all steps, or in which loop over time.

    level 0   bulk: products of inputs            x W for T x N rows at once
              loop: what they wait for
    level 1   bulk, loop ...
    main      the one loop whose steps depend on each other: the carried values, and what is cheap beside them
    later     bulk: products of the main loop's values; sums over time for parameters

Only matrix products and sums over time are done in bulk; elementwise values go into the loop that reads them, where
they are made of numbers that are still in the cache.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from weft.recurrent.native.values import Product, Total, Value, leading, sources


@dataclass
class Phase:
    """Bulk work, then a loop. `main` marks the loop that carries."""

    bulk: list[Value] = field(default_factory=list[Value])
    loop: list[Value] = field(default_factory=list[Value])
    main: bool = False


@dataclass
class Phases:
    """In order of running; `at` says of a value in which phase's loop or bulk it is made."""

    phases: list[Phase]
    at: dict[Value, int]
    bulk: set[Value]

    def apart(self, value: Value, readers: Iterable[Value]) -> bool:
        """Whether a value must be kept for all steps, as it is read in another phase or in bulk, or made in bulk."""
        return value in self.bulk or any(self.at[each] != self.at[value] or each in self.bulk for each in readers)

    def late(self, value: Value, main: int) -> bool:
        """Whether a value is made when the main loop, of this number, is over."""
        return self.at[value] != main or value in self.bulk

    def begin(self, value: Value, phase: int) -> None:
        """Make a new value first of all in a loop."""
        self.at[value] = phase
        self.phases[phase].loop.insert(0, value)

    def finish(self, value: Value, phase: int) -> None:
        """Make a new value last of all in a loop."""
        self.at[value] = phase
        self.phases[phase].loop.append(value)


def arrange(values: Sequence[Value], carried: Sequence[Value], ends: Iterable[Value]) -> Phases:
    """Give every value its phase. `values` are in order of making, `carried` come from the step before, `ends` are what
    that step becomes."""
    from_carry = _reached(values, carried)
    ends = list(ends)
    to_ends = leading(ends)
    recurrent = {each for each in values if each in from_carry and each in to_ends}
    heavy = {v for v in values if isinstance(v.made, Total) or (isinstance(v.made, Product) and v not in recurrent)}
    level: dict[Value, int] = {}

    def after(value: Value) -> int:
        return max((level.get(each, -1) for each in sources(value.made)), default=-1)

    early = [each for each in values if each not in from_carry]
    for value in early:
        level[value] = after(value) + (value in heavy)
    ready = [*ends, *(s for v in recurrent for s in sources(v.made))]
    main = max([0, *(level.get(each, -1) for each in ready)])
    level.update(dict.fromkeys(carried, main))
    for value in values:
        if value in from_carry:
            level[value] = main if value in recurrent else max(main, after(value)) + (value in heavy)
    _as_late_as_can_be(early, values, heavy, level, main)
    found = [Phase() for _ in range(max([main, *level.values()]) + 2)]
    for value in values:
        phase = found[level[value] + 1]
        (phase.bulk if value in heavy else phase.loop).append(value)
    found[main + 1].main = bool(carried)
    return Phases(found, {value: level[value] + 1 for value in values}, heavy)


def _as_late_as_can_be(
    early: Sequence[Value], values: Sequence[Value], heavy: set[Value], level: dict[Value, int], main: int
) -> None:
    """Move what is cheap and made before the main loop to the loop that reads it first."""
    readers: dict[Value, list[Value]] = {}
    for value in values:
        for each in sources(value.made):
            readers.setdefault(each, []).append(value)
    for value in reversed(early):
        if value not in heavy:
            limits = [level[each] - (each in heavy) for each in readers.get(value, [])]
            level[value] = min(limits, default=max(level[value], main))


def _reached(values: Sequence[Value], starts: Sequence[Value]) -> set[Value]:
    found = set(starts)
    for value in values:
        if any(each in found for each in sources(value.made)):
            found.add(value)
    return found - set(starts)
