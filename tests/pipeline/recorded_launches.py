"""A stand-in for CUDA graphs on the CPU: it records every operator with its tensors, and repeats them in place.

As in a capture, recorded work leaves no trace in memory that existed before, and the host can read no number. Before a
replay, all memory of the recording is filled with NaN, so that a value which is not computed anew spoils the results.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

READS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "item")
EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def tensors(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def alias(value: Any) -> Any:
    # Tensors with versions of their own, because a replay on a GPU does not change versions either.
    return tree_map_only(Tensor, lambda tensor: tensor.data, value)


class Tape(TorchDispatchMode):
    """Records the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.own: dict[int, Tensor] = {}
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.partition("::")[2]
        if name in READS:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        written = [value for value, argument in zip(args, func._schema.arguments, strict=False) if writes(argument)]
        written += [kwargs[a.name] for a in func._schema.arguments if writes(a) and a.name in kwargs]
        if "batch_norm" in name and "backward" not in name:
            written += args[3:5]
        for tensor in tensors(written):
            if memory(tensor) not in self.own and memory(tensor) not in self.before:
                self.before[memory(tensor)] = tensor.data, tensor.data.clone()
        result = func(*args, **kwargs)
        read = {memory(tensor) for tensor in tensors(args, kwargs)}
        fresh = [None if memory(x) in read else x.data for x in tensors(result)]
        self.own |= {memory(x): x for x in fresh if x is not None}
        # Results that are views need no repetition, and fresh memory has no numbers to copy.
        wanted = [None for _ in fresh] if name in EMPTY else fresh
        self.calls.append((func, alias(args), alias(kwargs), wanted))
        return result

    def undo(self) -> None:
        for tensor, numbers in self.before.values():
            tensor.copy_(numbers)

    def replay(self) -> None:
        with torch.no_grad():
            for tensor in self.own.values():
                spoil(tensor)
            for func, args, kwargs, results in self.calls:
                for into, value in zip(results, tensors(func(*args, **kwargs)), strict=True):
                    if into is not None:
                        into.copy_(value)


def writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def spoil(tensor: Tensor) -> None:
    whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    whole.fill_(float("nan") if whole.is_floating_point() else 0)


class StandIn:
    """A `torchweft.core.recording.GraphRecorder`."""

    def record(self, work: Callable[[], None], /) -> Callable[[], None]:
        tape, tolist = Tape(), Tensor.tolist

        def refuse(tensor: Tensor) -> Any:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

        Tensor.tolist = refuse  # reads the memory of a CPU tensor without an operator
        try:
            with tape:
                work()
        finally:
            Tensor.tolist = tolist
            tape.undo()
        return tape.replay
