"""One generated function: what it is given, what it makes, and where every value lives.

argument   memory of the caller's, one row per step (states one row more), or the same for all steps
stack      one row per step, in the workspace: read in another phase than made
local      one row, for each thread: read in the loop that makes it
nowhere    only within one group of elementwise operators: a variable

slot       a piece of a concatenation: made where it shall lie, so that nothing is copied
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from weft.recurrent.native.phases import Phases, arrange
from weft.recurrent.native.place import Place, Row
from weft.recurrent.native.values import Cat, Point, Ref, Total, Value, leading, natural, refs, replaced, seen, sources


@dataclass(eq=False)
class Argument:
    """Memory that the caller gives, by position."""

    name: str
    dtype: torch.dtype
    size: int
    row: Row


@dataclass(eq=False)
class Function:
    """What is to be generated. Fill in, then `settle`."""

    name: str
    backward: bool = False
    arguments: list[Argument] = field(default_factory=list[Argument])
    homes: dict[Value, Place] = field(default_factory=dict[Value, Place])
    """Where each value lies as a whole."""
    carried: list[tuple[Value, Value | None]] = field(default_factory=list["tuple[Value, Value | None]"])
    """What comes from the step before, and what it becomes; None for zeros."""
    added: list[tuple[Value, Argument]] = field(default_factory=list["tuple[Value, Argument]"])
    """What the caller adds to a carried value before a step reads it."""
    wanted: list[tuple[Ref, Argument]] = field(default_factory=list["tuple[Ref, Argument]"])
    """What is to be written, and where."""
    totals: list[tuple[Value, Ref]] = field(default_factory=list["tuple[Value, Ref]"])
    """Sums over all steps, and what they are added to."""
    values: list[Value] = field(default_factory=list[Value])
    """All that is made, in order."""
    readers: dict[Value, list[Value]] = field(default_factory=dict[Value, list[Value]])
    stacks: list[Value] = field(default_factory=list[Value])
    locals: dict[Value, None] = field(default_factory=dict[Value, None])
    slots: set[Value] = field(default_factory=set[Value])
    phases: Phases = field(default_factory=lambda: Phases([], {}, set()))

    # -- filling in -------------------------------------------------------------------------------------------------

    def argument(self, name: str, dtype: torch.dtype, size: int, row: Row) -> Argument:
        """A new argument, behind those that there are."""
        self.arguments.append(Argument(name, dtype, size, row))
        return self.arguments[-1]

    def given(self, name: str, shape: Sequence[int], dtype: torch.dtype, row: Row) -> Value:
        """A new argument that is read as a value."""
        value = Value(name, tuple(shape), dtype, None, row != "same")
        self.argument(name, dtype, value.size, row)
        self.live(value, name, row)
        return value

    def live(self, value: Value, base: str, row: Row) -> None:
        """Give a value memory of its own."""
        self.homes[value] = Place(base, row, value.size, natural(value.shape, value.dtype).stride())

    # -- places -----------------------------------------------------------------------------------------------------

    def place(self, ref: Ref) -> Place:
        """The elements of a view."""
        home = self.homes[ref.value]
        if ref.value in self.slots:
            assert ref.whole
            return home
        return home.seen(tuple(ref.at.stride()), int(ref.at.storage_offset()))

    def stored(self, value: Value, group: Sequence[Value]) -> bool:
        """Whether a value of a group is read outside of it, and so needs memory."""
        return value not in self.locals or any(each not in group for each in self.readers[value])

    # -- settling ---------------------------------------------------------------------------------------------------

    def settle(self, made: Sequence[Value]) -> None:
        """Decide on copies, phases and homes. `made` are all values in order of making."""
        values = list(made)
        targets = self._targets(values)
        ends = [value for value, argument in targets.items() if argument.row in ("next", "out")]
        wanted = leading([*targets, *(total for total, _ in self.totals)])
        values = [value for value in values if value in wanted]
        self.phases = arrange(values, [start for start, _ in self.carried], ends)
        self._copy_carried(values)
        self.values = values = self._copies_of_passing(values, targets)
        self.readers = {value: [] for value in values}
        for value in values:
            for each in sources(value.made):
                self.readers.setdefault(each, []).append(value)
        for value, argument in targets.items():
            self.live(value, argument.name, argument.row)
        for value in values:
            if not isinstance(value.made, Total):
                self._house(value)

    def _targets(self, values: list[Value]) -> dict[Value, Argument]:
        """What is made right where it is wanted; copies, added to the values, of all that cannot be."""
        targets: dict[Value, Argument] = {}
        for ref, argument in self.wanted:
            value = ref.value
            if not ref.whole or value.made is None or value in targets or isinstance(value.made, Total):
                value = _copy(f"{argument.name}_copy", ref)
                values.append(value)
            targets[value] = argument
        return targets

    def _copy_carried(self, values: list[Value]) -> None:
        """A carried value in memory of two rows is gone when bulk work reads it: that reads a copy, a row per step."""
        main = next((i for i, each in enumerate(self.phases.phases) if each.main), 0)
        for start, _ in self.carried:
            late = [each for each in values if start in sources(each.made) and self.phases.late(each, main)]
            if late and not self.homes[start].lasting:
                copy = _copy(f"{start}_copy", seen(start))
                values.insert(0, copy)
                self.phases.begin(copy, main)
                for each in late:
                    assert each.made is not None
                    each.made = replaced(each.made, start, copy)

    def _copies_of_passing(self, values: list[Value], targets: dict[Value, Argument]) -> list[Value]:
        """A carried value that bulk work reads needs a row per step beside the two rows that it passes through; into
        these only the main loop writes, which reads them."""
        found = list(values)
        main = next((i for i, each in enumerate(self.phases.phases) if each.main), 0)
        for value, argument in list(targets.items()):
            readers = [each for each in values if value in sources(each.made)]
            elsewhere = self.phases.late(value, main) or self.phases.apart(value, readers)
            if argument.row == "out" and elsewhere:
                copy = _copy(f"{argument.name}_copy", seen(value))
                found.insert(found.index(value) + 1, copy)
                self.phases.finish(copy, main)
                targets[copy] = targets.pop(value)
        return found

    def _house(self, value: Value) -> None:
        """Find memory for a value: an argument's, within a concatenation, a stack or a local."""
        if value in self.homes:
            return
        readers = self.readers[value]
        cat = self._slotted(value, readers)
        if cat is not None:
            self.slots.add(value)
            self._house(cat)
            self.homes[value] = self._slot(value, cat)
        elif self.phases.apart(value, readers):
            self.stacks.append(value)
            self.live(value, f"s_{value}", "step")
        else:
            self.locals[value] = None
            self.live(value, f"l_{value}", "same")

    def _slotted(self, value: Value, readers: list[Value]) -> Value | None:
        """The concatenation in which a value is made: if it is read there whole, once, and nowhere as a view."""
        at, cats = self.phases.at, [each for each in readers if isinstance(each.made, Cat)]
        if len(cats) != 1 or not isinstance(value.made, Point):
            return None
        if any(at[each] != at[value] or each in self.phases.bulk for each in readers):
            return None
        views = [ref for each in readers for ref in refs(each.made) if ref.value is value]
        return cats[0] if all(ref.whole for ref in views) else None

    def _slot(self, value: Value, cat: Value) -> Place:
        """Its place in there."""
        assert isinstance(cat.made, Cat)
        home, before = self.homes[cat], 0
        for piece in cat.made.pieces:
            if piece.value is value:
                break
            before += piece.shape[cat.made.axis]
        return home.seen(home.strides, home.offset + before * home.strides[cat.made.axis])


def _copy(name: str, ref: Ref) -> Value:
    return Value(name, ref.shape, ref.value.dtype, Point("{0}", [ref], ref.value.dtype))
