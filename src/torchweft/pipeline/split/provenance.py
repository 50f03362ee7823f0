"""The origin of every value in one run of forward(): an input, a tensor of the model, a constant, or a recorded step.

    x (id 7)  -> in0                  known before the run
    y (id 9)  -> %3, leaf 0           made by a step; written in place by step 5: %5, leaf -1
    z (id 8)  -> made in block h.2    seen by the dispatch mode only: the block has to be opened

Values are found by the id() of their object, because a view and its base share a storage but are different values. An
id() is valid while its object lives, so all known objects are referenced until the end of the run.
"""

import weakref
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from torchweft.core.errors import SplitError
from torchweft.core.segment import held_values, version
from torchweft.pipeline.microbatch import storage_id
from torchweft.pipeline.split.modules import OpenModules
from torchweft.pipeline.split.open_state import PLAIN
from torchweft.pipeline.split.recording import Instruction, Reads, RecordedValue, Recording, TensorForm

_DYNAMIC = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
# The operator by which a tensor of foreign memory appears, as that of torch.from_numpy. Function modes see it only
# under a dispatch mode, so it is not a step. Its result is a constant.
LIFT: Any = torch.ops.aten.lift_fresh.default
_SHARED = (
    "blocks share tensors through it, which stages cannot see; let blocks take and return them in a tuple, list or "
    "dict, or cut at a point where no tensors are shared (Gemma-3n's layers share keys and values)"
)
# The result of a step, whether it drew random numbers, and whether its shape depends on data.
Observed = tuple[Any, list[bool]]
# All tensors made in a run, by their id(), with the block that made each. Weak, so that it keeps no memory alive.
Origins = dict[int, tuple[weakref.ref[Tensor], nn.Module | None]]


