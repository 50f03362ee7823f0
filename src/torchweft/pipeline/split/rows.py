"""The dependence of the values of forward() on the number of rows, found by recording it with two numbers of rows.

    step                4 rows      7 rows
    block(x)            [4, 5]      [7, 5]     rows: one axis is exactly the rows
    view(x, [20])       [20]        [35]       several: the axis has several rows for each that came in
    mean(x)             []          []         none
    x @ x.T             [4, 4]      [7, 7]     mixed: any other dependence

The second recording has one more row in front and two or more behind. They are copies of rows that are there, because
other rows could take another branch. Its values also show whether a row depends on other rows: if not, the rows of the
first recording are equal in both. Copies at one end only would hide a `cumsum`, and copies at both ends in equal
numbers a `flip`.
"""

import math
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any, Literal, NamedTuple, cast

from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage] # no public name

from torchweft.pipeline.split.compare import difference
from torchweft.pipeline.split.recording import Instruction, RecordedValue, Recording, TensorForm

FRONT = 1  # rows that the second recording has in front of those of the first one


class RowKind(NamedTuple):
    """The dependence of a tensor's shape on the number of rows, and the axis that depends on it."""

    name: Literal["rows", "several", "none", "mixed"]
    axis: int = 0


NONE, MIXED = RowKind("none"), RowKind("mixed")

# Dependence of a plain argument on the number of rows: it is the same, it is proportional, or it must not be compared.
Dependence = Literal["same", "proportional", "unknown"] | tuple["Dependence", ...]


class RowForm:
    """The kinds of the values of one form of a program, and the dependence of its plain arguments. Recordings with the
    same steps have the same form, whatever their sizes."""

    def __init__(self, first: Recording, second: Recording, rows: int, more: int, *, by_whole: bool = False) -> None:
        """`first` has `rows`, `second` has `more`. With `by_whole`, `second` has all rows, and other steps."""
        self.by_whole = by_whole
        # By the number of a step: that of its partner in the second recording.
        self.partners = _partners(first, second) if by_whole else _equal_beginning(first, second)
        # Values that enter the tail in any case, because it once used them: the numbers of step and leaf.
        self.wanted: set[tuple[int, int]] = set()
        self.kinds: dict[int, list[RowKind]] = {}
        self.arguments: dict[int, list[Dependence]] = {}
        # Leaves of results that are not tensors, by the numbers of step and leaf.
        self.plain: dict[tuple[int, int], Dependence] = {}
        for k, partner in self.partners.items():
            one, other = first.steps[k], second.steps[partner]
            # A size that depends on data could be that of the rows by chance.
            by_data = one.module is None and (one.dynamic or other.dynamic)
            if not by_data and len(one.makes) == len(other.makes):
                forms = zip(one.makes, other.makes, strict=True)
                self.kinds[k] = [_kind(x and x.form, y and y.form, rows, more) for x, y in forms]
            for (leaf, x), (_, y) in zip(one.plain, other.plain, strict=False):
                self.plain[k, leaf] = _dependence(x, y, rows, more)
            leaves = zip(one.leaves, other.leaves, strict=False)
            self.arguments[k] = [_dependence(x, y, rows, more) for x, y in leaves]

    def kinds_of(self, step: int, count: int) -> Sequence[RowKind]:
        return self.kinds.get(step) or [MIXED] * count

    def arguments_of(self, step: int) -> Sequence[Dependence]:
        return self.arguments.get(step, ())


def _equal_beginning(first: Recording, second: Recording) -> dict[int, int]:
    pairs = zip(first.steps, second.steps, strict=False)
    equal = takewhile(lambda pair: identity(pair[0]) == identity(pair[1]), pairs)
    return {k: k for k, _ in enumerate(equal)}


def _partners(first: Recording, second: Recording) -> dict[int, int]:
    words = [[(step.name, step.where, step.module) for step in recording.steps] for recording in (first, second)]
    blocks = SequenceMatcher(None, *words, autojunk=False).get_matching_blocks()
    return {one + k: other + k for one, other, size in blocks for k in range(size)}


def more_rows(rows: int) -> Iterator[tuple[int, list[int]]]:
    """Numbers of rows for a second recording, to be tried in turn, and the rows of the first one that they repeat."""
    for more in (rows + 3, rows + 4):
        yield more, [*[0] * FRONT, *range(rows), *[rows - 1] * (more - rows - FRONT)]


