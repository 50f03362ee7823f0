"""The calls that forward() is expected to make, by its recording, and the comparison of a call with them."""

from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torchweft.core import torch_internals as internals
from torchweft.core.pytree import Structure, flatten
from torchweft.core.segment import version
from torchweft.pipeline.split.open_state import PLAIN
from torchweft.pipeline.split.recording import (
    FORMS,
    HERE,
    Instruction,
    RecordedValue,
    Recording,
    Values,
    tensor_of,
)
from torchweft.pipeline.split.rows import Dependence, follows, identity, same
from torchweft.pipeline.split.tail import Tail

_SMALL = 4096  # the elements of a constant tensor that is compared by value


class Answer(Tensor):
    """A tensor without numbers, in the place of a value that the stages compute."""

    place: tuple[int, int]  # the number of the step that makes it, and of the leaf in its result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FORMS:
            return cast(Any, super()).__torch_function__(func, types, args, kwargs or {})
        answer = next(x for x in flatten((args, kwargs or {}))[0] if isinstance(x, Answer))
        raise TailNeedsMore(*answer.place)


class TailNeedsMore(BaseException):
    """The tail uses a value that it did not use when it was recorded, and that the stages have not kept.

    Not an Exception, so that the user's code does not catch it.
    """

    def __init__(self, step: int, leaf: int) -> None:
        super().__init__(step, leaf)
        self.place = step, leaf


