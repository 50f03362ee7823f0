"""Groups of recordings that differ only in sizes, so that a few verifications serve for all of them.

    (2, 11)    view(-1, 11)   arange(11)   eq(22)        verified
    (3, 7)     view(-1, 7)    arange(7)    eq(21)        same steps; the integers follow the sizes: verified, too
    (5, 17)    view(-1, 17)   arange(17)   eq(85)        as the two before: nothing new to verify

Each key still gets a recording of its own. So branches, clamps and tables that go by a length are those of forward()
itself, and no number is ever computed from a guess. A group only says which recordings would show nothing new in a
comparison with the plain forward.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch import Tensor

from weft.pipeline.split.program import Program, RecordedValue, Recording, Step
from weft.pipeline.split.record import PLAIN

GROUPS = 64
"""How many groups are kept; the oldest one goes first."""

_ENOUGH = 3  # recordings
_SAMPLES = 8  # recordings of a group whose integers are kept


@dataclass(eq=False)
class RecordingGroup:
    """Recordings with equal steps, whose integers follow the sizes of the inputs."""

    anchor: Program  # while it lives, the ids in the form of its recording stay those of its objects
    samples: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list[Any])
    """Of some recordings, the sizes of the inputs and all integers."""
    verified: Counter[bool] = field(default_factory=Counter[bool])
    """How many recordings were compared with the plain forward on another micro-batch than their own: in steps whose
    outputs are joined of several micro-batches (True), which includes a check of their order, and in others."""

    def is_proven(self, *, joined: bool) -> bool:
        """Whether one more recording needs no verification."""
        return self.verified[True] + (0 if joined else self.verified[False]) >= _ENOUGH

    @property
    def is_common(self) -> bool:
        """Whether several recordings differed only in sizes."""
        return len(self.samples) >= _ENOUGH


class RecordingGroups:
    """The groups of one model."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, list[RecordingGroup]] = {}
        self._of: WeakKeyDictionary[Program, RecordingGroup] = WeakKeyDictionary()

    def __getitem__(self, program: Program) -> RecordingGroup:
        return self._of[program]

    def join(self, program: Program, leaves: Sequence[Any], context: Hashable) -> None:
        """Find the group of a program, recorded on these leaves, or make one. Programs of different contexts
        are never in one group."""
        numbers: list[int] = []
        form = context, tuple(map(_kind, leaves)), _form(program.recording, numbers)
        sizes = tuple(size for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape)
        sample = sizes, tuple(numbers)
        groups = self._groups.setdefault(form, [])
        group = next((each for each in groups if _follow([*each.samples, sample])), None)
        if group is None:
            group = RecordingGroup(program)
            groups.append(group)
            if sum(map(len, self._groups.values())) > GROUPS:
                oldest = next(iter(self._groups))
                self._groups[oldest].pop(0)
                if not self._groups[oldest]:
                    del self._groups[oldest]
        if sample not in group.samples and len(group.samples) < _SAMPLES:
            group.samples.append(sample)
        self._of[program] = group


def _follow(samples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether each integer is the same in all samples, or follows one size, or a product of two."""
    columns = set(zip(*(sizes for sizes, _ in samples), strict=True))
    columns |= {tuple(x * y for x, y in zip(*pair, strict=True)) for pair in combinations(columns, 2)}
    return all(
        len(set(column)) == 1 or any(_follows(column, base) for base in columns)
        for column in set(zip(*(numbers for _, numbers in samples), strict=True))
    )


def _follows(numbers: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether integers have one difference from a size that changes, or one ratio to it, in all samples."""
    pairs = list(zip(numbers, sizes, strict=True))
    same_difference = len({number - size for number, size in pairs}) == 1
    return same_difference or all(number * sizes[0] == numbers[0] * size for number, size in pairs)


def _kind(leaf: Any) -> Hashable:
    """An argument without its sizes."""
    if isinstance(leaf, Tensor):
        return leaf.dim(), leaf.dtype, leaf.requires_grad, leaf.device
    return _masked(leaf, None)


def _form(recording: Recording, numbers: list[int]) -> Hashable:
    """All that a recording holds but its integers, which are added to `numbers`."""
    steps = recording.steps
    if any(len(step.stored) > 1 for step in steps):
        return object()  # such writes have no order to number their storages by: equal to no other form
    written = {storage for step in steps for storage in step.stored}
    storages: dict[Any, int] = {}
    values: dict[RecordedValue, int] = {}

    def place(storage: int | None) -> int | None:
        """The number of a storage, if a step writes into it."""
        return storages.setdefault(storage, len(storages)) if storage in written else None

    def known(value: RecordedValue | None) -> Hashable:
        if value is None:
            return None
        if value.kind in ("own", "const"):
            return value.kind, value.key if value.kind == "own" else id(value.key)
        return values.setdefault(value, len(values)), value.kind, value.key, place(value.storage)

    inputs = tuple(map(known, recording.inputs))
    return (
        inputs,
        tuple(_step_form(step, known, numbers, [place(storage) for storage in step.stored]) for step in steps),
        tuple(recording.cuts.items()),
        tuple((k, known(value)) for k, value in recording.reads.items()),
        _masked(recording.leaves, numbers),
        recording.structure,
        recording.has_scalars,
        tuple(recording.aliases),
    )


def _step_form(
    step: Step, known: Callable[[RecordedValue | None], Hashable], numbers: list[int], stored: Sequence[int | None]
) -> Hashable:
    call = (step.call.func, _masked(step.call.args, None)) if isinstance(step.call, partial) else step.call
    return (
        (step.name, step.where, call, step.names, step.structure, id(step.module), step.draws, step.dynamic),
        tuple((k, known(value)) for k, value in step.reads.items()),
        tuple(map(known, step.makes)),
        (*step.writes, *stored),
        _masked(step.leaves, numbers),
        tuple((k, _masked(each, numbers)) for k, each in (*step.plain, *sorted(step.shapes.items()))),
        _masked(step.expects, numbers),
    )


def _masked(value: Any, numbers: list[int] | None) -> Hashable:
    """A constant in a form that can be hashed. Its integers are left out, and added to `numbers` if that is given."""
    kind = cast("type[Any]", type(value))
    if kind is int and numbers is not None:
        numbers.append(value)
        return kind
    if isinstance(value, tuple | list):
        return kind, *(_masked(each, numbers) for each in cast("Sequence[Any]", value))
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return kind, *((_masked(key, None), _masked(each, numbers)) for key, each in items)
    if isinstance(value, slice | range):
        bounds = cast("list[Any]", [value.start, value.stop, value.step])
        return kind, *(_masked(each, numbers) for each in bounds)
    if isinstance(value, float | complex):
        return kind, repr(value)  # 0.0 == -0.0, and nan != nan
    return kind, value if isinstance(value, PLAIN) else id(value)
