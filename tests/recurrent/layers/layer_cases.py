"""Cases for the tests of layers: each drop-in layer with its counterpart in torch, and layers for stacks."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import floats, gradients
from torchweft.recurrent import Recurrent
from torchweft.recurrent.layers import GRU, LSTM, RNN

DROP_INS = {"LSTM": (nn.LSTM, LSTM), "GRU": (nn.GRU, GRU), "RNN": (nn.RNN, RNN)}
WIDTH, HIDDEN = 3, 4


def pair(kind: str, how: dict[str, Any] | None = None, **options: Any) -> tuple[nn.RNNBase, nn.RNNBase]:
    """Torch's layer and ours, with the same weights, in double precision."""
    theirs, ours = DROP_INS[kind]
    one = theirs(WIDTH, HIDDEN, **options).double()
    other = ours(WIDTH, HIDDEN, **options, **(how or {"backend": "eager"})).double()
    other.load_state_dict(one.state_dict())
    return one, other


def first_state(layer: nn.RNNBase, rows: int | None) -> Any:
    """A random initial state with gradients. Without `rows`, it has no batch axis."""
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    widths = [layer.proj_size or HIDDEN, HIDDEN] if isinstance(layer, nn.LSTM) else [HIDDEN]
    sizes = [(count, width) if rows is None else (count, rows, width) for width in widths]
    parts = [torch.randn(size).double().requires_grad_() for size in sizes]
    return tuple(parts) if len(parts) > 1 else parts[0]


def everything(layer: nn.Module, result: Any, wrt: list[Tensor]) -> list[Tensor]:
    """All numbers of a result, and the gradients of `wrt` and of the layer's parameters."""
    return [*(leaf.detach() for leaf in floats(result)), *gradients(result, [*wrt, *layer.parameters()])]


def layers(count: int, **options: Any) -> list[Recurrent]:
    """Networks of torch's cells in double precision, with inputs and states of size WIDTH."""
    kinds = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
    options = {"backend": "eager", **options}
    return [Recurrent(kinds[i % 3](WIDTH, WIDTH).double(), **options) for i in range(count)]