class ExpectedCalls:
    """The calls of one recording with that many `rows`."""

    def __init__(self, model: nn.Module, recording: Recording, tail: Tail, rows: int) -> None:
        self._model, self._tail, self.rows = model, tail, rows
        form = tail.form
        self.recording = recording
        self.blocks = list(dict.fromkeys(step.module for step in self.steps if step.module is not None))
        self._plain = [_plain_arguments(step, None if form is None else form.arguments_of(k))
                       for k, step in enumerate(self.steps)]  # fmt: skip
        self._reads = [list(step.reads.items()) for step in self.steps]
        self._versions = {v: version(v.key) for step in self.steps for v in step.reads.values() if v.kind == "const"}
        # Inputs that become another value, by a write in place or because a block returns it.
        changed = {step.reads.get(k) for step in self.steps for k in (*step.writes, *step.same.values())}
        self._changed = [k for k, value in enumerate(recording.inputs) if value in changed]
        self._slots: dict[str, tuple[dict[str, Any], str]] = {}
        self.runs_hooks = False  # whether forward hooks of blocks run when these are answered
        self._implied: WeakKeyDictionary[ExpectedCalls, bool] = WeakKeyDictionary()
        self._shapes: dict[int, dict[RecordedValue, tuple[int, ...]]] = {}
        self._bases: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    @property
    def steps(self) -> list[Instruction]:
        return self.recording.steps

    def inputs(self, leaves: Sequence[Any]) -> list[Any]:
        """The arguments of forward(). An object that becomes another value is replaced by a view of it."""
        if not self._changed:
            return list(leaves)
        # The same object in two places stays one object, which forward() can compare.
        changed = {id(leaves[k]) for k in self._changed if isinstance(leaves[k], Tensor)}
        views = {id(x): x.view_as(x) for x in leaves if id(x) in changed}
        return [views.get(id(x), x) for x in leaves]

    def is_call(self, k: int, function: Any, module: nn.Module | None) -> bool:
        """Whether step `k` calls this function or module."""
        step = self.steps[k]
        return step.module is module and (module is not None or step.function is function or step.function == function)

    def leaves_of(self, k: int, args: Any, kwargs: dict[str, Any]) -> Sequence[Any]:
        return [*args, *kwargs.values()] if self.steps[k].structure is None else flatten((args, kwargs))[0]

    def fault(self, k: int, args: Any, kwargs: dict[str, Any], values: Values, rows: int) -> str | None:
        """The difference of a call from step `k`, in words. `values` are the objects of this run."""
        step = self.steps[k]
        if step.structure is None:
            leaves: Sequence[Any] = [*args, *kwargs.values()]
            nested = tuple(kwargs) == step.names
        else:
            leaves, structure = flatten((args, kwargs))
            nested = structure == step.structure
        if not nested or len(leaves) != len(step.leaves):
            return f"it calls {step} with other arguments"
        if (plain := self._fault_of_leaves(k, leaves, rows)) is not None:
            return f"it {plain}"
        for j, value in self._reads[k]:
            if not self._is_value(value, leaves[j], values):
                return f"it calls {step} with another tensor as argument {j}"
        return None

    def fault_of_plain(self, k: int, args: Any, kwargs: dict[str, Any], rows: int) -> str | None:
        """The difference of the plain arguments of a call from those of step `k`, in words."""
        return self._fault_of_leaves(k, self.leaves_of(k, args, kwargs), rows)

    def _fault_of_leaves(self, k: int, leaves: Sequence[Any], rows: int) -> str | None:
        step = self.steps[k]
        for j, dependence in self._plain[k]:
            if not follows(dependence, step.leaves[j], leaves[j], self.rows, rows):
                return f"calls {step} with {leaves[j]!r} instead of {step.leaves[j]!r}"
        return None

    def tolerate(self, k: int) -> bool:
        """Compare no more the arguments of step `k` that are other objects at every call. False if there are none."""
        if k >= len(self.steps):
            return False
        before = self._plain[k]
        self._plain[k] = [entry for entry in before if is_plain(self.steps[k].leaves[entry[0]])]
        return len(self._plain[k]) < len(before)

    def implied_by(self, other: "ExpectedCalls") -> bool:
        """Whether forward() makes these calls if it makes those of `other`, which has other rows or decisions."""
        if other not in self._implied:
            self._implied[other] = self._is_implied_by(other)
        return self._implied[other]

    def _is_implied_by(self, other: "ExpectedCalls") -> bool:
        if len(self.steps) != len(other.steps):
            return False
        for k, (step, known) in enumerate(zip(self.steps, other.steps, strict=True)):
            if identity(step) != identity(known) or step.modes != known.modes or not same(step.expects, known.expects):
                return False
            if any(v.key is not known.reads[j].key for j, v in self._reads[k] if v.kind == "const"):
                return False
            if not all(follows(of_leaf, known.leaves[j], step.leaves[j], other.rows, self.rows)
                       for j, of_leaf in self._plain[k]):  # fmt: skip
                return False
        return True

    def takes_answers(self, k: int, args: Any, kwargs: dict[str, Any], values: Values) -> bool:
        """Whether a call has the values of the stages that step `k` reads, as far as this run has them."""
        leaves = self.leaves_of(k, args, kwargs)
        if len(leaves) != len(self.steps[k].leaves):
            return False
        of_stages = [(j, v) for j, v in self._reads[k] if v.kind == "made" and self._tail.ways[v.step] == "answer"]
        return bool(of_stages) and all(values.get(value) is leaves[j] for j, value in of_stages)

    def fault_of_result(self, leaves: Sequence[Any], structure: Structure, values: Values) -> str | None:
        """The difference of the result of forward() from that of the recording, in words."""
        recording = self.recording
        if structure != recording.structure:
            return "it returns another structure"
        for k, x in enumerate(leaves):
            if k in recording.reads:
                if not self._is_value(recording.reads[k], x, values):
                    return "it returns another tensor"
            elif isinstance(x, PLAIN) and not same(recording.leaves[k], x):
                return f"it returns {x!r} instead of {recording.leaves[k]!r}"
        return None

    def own(self, value: RecordedValue) -> Tensor:
        """The tensor of the model that has the name of the value."""
        if value.key not in self._slots:
            path, _, key = value.key.rpartition(".")
            module = self._model.get_submodule(path)
            table = cast("dict[str, Any]", module._parameters if key in module._parameters else module._buffers)
            self._slots[value.key] = table, key
        table, key = self._slots[value.key]
        return table[key] if key in table else tensor_of(self._model, value.key)

    def answer(self, value: RecordedValue, place: tuple[int, int], rows: int) -> Any:
        """An object in the place of a value of the stages, for a run with that many rows."""
        form = value.form
        if form is None:
            return object()  # forward() can only pass it on
        shapes = self._shapes.get(rows)
        if shapes is None:
            self._shapes = {rows: (shapes := {})}  # other rows than at the last step are rare
        if value not in shapes:
            shapes[value] = self._scaled(value, form.shape, rows)
        key = form.dtype, form.device
        if key not in self._bases:
            self._bases[key] = torch.empty((), dtype=form.dtype, device=form.device)
        # One element for all, so that an answer takes no memory.
        answer = cast(
            Answer, internals.make_subclass(Answer, self._bases[key].expand(shapes[value]), form.requires_grad)
        )
        answer.place = place
        return answer

    def _scaled(self, value: RecordedValue, shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
        kind = self._tail.kind_of(value)
        if rows == self.rows or kind.name not in ("rows", "several"):
            return shape
        return (*shape[: kind.axis], shape[kind.axis] // self.rows * rows, *shape[kind.axis + 1 :])

    def _is_value(self, value: RecordedValue, x: Any, values: Values) -> bool:
        if value.kind == "own":
            return x is self.own(value)
        if value.kind == "const":
            return self._is_constant(value, x)
        return x is values.get(value)

    def _is_constant(self, value: RecordedValue, x: Any) -> bool:
        constant: Tensor = value.key
        if x is constant:
            return True  # the stages use the same object, so they see its present contents
        if not isinstance(x, Tensor) or (x.shape, x.dtype, x.device) != (
            constant.shape,
            constant.dtype,
            constant.device,
        ):
            return False
        if x.data_ptr() == constant.data_ptr() and x.stride() == constant.stride():
            return True
        # The recording's own copy can have changed since, and then the stages would use what the caller does not.
        unchanged = version(constant) == self._versions[value]
        return unchanged and x.numel() <= _SMALL and bool(torch.isclose(x, constant, 0, 0, equal_nan=True).all())


def _plain_arguments(step: Instruction, dependences: Sequence[Dependence] | None) -> list[tuple[int, Dependence]]:
    """The arguments of a step that are compared by value, and how each depends on the number of rows."""
    found: list[tuple[int, Dependence]] = []
    for j, leaf in enumerate(step.leaves):
        if j in step.reads or leaf is HERE:
            continue
        dependence = "same" if dependences is None else dependences[j] if j < len(dependences) else "unknown"
        if dependence != "unknown":
            found.append((j, dependence))
    return found


def is_plain(leaf: Any) -> bool:
    """Whether an argument is compared by value. A slice between tensors is not: they are read within the function."""
    if isinstance(leaf, slice):
        part = cast("slice[Any, Any, Any]", leaf)
        return all(isinstance(x, int | None) for x in (part.start, part.stop, part.step))
    if isinstance(leaf, tuple | list):
        return all(map(is_plain, cast("Sequence[Any]", leaf)))
    return isinstance(leaf, PLAIN) or leaf is Ellipsis
