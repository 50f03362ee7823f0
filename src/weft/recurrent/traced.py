"""A call of a recurrent network, as `torch.compile` and `torch.export` trace it: arguments to one operator, and back.

    Recurrent.forward     under tracing only
      call                traced by Dynamo: plain values and tensors in, plain values and tensors out
        _one_operator     not looked into by Dynamo; traced by what comes behind it (AOTAutograd, export)
          weft.recurrent  opaque.py

It is imported when something is being traced, not before: it brings Dynamo, whose import takes seconds.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from weft.core.errors import UsageError
from weft.core.tree import flatten, map_leaves
from weft.recurrent.forms import NOTHING, form_of, network_of
from weft.recurrent.opaque import recurrent
from weft.recurrent.owned import owned
from weft.recurrent.unrolling import Result


def call(network: nn.Module, handle: int, inputs: Any, state: Any, more: dict[str, Any], start: int) -> Result:
    """A whole sequence as one operator. `more` holds lengths, mask and reset, as far as they were given.

    Raises UsageError for what cannot be traced: a PackedSequence, and a function that closes over parameters.
    """
    if isinstance(inputs, PackedSequence):
        raise UsageError("a PackedSequence cannot be traced; pad it (pad_packed_sequence), and give its lengths")
    if "lengths" in more and not isinstance(more["lengths"], Tensor):
        more["lengths"] = torch.tensor(more["lengths"], dtype=torch.int64)
    references = (*network.parameters(), *network.buffers())
    value = map_leaves(_without_none, (inputs, state, more))
    outputs, last, states = map_leaves(_with_none, _one_operator(handle, references, value, start))
    return Result(outputs, last, states)


def _without_none(leaf: Any) -> Any:
    return NOTHING if leaf is None else leaf


def _with_none(leaf: Any) -> Any:
    return leaf if isinstance(leaf, Tensor) else None


def _plain(leaf: Any) -> Any:
    """A leaf that is no tensor, as a constant; symbols get their value."""
    kinds: dict[type, Callable[[Any], Any]] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return next((make(leaf) for kind, make in kinds.items() if isinstance(leaf, kind)), leaf)


@torch._dynamo.nonstrict_trace
def _one_operator(handle: int, references: tuple[Tensor, ...], value: Any, start: int) -> Any:
    _refuse_captured(handle)
    leaves, structure = flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    constants = tuple([None if isinstance(leaf, Tensor) else _plain(leaf) for leaf in leaves])
    form = form_of(handle, structure, constants)
    graph = torch.is_grad_enabled()
    wanted = [graph and each.requires_grad for each in (*tensors, *references)]
    return form.nested(recurrent(form.number, tensors, list(references), wanted, start))


def _refuse_captured(handle: int) -> None:
    """Raise UsageError if the cell reaches parameters that are not the network's: their gradients would be lost."""
    network = cast(Any, network_of(handle))
    own = {id(each) for each in network.parameters()}
    strange = sum(id(each) not in own for each in owned(network.cell).parameters)
    if strange:
        raise UsageError(
            f"the cell reads {strange} tensors that want a gradient and are not parameters of the network, so a traced "
            "graph would not know of them; make the cell a module that has them"
        )
