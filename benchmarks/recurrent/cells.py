"""Cells as a user writes them: plain PyTorch modules without any reference to the engine.

They compute the same as `torch.nn.LSTM` and `torch.nn.GRU` with the same weights, so that their times can be compared.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.recurrent.work import Forward

State = Tensor | tuple[Tensor, ...]


class LSTMCell(nn.Module):
    """``x`` N x D; state ``(h, c)``, N x H each."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.of_input = nn.Linear(inputs, 4 * width)
        self.of_state = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = state
        i, f, g, o = (self.of_input(x) + self.of_state(h)).chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, (h, c)


class GRUCell(nn.Module):
    """``x`` N x D; state ``h``, N x H."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.of_input = nn.Linear(inputs, 3 * width)
        self.of_state = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        xr, xz, xn = self.of_input(x).chunk(3, dim=-1)
        hr, hz, hn = self.of_state(h).chunk(3, dim=-1)
        r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
        n = torch.tanh(xn + r * hn)
        h = n + z * (h - n)
        return h, h


def with_weights_of(peer: nn.RNNBase, cell: nn.Module) -> nn.Module:
    """Copy the weights of the peer's only layer into `cell`, whose layout is the same, and return it."""
    weights = {
        "weight_ih": peer.weight_ih_l0,
        "bias_ih": peer.bias_ih_l0,
        "weight_hh": peer.weight_hh_l0,
        "bias_hh": peer.bias_hh_l0,
    }
    peer_names = dict(
        zip(("of_input.weight", "of_input.bias", "of_state.weight", "of_state.bias"), weights, strict=True)
    )
    cell.load_state_dict({name: weights[peer_names.get(name, name)] for name, _ in cell.named_parameters()})
    return cell


def ends_of(outputs: Tensor, last: State) -> Sequence[Tensor]:
    """Outputs and last states as one flat list."""
    return [outputs, last] if isinstance(last, Tensor) else [outputs, *last]


def eager(cell: nn.Module, x: Tensor, state: State) -> Forward:
    """A plain Python loop over the cell."""

    def forward() -> Sequence[Tensor]:
        outputs: list[Tensor] = []
        last = state
        for x_t in x:
            y, last = cell(x_t, last)
            outputs.append(y)
        return ends_of(torch.stack(outputs), last)

    return forward


def by_torch(peer: nn.RNNBase, x: Tensor, state: State) -> Forward:
    """A network of `torch.nn`. With one layer it gets `state`, which has no axis of layers."""

    def forward() -> Sequence[Tensor]:
        if peer.num_layers > 1:
            outputs, last = peer(x)
        elif isinstance(state, Tensor):
            outputs, last = peer(x, state[None])
        else:
            outputs, last = peer(x, tuple([part[None] for part in state]))
        return ends_of(outputs, last)

    return forward


def by_torchweft(net: nn.Module, x: Tensor, state: State) -> Forward:
    """A `Recurrent` network."""

    def forward() -> Sequence[Tensor]:
        result = net(x, state)
        return ends_of(result.outputs, result.last)

    return forward