def follows(dependence: Dependence, recorded: Any, now: Any, rows: int, rows_now: int) -> bool:
    """Whether a plain argument is that of the recording with `rows`, as far as it is known to depend on them."""
    if isinstance(dependence, tuple):
        if type(now) is not type(recorded):
            return False
        before, after = _parts(recorded), _parts(now)
        return len(before) == len(after) and all(
            follows(of_part, x, y, rows, rows_now) for of_part, x, y in zip(dependence, before, after, strict=True)
        )
    if dependence == "same":
        return same(recorded, now)
    return dependence == "unknown" or (type(now) is int and now * rows == recorded * rows_now)


def same(recorded: Any, now: Any) -> bool:
    """Whether two plain arguments are equal, or the same object. NaN equals NaN."""
    if now is recorded:
        return True
    if type(now) is not type(recorded):
        return False
    if isinstance(now, tuple | list | slice):
        inside, before = _parts(now), _parts(recorded)
        return len(inside) == len(before) and all(map(same, before, inside))
    try:
        return bool(now == recorded) or (isinstance(now, float) and math.isnan(now) and math.isnan(recorded))
    except Exception:  # objects of the user
        return False


def find_mixed_rows(
    first: Recording,
    second: Recording,
    form: RowForm,
    rows: int,
    steps: Sequence[int],
    *,
    training: bool,
    front: int = FRONT,
) -> tuple[list[str], set[tuple[int, int]]]:
    """The first of `steps` that makes a row which depends on other rows of the mini-batch, in words; and the values
    that cannot be compared, by the numbers of step and leaf: those that depend on random numbers, or on a batch norm
    that uses its batch (in `training`, all of them do). `second` has `front` more rows before those of `first`."""
    random: set[RecordedValue] = set()
    for k in steps:
        if k not in form.partners:
            continue
        one, other = first.steps[k], second.steps[form.partners[k]]
        norms = one.module is not None and any(_uses_batch(m, training) for m in one.module.modules())
        if one.draws or norms or not random.isdisjoint(one.reads.values()):
            random.update(value for value in one.makes if value is not None)
            continue
        for x, y, kind in zip(one.makes, other.makes, form.kinds_of(k, len(one.makes)), strict=False):
            if x is None or y is None or kind.name not in ("rows", "several") or not isinstance(x.kept, Tensor):
                continue
            length = x.kept.shape[kind.axis]
            same_rows = y.kept.narrow(kind.axis, length // rows * front, length)
            if (fault := difference(x.kept, same_rows)) is not None:
                return [f"{one}: its rows differ {fault} if more rows are added"], set()
    return [], {(value.step, value.key) for value in random}


def _uses_batch(module: Any, training: bool) -> bool:
    return isinstance(module, _NormBase) and (training or module.running_mean is None)


def identity(step: Instruction) -> tuple[Any, ...]:
    """The call of a step and the origins of its tensors, without the plain arguments. Hashable."""
    # Constants are left out of the reads: each recording has values of its own for them.
    reads = tuple([(k, v.kind, v.step, None if v.kind == "const" else v.key) for k, v in step.reads.items()])
    return step.name, step.where, step.module, len(step.makes), len(step.leaves), step.names, reads


def _kind(one: TensorForm | None, other: TensorForm | None, rows: int, more: int) -> RowKind:
    if one is None or other is None:
        return NONE
    if len(one.shape) != len(other.shape):
        return MIXED
    axes = [k for k, (x, y) in enumerate(zip(one.shape, other.shape, strict=True)) if x != y]
    if not axes:
        return NONE
    x, y = one.shape[axes[0]], other.shape[axes[0]]
    if len(axes) > 1 or x * more != y * rows or x % rows:
        return MIXED
    return RowKind("rows" if x == rows else "several", axes[0])


def _dependence(one: Any, other: Any, rows: int, more: int) -> Dependence:
    if type(one) is not type(other):
        return "unknown"
    if isinstance(one, tuple | list | slice):
        parts, others = _parts(one), _parts(other)
        if len(parts) != len(others):
            return "unknown"
        of_parts: list[Dependence] = [_dependence(x, y, rows, more) for x, y in zip(parts, others, strict=True)]
        return "same" if all(part == "same" for part in of_parts) else tuple(of_parts)
    if same(one, other):
        return "same"
    return "proportional" if type(one) is int and one * more == other * rows else "unknown"


def _parts(container: Any) -> Sequence[Any]:
    if isinstance(container, slice):
        parts = cast("slice[Any, Any, Any]", container)
        return parts.start, parts.stop, parts.step
    return cast("Sequence[Any]", container)
