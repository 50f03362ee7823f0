"""Rejection of activations that forward() stores in attributes, because stages cannot exchange them."""

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn

from torchweft.core.errors import SplitError
from torchweft.pipeline.split.program import RecordedValue, Recording

OPENED = (
    "the code around it reads {}, which its block makes and does not return, so the block was opened: return that "
    "tensor from the block instead of storing it"
)
SHARED = (
    "blocks share tensors through it, which stages cannot see; let blocks take and return them in a tuple, list or "
    "dict, or cut at a point where no tensors are shared (Gemma-3n's layers share keys and values)"
)


def path_of(block: nn.Module, name: str, tensor: Tensor) -> str:
    """The way in which code around a block got a tensor that the block made and did not return, in words."""
    modules = cast("Iterable[tuple[str, nn.Module]]", cast(Any, block).named_modules(prefix=name))
    paths = [f"{path}.{key}" for path, module in modules for key, x in vars(module).items() if x is tensor]
    return paths[0] if paths else f"a tensor that a hook or a global took out of {name}"


def forbid_stored_activations(
    before: Iterable[tuple[str, nn.Module, dict[str, Any]]],
    parameters: set[str],
    recording: Recording,
    values: dict[int, RecordedValue],
) -> None:
    """Raise SplitError if the code between blocks has stored an activation in an attribute of a module.

    `before` holds the attributes before the run. `values` are the values of the run, by the id() of a tensor.
    """
    # A tensor that depends only on inputs, buffers and constants, such as a cached mask, is not an activation.
    active: set[RecordedValue | None] = set()
    for step in recording.steps:
        reads = any(x in active or (x.kind == "own" and x.key in parameters) for x in step.reads.values())
        if reads or step.module is not None or step.draws:
            active.update(step.makes)
    for name, module, held in before:
        for key, x in vars(module).items():
            if isinstance(x, Tensor) and held.get(key) is not x and values.get(id(x)) in active - {None}:
                raise SplitError(
                    f"forward of {name or 'the model'} ({type(module).__name__}) stores a tensor in its attribute "
                    f"{key!r}; that tensor would be from one micro-batch of one step, and later steps would not set "
                    "it; return it, or store it in a submodule that is not cut"
                )
