"""One time step of the built-in layers, as cells over weights that somebody else owns.

    weight_ih, weight_hh, bias_ih, bias_hh, weight_hr     a layer of torch.nn.LSTM, GRU or RNN, in one direction
    gates_t_w, gates_t_b                                  Caffe2's LSTM, whose inputs are projected before the loop

A step registers the very parameters of its owner, so the engine sees them as parameters of the cell; but it is no
child of the owner, whose ``state_dict`` stays as it is. The state is a tuple of tensors, N x width each, the hidden
one first.
"""

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.nn.functional import linear

State = tuple[Tensor, ...]


class Step(nn.Module):
    """One time step; `weights` are kept under their names, parameters as parameters."""

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    weight_hr: Tensor | None

    def __init__(self, weights: Mapping[str, Tensor | None]) -> None:
        super().__init__()
        for name, weight in weights.items():
            setattr(self, name, weight)

    def projections(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the input and the hidden state add to the gates, N x (gates * width) each."""
        return linear(x, self.weight_ih, self.bias_ih), linear(hidden, self.weight_hh, self.bias_hh)


class LSTMStep(Step):
    """torch.nn.LSTM's step: gates in the order i, f, g, o; the hidden state is projected if there is a weight_hr."""

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """N x D and (N x P, N x H) to the output N x P and the new state."""
        hidden, cell = state
        of_input, of_hidden = self.projections(x, hidden)
        i, f, g, o = (of_input + of_hidden).chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        if self.weight_hr is not None:
            hidden = linear(hidden, self.weight_hr)
        return hidden, (hidden, cell)


class GRUStep(Step):
    """torch.nn.GRU's step: gates in the order r, z, n; the reset gate is applied after the hidden projection."""

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """N x D and (N x H,) to the output N x H and the new state."""
        (hidden,) = state
        of_input, of_hidden = self.projections(x, hidden)
        r_input, z_input, n_input = of_input.chunk(3, -1)
        r_hidden, z_hidden, n_hidden = of_hidden.chunk(3, -1)
        new = (n_input + (r_input + r_hidden).sigmoid() * n_hidden).tanh()
        hidden = new + (z_input + z_hidden).sigmoid() * (hidden - new)
        return hidden, (hidden,)


class RNNStep(Step):
    """torch.nn.RNN's step, the Elman network."""

    def __init__(self, weights: Mapping[str, Tensor | None], activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__(weights)
        self.activation = activation

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """N x D and (N x H,) to the output N x H and the new state."""
        of_input, of_hidden = self.projections(x, state[0])
        hidden = self.activation(of_input + of_hidden)
        return hidden, (hidden,)


class Caffe2Step(Step):
    """Caffe2's LSTM step: gates in the order i, f, o, g, of which the input's part comes as ``x``."""

    gates_t_w: Tensor
    gates_t_b: Tensor

    def __init__(self, weights: Mapping[str, Tensor | None], forget_bias: float) -> None:
        super().__init__(weights)
        self.forget_bias = forget_bias

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """N x 4H and (N x H, N x H) to the output N x H and the new state."""
        hidden, cell = state
        i, f, o, g = (x + linear(hidden, self.gates_t_w, self.gates_t_b)).chunk(4, -1)
        keep = (f + self.forget_bias if self.forget_bias else f).sigmoid()
        cell = keep * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        return hidden, (hidden, cell)
