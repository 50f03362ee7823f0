"""A recording of one run of forward(): its instructions, and the values that they make and read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from torchweft.core.pytree import LEAF, Structure, unflatten


class TensorForm(NamedTuple):
    """All that Python code can ask of a tensor without reading its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


@dataclass(eq=False, slots=True)
class RecordedValue:
    """A value that instructions read.

    The meaning of `key` depends on `kind`: the name of an input ("in"), the name of a parameter or buffer ("own"), the
    tensor itself ("const"), or the index of a leaf in the result of a step ("made"; -1: an argument written in place).
    """

    kind: Literal["in", "own", "const", "made"]
    key: Any
    step: int = -1  # the number of the step that made it
    bytes: int = 0
    storage: int | None = None
    kept: Any = None  # a copy, if the recording keeps copies
    form: TensorForm | None = None  # only of tensors that steps make


Reads = dict[int, RecordedValue]  # the values of leaves of the arguments or of the result, by the index of the leaf
Values = dict[RecordedValue, Any]
Owned = Callable[[str], Tensor]  # the parameter or buffer of that name
Devices = Sequence[torch.device]
_T = cast(Any, Tensor)
DEVICES = {_T.device.__get__, _T.is_cuda.__get__, _T.get_device}
SHAPES = {_T.shape.__get__, _T.size, _T.__len__, _T.numel, _T.nelement, _T.stride, torch.numel}
# All that can be asked of a tensor without its numbers.
FORMS = (
    SHAPES
    | DEVICES
    | {
        *(_T.dtype.__get__, _T.layout.__get__, _T.ndim.__get__, _T.nbytes.__get__),
        *(_T.requires_grad.__get__, _T.dim, _T.is_floating_point, _T.is_complex, _T.element_size),
    }
)
HERE = object()  # a placeholder among the constants of a step for the device of the stage that runs it


@dataclass(eq=False, slots=True)
class Instruction:
    """One instruction. Its arguments are `leaves`, which are None at the indices of `reads`. They are positional, the
    last ones keywords with `names`. If `structure` is set, they are nested as it says."""

    name: str
    call: Callable[..., Any]  # `function`, in the modes that the model's own code has set
    leaves: list[Any]
    names: tuple[str, ...] = ()
    structure: Structure | None = None
    where: str = ""  # file and line of the user's code
    module: nn.Module | None = None
    reads: Reads = field(default_factory=Reads)
    # Leaves of the result, then `writes`:
    makes: list[RecordedValue | None] = field(default_factory=list[RecordedValue | None])
    # Leaves of the result that are not tensors, and shapes of tensors. Python code can depend on both:
    plain: list[tuple[int, Any]] = field(default_factory=list[tuple[int, Any]])
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    expects: tuple[Any] | None = None  # the recorded result of a guard, which makes no value
    writes: list[int] = field(default_factory=list[int])  # indices of the argument leaves written in place
    stored: set[int] = field(default_factory=set[int])  # the storages written in place
    draws: bool = False
    dynamic: bool = False  # the shape of its result depends on data
    opened: str = ""  # the reason why the block that it is in was opened
    function: Any = None  # the function that forward() called
    modes: Any = None  # the grad mode and autocasts that the model's own code has set
    result: Structure | None = None  # the nesting of the result; None: a single tensor
    passed: Reads = field(default_factory=Reads)  # leaves of the result that are tensors of the model
    same: dict[int, int] = field(default_factory=dict[int, int])  # leaves of the result that are this argument leaf
    twins: dict[int, int] = field(default_factory=dict[int, int])  # leaves of the result that are this earlier leaf
    advice: str = "move that decision into a submodule, which can make it freely"  # for a guard

    def arguments(self, leaves: list[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        if self.structure is not None:
            return unflatten(self.structure, leaves)
        count = len(leaves) - len(self.names)
        return leaves[:count], dict(zip(self.names, leaves[count:], strict=True))

    def __str__(self) -> str:
        return f"{self.name} ({self.where})" if self.where else self.name


@dataclass
class Recording:
    """The instructions of one run of forward(). `leaves` and `reads` hold its result, as for arguments."""

    inputs: list[RecordedValue]  # the leaves of the arguments
    steps: list[Instruction] = field(default_factory=list[Instruction])
    cuts: dict[str, int] = field(default_factory=dict[str, int])  # split point -> the first step at or after its call
    leaves: list[Any] = field(default_factory=list[Any])
    reads: Reads = field(default_factory=Reads)
    structure: Structure = LEAF
    has_scalars: bool = False  # whether a leaf of the result is one number per micro-batch
    # Tensors read after a write through a view: the steps that made them, and that wrote (-1: before the first one).
    aliases: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    has_hooks: bool = False  # whether a block had forward hooks when it was called


def tensor_of(model: nn.Module, name: str) -> Tensor:
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    return cast(Tensor, module._parameters[key] if key in module._parameters else module._buffers[key])