class ValueProvenanceMode(TorchDispatchMode):
    """Notes the block in which every tensor is made, and whether operators draw random numbers."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.origins: Origins = {}
        self.flags = [False, False]
        """Whether the step draws, and whether its shape depends on data."""
        self._block: nn.Module | None = None

    @contextmanager
    def of_step(self, block: nn.Module | None) -> Generator[None]:
        """Context of one step. Tensors that are made inside belong to `block`."""
        self._block, self.flags = block, [False, False]
        try:
            yield
        finally:
            self._block = None  # also after an error, which the code between blocks can catch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result: Any = func(*args, **(kwargs or {}))
        for k, tag in enumerate(_tags(func)):
            self.flags[k] |= tag
        for x in cast("Iterable[Any]", result) if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and not (func is LIFT and self._block is None):
                self.origins[id(x)] = (weakref.ref(x), self._block)
        return cast(Any, result)


class RunValues:
    """The values of one run by object, and the recording that they are part of."""

    def __init__(self, modules: OpenModules, origins: Origins, inputs: Sequence[tuple[str, Any]], keep: bool) -> None:
        """`inputs` are the leaves of the arguments with their names. With `keep`, values have copies of tensors."""
        self.recording = Recording([RecordedValue("in", name, -1, *_size(leaf)) for name, leaf in inputs])
        self.leaks: dict[nn.Module, str] = {}  # blocks to open, with the way in which a tensor left each, in words
        self.has_unknown_tensors = False  # whether a tensor of unknown origin was read
        self._modules, self._origins, self._keep = modules, origins, keep
        self._known: dict[int, tuple[Any, RecordedValue, int]] = {}  # by id(): the object, its value, its version then
        self._nodes: dict[int, Any] = {}  # nodes of the graph that blocks and autograd functions have made
        self._written: dict[int, int] = {}  # storage -> the last step that wrote to it
        for (_, leaf), value in zip(inputs, self.recording.inputs, strict=True):
            if not isinstance(leaf, PLAIN):
                self._know(leaf, value)
        for module in modules.all:
            prefix = modules.names[id(module)]
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                # The first name counts: stages look up a tied tensor by one name.
                if tensor is not None and id(tensor) not in self._known:
                    self._know(tensor, _held_value("own", f"{prefix}.{key}" if prefix else key, tensor))

    def read_leaves(self, leaves: Sequence[Any]) -> Reads:
        """The values of leaves that are neither plain objects nor constants. Raises SplitError for unknown origins."""
        return {k: value for k, leaf in enumerate(leaves) if (value := self._value_of(leaf)) is not None}

    def note_results(self, step: Instruction, results: Sequence[Any]) -> None:
        """Add the leaves of the result of the next step."""
        ours = step.module is not None or step.name.endswith(".apply")
        for k, x in enumerate(results):
            value, known = None, self._known.get(id(x))
            if known is not None and known[1].kind == "own":  # written in place, or returned unchanged
                step.passed[k] = known[1]
            elif isinstance(x, Tensor) or (ours and not isinstance(x, PLAIN)):
                value = self._make(x, k)
            else:
                step.plain.append((k, x))
            if ours and isinstance(x, Tensor) and x.grad_fn is not None:
                self._nodes[id(x.grad_fn)] = x.grad_fn
            step.makes.append(value)

    def note_writes(self, step: Instruction, leaves: Sequence[Any], wrote: Iterable[int]) -> None:
        """Add the arguments that the next step has written to in place. Each is a new value from then on."""
        for k, x in {id(leaves[k]): (k, leaves[k]) for k in wrote}.values():
            step.writes.append(k)
            step.stored.add(storage_id(x))
            self._written[storage_id(x)] = len(self.recording.steps)
            value = self._known[id(x)][1]
            # A tensor of the model stays that tensor, because a stage reads it from the model at every step.
            if value.kind == "own":
                self._know(x, value)
            step.makes.append(None if value.kind == "own" else self._make(x, -1))

    def note_shape(self, x: Tensor) -> None:
        """Note that Python code can depend on the shape of a value."""
        value = self._known[id(x)][1]
        if value.kind == "made" and value.key >= 0:
            self.recording.steps[value.step].shapes[value.key] = tuple(x.size())

    def reject_stored(self, before: Iterable[tuple[nn.Module, dict[str, Any], dict[str, Any]]]) -> None:
        """Raise SplitError if a module has another buffer or a new activation in its attributes than `before`."""
        # A tensor that depends only on inputs, buffers and constants, such as a cached mask, is not an activation.
        active: set[RecordedValue | None] = {
            value for x, value, _ in self._known.values() if value.kind == "own" and isinstance(x, nn.Parameter)
        }
        for step in self.recording.steps:
            if step.module is not None or step.draws or not active.isdisjoint(step.reads.values()):
                active.update(step.makes)
        for module, buffers, attributes in before:
            name = self._modules.describe(module)
            if any(buffers.get(key) is not buffer for key, buffer in module._buffers.items()):
                raise SplitError(
                    f"forward of {name} replaces a buffer by another tensor, which a stage would not see; write to the "
                    "buffer in place (copy_), or do it in a submodule"
                )
            for key, x in vars(module).items() if module not in self._modules.exits else ():
                known = self._known.get(id(x)) if attributes.get(key) is not x else None
                if known is not None and known[1].kind == "made" and known[1] in active:
                    raise SplitError(
                        f"forward of {name} stores a tensor in its attribute {key!r}; that tensor would be from one "
                        "micro-batch of one step, and later steps would not set it; return it, or store it in a "
                        "submodule that is not cut"
                    )

    def _know(self, x: Any, value: RecordedValue) -> None:
        self._known[id(x)] = (x, value, version(x) if isinstance(x, Tensor) else 0)

    def _make(self, x: Any, leaf: int) -> RecordedValue:
        """The value of a leaf of the result of the next step, or (-1) of an argument that it writes in place."""
        value = RecordedValue("made", leaf, len(self.recording.steps), *_size(x))
        if isinstance(x, Tensor):
            value.form = TensorForm(tuple(x.shape), x.dtype, x.device, x.requires_grad)
        if self._keep:
            value.kept = x.detach().clone() if isinstance(x, Tensor) else x
        self._know(x, value)
        return value

    def _value_of(self, leaf: Any) -> RecordedValue | None:
        if not isinstance(leaf, Tensor):
            known = None if isinstance(leaf, PLAIN) else self._known.get(id(leaf))
            if known is None and not isinstance(leaf, PLAIN) and _hides_tensors(leaf):
                instead = "pass use_cache=False" if type(leaf).__name__.endswith("Cache") else _SHARED
                raise self._modules.refusal(f"a {type(leaf).__name__} carries tensors", instead)
            return known and known[1]
        if id(leaf) not in self._known:
            self._add_unknown(leaf)
        _, value, before = self._known[id(leaf)]
        # Recorded steps have noted their nodes, so an unknown node was made without the patched `apply`.
        if value.kind == "made" and isinstance(leaf.grad_fn, BackwardCFunction) and id(leaf.grad_fn) not in self._nodes:
            name = type(leaf.grad_fn).__name__.removesuffix("Backward")
            raise self._modules.refusal(
                f"{name}.apply, whose own backward would be lost, was called through a name that holds the bound method"
            )
        if version(leaf) != before:
            # The write was not through this tensor, so it was through a view of it, or through its base.
            if value.kind != "own":
                self.recording.aliases.append((value.step, self._written.get(storage_id(leaf), -1)))
            self._know(leaf, value)
        return value

    def _add_unknown(self, leaf: Tensor) -> None:
        """Handle a tensor that is not a result of a step: a constant of the user, or a tensor made in a block."""
        reference, block = self._origins.get(id(leaf), (None, None))
        ours = reference is not None and reference() is leaf  # ids are reused, so the object decides
        self.has_unknown_tensors |= not ours
        if ours and block is not None:
            self.leaks.setdefault(block, self._modules.path_of(block, leaf))
        # After a leak, the recording is repeated anyway, and its values are not reliable.
        elif ours and not self.leaks:
            raise self._modules.refusal(
                f"a tensor of shape {tuple(leaf.shape)} is made by a function that is not PyTorch's"
            )
        self._know(leaf, _held_value("const", leaf if leaf.is_leaf else leaf.detach(), leaf))


@lru_cache(1024)
def _tags(func: Any) -> tuple[bool, bool]:
    """Whether an operator draws random numbers, and whether the shape of its result depends on data."""
    tags = getattr(func, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags, any(tag in tags for tag in _DYNAMIC)


def _size(x: Any) -> tuple[int, int | None]:
    return (x.nbytes, storage_id(x)) if isinstance(x, Tensor) else (0, None)


def _held_value(kind: Literal["own", "const"], key: Any, tensor: Tensor) -> RecordedValue:
    return RecordedValue(kind, key, storage=storage_id(tensor))


def _hides_tensors(value: Any, depth: int = 4) -> bool:
    """Whether an object that is not a container for PyTorch holds tensors, down to `depth` levels of attributes."""
    if not depth or isinstance(value, (str, bytes, int, float, type, nn.Module, type(None))) or callable(value):
        return False
    return any(isinstance(inner, Tensor) or _hides_tensors(inner, depth - 1) for inner in held_values(value))
