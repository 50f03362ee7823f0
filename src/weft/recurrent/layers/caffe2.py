"""Caffe2's LSTM: one product for all inputs, rows of different length, and all states as results.

    input  T x N x D  -- i2h, ONE product of T*N rows -->  T x N x 4H
                                                              |  + gates_t(hidden), the LSTM unit, step by step
    hidden_all, cell_all  T x N x H      <-------------------+
    hidden_last, cell_last    N x H          past its length a row holds its last states

docs/recurrent_layers.md has the layout of the weights, beside that of ``torch.nn.LSTM``.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from weft.core.validation import Validator
from weft.recurrent.layers.rnn import LayerStep, State, WeightKeyedCache, exporting
from weft.recurrent.masking import read_rows
from weft.recurrent.recurrent import Recurrent, Result
from weft.recurrent.sequence import Lengths, read_inputs

_PAIRS = {"i2h_w": "weight_ih_l0", "gates_t_w": "weight_hh_l0", "i2h_b": "bias_ih_l0", "gates_t_b": "bias_hh_l0"}


class Caffe2Step(LayerStep):
    """Caffe2's LSTM step: gates in the order i, f, o, g, of which the input's part comes as ``x``."""

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
        forget_bias: added to the forget gate, besides the biases that are learned, which begin with 0. Weights begin
            uniform within sqrt(3 / columns), as Caffe2's.
        how: handed to :class:`weft.recurrent.Recurrent`, such as ``backend=``. The input's product is outside of it.

    Parameters have Caffe2's names: ``i2h_w`` is 4H x D, ``gates_t_w`` 4H x H, ``i2h_b`` and ``gates_t_b`` 4H, in blocks
    i, f, o, g. Raises ``UsageError`` for widths below 1.

    Example:
        >>> result = weft.recurrent.Caffe2LSTM(8, 16)(torch.randn(20, 4, 8))
        >>> result.hidden_all.shape
        torch.Size([20, 4, 16])
    """

    i2h_w: Tensor
    i2h_b: Tensor
    gates_t_w: Tensor
    gates_t_b: Tensor
    batch_first = False
    """Time is always axis 0; the attribute of `nn.LSTM`, which wrappers read."""

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
        self._recurrent()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        for weight in self.parameters():
            bound = math.sqrt(3 / weight.shape[1]) if weight.dim() == 2 else 0.0
            nn.init.uniform_(weight, -bound, bound)

    def forward(
        self, input: Tensor, seq_lengths: Lengths | None = None, initial: tuple[Tensor, Tensor] | None = None
    ) -> Caffe2Result:
        """Run over a whole sequence.

        Args:
            input: T x N x D, with the parameters' dtype and device.
            seq_lengths: N integers from 0 to T; ``None``: all rows have T steps. Padding is never read: it may hold
                NaN, and no gradient goes through it.
            initial: hidden and cell state, N x H each, or 1 x N x H as Caffe2 had them. ``None``: zeros.

        Raises ``SpecError`` that lists all that is wrong with the arguments.
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
            wanted = (*shape[1:2], self.dim_out)
            given = (input.new_zeros(wanted),) * 2 if initial is None else initial
            state = tuple(part.squeeze(0) if part.dim() == 3 and len(part) == 1 else part for part in given)
            for name, part in zip(("hidden", "cell"), state, strict=True):
                if tuple(part.shape) != wanted:
                    seen = tuple(part.shape)
                    check.mismatch(f"initial {name} state has shape {seen}, wanted N x H = {wanted}")
        if rows.valid is not None:
            input = torch.where(rows.valid.unsqueeze(-1), input, 0)  # NaN times a gradient of zero would be NaN
        gates, net = linear(input, self.i2h_w, self.i2h_b), self._recurrent()
        options = {"lengths": seq_lengths}
        if exporting():  # with the weights of the export
            weights = {"cell.gates_t_w": self.gates_t_w, "cell.gates_t_b": self.gates_t_b}
            result: Result = torch.func.functional_call(net, weights, (gates, state), options)
        else:
            result = net(gates, state, **options)
        return Caffe2Result(result.states[0], result.last[0], result.states[1], result.last[1])

    @classmethod
    def from_torch(cls, module: nn.LSTM, *, forget_bias: float = 0.0, **how: Any) -> "Caffe2LSTM":
        """A layer with a copy of the weights of ``module``, which computes the same.

        ``module``: one layer, one direction, no projection; without biases they become zero. ``forget_bias`` is
        taken out of its biases. Raises ``UsageError`` that lists what Caffe2's LSTM does not have.
        """
        with Validator("this nn.LSTM is no Caffe2LSTM") as check:
            for name, wanted in {"num_layers": 1, "bidirectional": False, "proj_size": 0}.items():
                seen = getattr(module, name)
                check.that(seen == wanted, f"{name} is {seen}, wanted {wanted}")
        like = module.weight_ih_l0
        options = {"forget_bias": forget_bias, "device": like.device, "dtype": like.dtype}
        made = cls(module.input_size, module.hidden_size, **options, **how)
        with torch.no_grad():
            for ours, theirs in _PAIRS.items():
                value = cast("Tensor | None", getattr(module, theirs, None))
                if value is not None:
                    getattr(made, ours).copy_(_reordered(value))
            made.i2h_b[made.dim_out : 2 * made.dim_out] -= forget_bias
        return made

    def to_torch(self) -> nn.LSTM:
        """A ``torch.nn.LSTM`` (time first) with a copy of the weights, which computes the same."""
        made = nn.LSTM(self.dim_in, self.dim_out, device=self.i2h_w.device, dtype=self.i2h_w.dtype)
        with torch.no_grad():
            for ours, theirs in _PAIRS.items():
                getattr(made, theirs).copy_(_reordered(getattr(self, ours)))
            cast(Tensor, made.bias_ih_l0)[self.dim_out : 2 * self.dim_out] += self.forget_bias
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._recurrent()  # an export has need of the network of a copy

    def explain(self) -> str:
        """How the steps run; see ``Recurrent.explain``."""
        return self._recurrent().explain()

    def extra_repr(self) -> str:
        options = {"forget_bias": self.forget_bias, **self.how}
        return ", ".join([f"{self.dim_in}, {self.dim_out}", *(f"{k}={v!r}" for k, v in options.items())])

    def _recurrent(self) -> Recurrent:
        """The network of the steps. Weights that are no parameters are new at every call: a plan would not pay."""
        weights = {"gates_t_w": self.gates_t_w, "gates_t_b": self.gates_t_b}
        lasting = all(isinstance(weight, nn.Parameter) for weight in weights.values())

        def make() -> Recurrent:
            how: dict[str, Any] = self.how if lasting else {"backend": "eager"}
            return Recurrent(Caffe2Step(weights, self.forget_bias), **how)

        return self._net.get(list(weights.values()), make) if lasting else make()


def _reordered(weight: Tensor) -> Tensor:
    """Blocks i, f, o, g into i, f, g, o, or back: the last two change places."""
    i, f, one, other = weight.chunk(4)
    return torch.cat([i, f, other, one])
