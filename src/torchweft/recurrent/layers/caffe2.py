"""Caffe2's LSTM: one product for all inputs, rows of different length, and all states as results.

    input  T x N x D  -- i2h, ONE product of T*N rows -->  T x N x 4H
                                                              |  + gates_t(hidden), the LSTM unit, step by step
    hidden_all, cell_all  T x N x H      <-------------------+
    hidden_last, cell_last    N x H          past its length a row holds its last states

`weft.recurrent.LSTM` could not serve instead: gate order, parameter names, forget bias and results differ.
docs/recurrent_layers.md compares the layout of the weights with that of ``torch.nn.LSTM``.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from torchweft.core.validation import Validator
from torchweft.recurrent.layers.rnn import LayerStep, State, WeightKeyedCache, is_exporting
from torchweft.recurrent.masking import read_rows
from torchweft.recurrent.recurrent import Recurrent, Result
from torchweft.recurrent.sequence import Lengths, read_inputs

_PAIRS = {"i2h_w": "weight_ih_l0", "gates_t_w": "weight_hh_l0", "i2h_b": "bias_ih_l0", "gates_t_b": "bias_hh_l0"}


class Caffe2Step(LayerStep):
    """Caffe2's LSTM step: gates in the order i, f, o, g. ``x`` is the input's contribution to them."""

    gates_t_w: Tensor
    gates_t_b: Tensor

    def __init__(self, weights: Mapping[str, Tensor | None], forget_bias: float) -> None:
        super().__init__(weights)
        self.forget_bias = forget_bias

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, cell = state
        i, f, o, g = (x + linear(hidden, self.gates_t_w, self.gates_t_b)).chunk(4, -1)
        keep = (f + self.forget_bias if self.forget_bias else f).sigmoid()
        cell = keep * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        return hidden, (hidden, cell)


class Caffe2Result(NamedTuple):
    """Hidden and cell state after every step, T x N x H, and after each row's last step, N x H, in Caffe2's order.

    Example:
        >>> hidden_all, hidden_last, cell_all, cell_last = weft.recurrent.Caffe2LSTM(8, 16)(torch.randn(20, 4, 8))
    """

    hidden_all: Tensor
    hidden_last: Tensor
    cell_all: Tensor
    cell_last: Tensor


class Caffe2LSTM(nn.Module):
    """One LSTM layer with the contract of Caffe2's ``LSTM``.

    Args:
        dim_in, dim_out: widths D of the input and H of the states.
        forget_bias: added to the forget gate, in addition to the trained biases, which start at 0. Weights start
            uniform within sqrt(3 / columns), as Caffe2's.
        how: options of :class:`weft.recurrent.Recurrent`, such as ``backend=``. The input's product is outside of it.

    Parameters have Caffe2's names: ``i2h_w`` is 4H x D, ``gates_t_w`` 4H x H, ``i2h_b`` and ``gates_t_b`` 4H, in blocks
    i, f, o, g. Raises ``UsageError`` for widths below 1.

    Example:
        >>> layer = weft.recurrent.Caffe2LSTM(8, 16, forget_bias=1.0)
    """

    i2h_w: Tensor
    i2h_b: Tensor
    gates_t_w: Tensor
    gates_t_b: Tensor
    batch_first = False
    """Time is always axis 0. Wrappers read this attribute, as that of `nn.LSTM`."""

    def __init__(
        self,
        dim_in: int,
        dim_out: int,
        *,
        forget_bias: float = 0.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **how: Any,
    ) -> None:
        super().__init__()
        with Validator("invalid arguments of Caffe2LSTM") as check:
            check.count("dim_in", dim_in)
            check.count("dim_out", dim_out)
        self.dim_in, self.dim_out, self.forget_bias = dim_in, dim_out, forget_bias
        self.how = how
        for name, shape in {"i2h_w": (dim_in,), "i2h_b": (), "gates_t_w": (dim_out,), "gates_t_b": ()}.items():
            setattr(self, name, nn.Parameter(torch.empty((4 * dim_out, *shape), device=device, dtype=dtype)))
        self._net: WeightKeyedCache[Recurrent] = WeightKeyedCache()
        self._step_network()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in self.parameters():
            bound = math.sqrt(3 / weight.shape[1]) if weight.dim() == 2 else 0.0
            nn.init.uniform_(weight, -bound, bound)

    def forward(
        self, input: Tensor, seq_lengths: Lengths | None = None, initial: tuple[Tensor, Tensor] | None = None
    ) -> Caffe2Result:
        """Run over a whole sequence.

        Args:
            input: T x N x D, with the parameters' dtype and device.
            seq_lengths: N integers from 0 to T; ``None``: all rows have T steps. Padding is never read: it can hold
                NaN, and no gradient flows through it.
            initial: hidden and cell state, N x H each, or 1 x N x H as Caffe2 had them. ``None``: zeros.

        Raises ``SpecError`` that lists all invalid arguments.
        """
        with Validator("Caffe2LSTM cannot run on these arguments") as check:
            read = read_inputs(input, batch_first=False, certain=True, check=check)
            rows = read_rows(read, seq_lengths, None, None, batch_first=False, check=check)
            shape = tuple(input.shape)
            if input.dim() != 3 or input.shape[-1] != self.dim_in:
                check.mismatch(f"input has shape {shape}, wanted T x N x {self.dim_in} (dim_in)")
            if input.dtype != self.i2h_w.dtype and not torch.is_autocast_enabled(input.device.type):
                check.mismatch(f"input is {input.dtype}, the parameters are {self.i2h_w.dtype}; convert one with .to()")
            if input.device != self.i2h_w.device:
                check.mismatch(f"input is on {input.device}, the parameters are on {self.i2h_w.device}")
            state_shape = (*shape[1:2], self.dim_out)
            parts = (input.new_zeros(state_shape),) * 2 if initial is None else initial
            state = tuple(part.squeeze(0) if part.dim() == 3 and len(part) == 1 else part for part in parts)
            for name, part in zip(("hidden", "cell"), state, strict=True):
                if tuple(part.shape) != state_shape:
                    seen = tuple(part.shape)
                    check.mismatch(f"initial {name} state has shape {seen}, wanted N x H = {state_shape}")
        if rows.valid is not None:
            # The product covers padding too, and NaN times a gradient of zero would be NaN.
            input = torch.where(rows.valid.unsqueeze(-1), input, 0)
        gates, net = linear(input, self.i2h_w, self.i2h_b), self._step_network()
        options = {"lengths": seq_lengths}
        if is_exporting():
            # The network holds the original parameters. The export needs its own stand-ins for them.
            weights = {"cell.gates_t_w": self.gates_t_w, "cell.gates_t_b": self.gates_t_b}
            result: Result = torch.func.functional_call(net, weights, (gates, state), options)
        else:
            result = net(gates, state, **options)
        return Caffe2Result(result.states[0], result.last[0], result.states[1], result.last[1])

    @classmethod
    def from_torch(cls, module: nn.LSTM, *, forget_bias: float = 0.0, **how: Any) -> "Caffe2LSTM":
        """A layer with a copy of the weights of ``module`` and the same results.

        ``module`` must have one layer, one direction and no projection. Missing biases become zero. ``forget_bias`` is
        subtracted from its biases. Raises ``UsageError`` that lists the features that Caffe2's LSTM lacks.
        """
        with Validator("this nn.LSTM cannot become a Caffe2LSTM") as check:
            for name, required in {"num_layers": 1, "bidirectional": False, "proj_size": 0}.items():
                seen = getattr(module, name)
                check.require(seen == required, f"{name} is {seen}, wanted {required}")
        like = module.weight_ih_l0
        options = {"forget_bias": forget_bias, "device": like.device, "dtype": like.dtype}
        layer = cls(module.input_size, module.hidden_size, **options, **how)
        with torch.no_grad():
            for ours, theirs in _PAIRS.items():
                value = cast("Tensor | None", getattr(module, theirs, None))
                if value is not None:
                    getattr(layer, ours).copy_(_swap_last_gates(value))
            layer.i2h_b[layer.dim_out : 2 * layer.dim_out] -= forget_bias
        return layer

    def to_torch(self) -> nn.LSTM:
        """A ``torch.nn.LSTM`` (time first) with a copy of the weights and the same results."""
        module = nn.LSTM(self.dim_in, self.dim_out, device=self.i2h_w.device, dtype=self.i2h_w.dtype)
        with torch.no_grad():
            for ours, theirs in _PAIRS.items():
                getattr(module, theirs).copy_(_swap_last_gates(getattr(self, ours)))
            cast(Tensor, module.bias_ih_l0)[self.dim_out : 2 * self.dim_out] += self.forget_bias
        return module

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._step_network()  # an export cannot create it, because its weights are not real

    def explain(self) -> str:
        """The explanation of the network; see ``Recurrent.explain``."""
        return self._step_network().explain()

    def extra_repr(self) -> str:
        options = {"forget_bias": self.forget_bias, **self.how}
        return ", ".join([f"{self.dim_in}, {self.dim_out}", *(f"{k}={v!r}" for k, v in options.items())])

    def _step_network(self) -> Recurrent:
        weights = {"gates_t_w": self.gates_t_w, "gates_t_b": self.gates_t_b}
        # Weights that are not parameters (pruning, `functional_call`) are new tensors at every call. A plan for them
        # could not be reused.
        reusable = all(isinstance(weight, nn.Parameter) for weight in weights.values())

        def make_network() -> Recurrent:
            how: dict[str, Any] = self.how if reusable else {"backend": "eager"}
            return Recurrent(Caffe2Step(weights, self.forget_bias), **how)

        return self._net.get(list(weights.values()), make_network) if reusable else make_network()


def _swap_last_gates(weight: Tensor) -> Tensor:
    # Blocks i, f, o, g into i, f, g, o, or back.
    i, f, one, other = weight.chunk(4)
    return torch.cat([i, f, other, one])
