"""The programs of a model by key, and those that one step has tried."""

import warnings
from collections.abc import Collection, Hashable, Sequence
from itertools import count
from typing import Any

from torch import Tensor

from torchweft.pipeline.split.program import (
    Program,
    ProgramGroup,
)
from torchweft.pipeline.split.recording import (
    Owned,
)

PROGRAMS = 256  # that a pipe keeps
TRIED = 4  # programs of one key that a step compares with forward() before it records another one


class ProgramCache:
    """The programs of a model by key. Beyond `PROGRAMS`, the least recently used one is dropped."""

    def __init__(self, model: str) -> None:
        self._model, self._warned = model, False
        # Several programs can have one key: their guards decide which one fits a micro-batch.
        self._programs: dict[Hashable, list[Program]] = {}
        self._groups: dict[Hashable, ProgramGroup] = {}
        # Key and anchors of each program, in the order of their last use. A key holds the id() of arguments that it
        # cannot compare. The anchors are these arguments, so that no other object gets their id().
        self._used: dict[Program, tuple[Hashable, Sequence[Any]]] = {}
        self._order: dict[Program, int] = {}  # the time of the last use
        self._clock = count()

    def find(
        self, key: Hashable, leaves: Sequence[Any], owned: Owned, excluded: Collection[Program] = ()
    ) -> Program | None:
        """A program of this key, with guards that accept the leaves of a micro-batch. The last used ones come first."""
        known = [program for program in self._programs.get(key, ()) if program not in excluded]
        # Each of them is compared with forward() before it runs. After some, recording another one costs less.
        known = sorted(known, key=self._order.__getitem__, reverse=True)[: max(0, TRIED - len(excluded))]
        program = next((program for program in known if program.fits(leaves, owned)), None)
        if program is not None:
            self._used[program] = self._used.pop(program)
            self._order[program] = next(self._clock)
        return program

    def add(self, key: Hashable, program: Program, form: Hashable, leaves: Sequence[Any]) -> Program | None:
        """Add a program to the group of its form. Returns the program to drop if there are too many."""
        # A group only saves comparisons, so it can be forgotten at any time.
        if len(self._groups) >= PROGRAMS:
            self._groups.clear()
        program.join_group(self._groups.setdefault(form, program.group))
        self._programs.setdefault(key, []).append(program)
        self._used[program] = key, [x for x in leaves if not isinstance(x, Tensor)]
        self._order[program] = next(self._clock)
        if len(self._used) <= PROGRAMS:
            return None
        if not self._warned:
            warnings.warn(
                f"more than {PROGRAMS} programs of {self._model} were recorded, and old ones are dropped: shapes, "
                "arguments, or values that the code between blocks reads from its inputs change at nearly every step. "
                "Pad to a few lengths, pass numbers that change as tensors without dimensions, or move such decisions "
                "into a submodule",
                stacklevel=2,
            )
        self._warned = True
        return next(iter(self._used))

    def replace(self, old: Program, new: Program) -> None:
        """Put a program in the place of another one of the same recording."""
        key, anchors = self._used.pop(old)
        self._used[new], self._order[new] = (key, anchors), self._order.pop(old)
        self._programs[key] = [new if program is old else program for program in self._programs[key]]
        new.join_group(old.group)

    def drop(self, program: Program) -> None:
        """Remove a program, unless it was removed before."""
        if program in self._used:
            key = self._used.pop(program)[0]
            del self._order[program]
            self._programs[key].remove(program)
            if not self._programs[key]:
                del self._programs[key]


class Trials:
    """The programs that one step has tried so far: those that forward() does not follow, and those recorded for it."""

    def __init__(self) -> None:
        self.excluded: set[Any] = set()
        self.recorded: dict[Any, int] = {}  # with the micro-batch that each was recorded on
