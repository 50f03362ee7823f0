"""Drop-in replacements for torch.nn's recurrent layers: the same arguments, parameters, keys and results.

    x -> [ forward | backward ] -> dropout -> [ forward | backward ] -> ... -> output
              layer 0                              layer 1
              h_n[0] | h_n[1]                      h_n[2] | h_n[3]

    nn.LSTM           weight_ih_l0, weight_hh_l0, ...          the only owner; keys and copies as torch has them
       |                    ^ the very same parameters
       +-- cache:     Recurrent(LSTMStep(weights)), ...        no child: no keys, not copied, not pickled, made anew

Constructor, parameters and their names are torch's own, inherited; only `forward` is ours. It runs a network per layer
and direction, over cells that register the layer's own parameters.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear
from torch.nn.utils.rnn import PackedSequence

from weft.core.errors import SpecError, UsageError, listed
from weft.recurrent.layers.bidirectional import Bidirectional
from weft.recurrent.recurrent import FoldedText, Recurrent, Result
from weft.recurrent.sequence import pack_like, unpack

Net = TypeVar("Net")


def exporting() -> bool:
    """Whether a graph is made of values that are not there yet; not by Dynamo, which sees the real parameters."""
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


def call_with(net: nn.Module, weights: Mapping[str, Tensor], *arguments: Any, **options: Any) -> Any:
    """Call a network; in an export, with these weights, by their names in it."""
    if exporting():
        return torch.func.functional_call(net, dict(weights), arguments, options)
    return net(*arguments, **options)


class WeightKeyedCache(Generic[Net]):
    """Keeps what was last made, and the tensors that it was made of."""

    def __init__(self) -> None:
        self._kept: tuple[list[Tensor], Net] | None = None

    def get(self, weights: Sequence[Tensor], make: Callable[[], Net]) -> Net:
        """The cached object if made of these very tensors, else a new one; in an export, the cached one."""
        kept = self._kept
        if kept is None or (list(map(id, kept[0])) != list(map(id, weights)) and not exporting()):
            self._kept = kept = (list(weights), make())
        return kept[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return (WeightKeyedCache, ())  # a copy has other weights


class LayerInputError(SpecError, ValueError, RuntimeError):
    """LayerInput of a layer do not fit. It is whatever torch.nn's layers raise for such a fault.

    Example:
        >>> weft.GRU(3, 8)(torch.ones(5, 2, 4))
        Traceback (most recent call last):
        weft.errors.LayerInputError: ...
    """


class LayerInput(NamedTuple):
    """Time first, with rows; `lengths` (on the CPU) only where they differ from T; states per network, or None."""

    x: Tensor
    lengths: Tensor | None
    states: list[tuple[Tensor, ...]]
    packed: PackedSequence | None
    batched: bool

    def repacked(self, x: Tensor) -> PackedSequence | None:
        """T x N x ... in the form of the input, where that was packed."""
        if self.packed is None:
            return None
        lengths = unpack(self.packed)[1] if self.lengths is None else self.lengths
        return pack_like(x, lengths, self.packed)


def read_input(layer: nn.RNNBase, weight: Tensor, input: Any, hx: Any, widths: Sequence[int]) -> LayerInput:
    """Check `input` and `hx` against the layer, of which `weight` is one; states have these `widths`.

    Raises LayerInputError that lists all that is wrong.
    """
    faults: list[str] = []
    packed = input if isinstance(input, PackedSequence) else None
    data: Any = input if packed is None else packed.data
    if not isinstance(data, Tensor):
        faults.append(f"input is of type {type(data).__name__}, wanted a tensor or a PackedSequence")
        _raise(layer, faults)
    _check_input(layer, weight, data, packed is not None, faults)
    batched = packed is not None or data.dim() != 2
    parts = None
    if data.dim() in (2, 3):
        rows = _rows(layer, data, packed) if batched else None
        parts = _parts(layer, hx, widths, rows, data, faults)
    if faults:
        _raise(layer, faults)
    lengths = None
    if packed is not None:
        x, lengths = unpack(packed)
        lengths = lengths if int(lengths.min()) < len(x) else None
    elif batched:
        x = data.transpose(0, 1) if layer.batch_first else data
    else:
        x = data.unsqueeze(1)
    return LayerInput(x, lengths, _states(layer, x, parts, widths, batched), packed, batched)


def _raise(layer: nn.RNNBase, faults: list[str]) -> None:
    raise LayerInputError(listed(f"{type(layer).__name__} cannot run on these arguments:", faults))


def _rows(layer: nn.RNNBase, data: Tensor, packed: PackedSequence | None) -> int:
    return data.shape[0 if layer.batch_first else 1] if packed is None else int(packed.batch_sizes[0])


def _check_input(layer: nn.RNNBase, weight: Tensor, data: Tensor, packed: bool, faults: list[str]) -> None:
    axes = "N x T x D" if layer.batch_first else "T x N x D"
    if data.dim() not in ((2,) if packed else (2, 3)):
        wanted = "packed rows of width D" if packed else f"{axes}, or T x D for one row"
        faults.append(f"input has shape {tuple(data.shape)}, wanted {wanted}")
    elif data.shape[-1] != layer.input_size:
        faults.append(f"input has shape {tuple(data.shape)}, wanted {layer.input_size} (input_size) as its last size")
    if data.dtype != weight.dtype and not torch.is_autocast_enabled(data.device.type):
        faults.append(
            f"input is {data.dtype}, the weights are {weight.dtype}; convert the input with .to({weight.dtype}) "
            f"or the layer with .to({data.dtype})"
        )
    if data.device != weight.device:
        faults.append(f"input is on {data.device}, the weights are on {weight.device}")


def _parts(
    layer: nn.RNNBase, hx: Any, widths: Sequence[int], rows: int | None, data: Tensor, faults: list[str]
) -> list[Tensor] | None:
    """The tensors of `hx`; None if there are none."""
    if hx is None:
        return None
    found = cast("Sequence[Any]", hx if len(widths) > 1 else [hx])
    names = ["hx[0]", "hx[1]"] if len(widths) > 1 else ["hx"]
    if not isinstance(found, (tuple, list)) or len(found) != len(widths):
        faults.append(f"hx is of type {type(hx).__name__}, wanted the pair (h_0, c_0)")
        return None
    first = layer.num_layers * (2 if layer.bidirectional else 1)
    for name, part, width in zip(names, found, widths, strict=True):
        wanted = (first, width) if rows is None else (first, rows, width)
        axes = "layers * directions x " + ("H" if rows is None else "N x H")
        if not isinstance(part, Tensor):
            faults.append(f"{name} is of type {type(part).__name__}, wanted a tensor")
            continue
        if tuple(part.shape) != wanted:
            faults.append(f"{name} has shape {tuple(part.shape)}, wanted {axes} = {wanted}")
        if part.dtype != data.dtype and not torch.is_autocast_enabled(data.device.type):
            faults.append(f"{name} is {part.dtype}, the input is {data.dtype}")
        if part.device != data.device:
            faults.append(f"{name} is on {part.device}, the input is on {data.device}")
    return [part for part in found if isinstance(part, Tensor)]


def _states(
    layer: nn.RNNBase, x: Tensor, parts: list[Tensor] | None, widths: Sequence[int], batched: bool
) -> list[tuple[Tensor, ...]]:
    """The initial state of every network; zeros where none was given."""
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    if parts is None:
        zeros = tuple(x.new_zeros(x.shape[1], width) for width in widths)
        return [zeros] * count
    columns = [(part if batched else part.unsqueeze(1)).unbind(0) for part in parts]
    return [tuple(column) for column in zip(*columns, strict=True)]


State = tuple[Tensor, ...]


class LayerStep(nn.Module):
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
        """The contributions of input and hidden state to the gates, N x (gates * width) each."""
        return linear(x, self.weight_ih, self.bias_ih), linear(hidden, self.weight_hh, self.bias_hh)


class LSTMStep(LayerStep):
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


class GRUStep(LayerStep):
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


class RNNStep(LayerStep):
    """torch.nn.RNN's step, the Elman network."""

    def __init__(self, weights: Mapping[str, Tensor | None], activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__(weights)
        self.activation = activation

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """N x D and (N x H,) to the output N x H and the new state."""
        of_input, of_hidden = self.projections(x, state[0])
        hidden = self.activation(of_input + of_hidden)
        return hidden, (hidden,)


Nets = list[Recurrent | Bidirectional]
_REFUSED = {
    "initial": "a layer begins with zeros, or with the hx of the call",
    "links": "the step of a layer is torch's, over tensors; use Recurrent for a step net over names",
    "time_step": "the step of a layer is torch's, which takes no step number",
}
"""LayerInput of ``Recurrent`` that a layer refuses, and why."""
_WEIGHT_KINDS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


class RNNBase(nn.RNNBase):
    """A layer of torch.nn whose sequences are run by :class:`weft.recurrent.Recurrent`, one per layer and direction.

    Where a weight is no parameter (a parametrization, pruning, ``torch.func.functional_call``), it is another tensor at
    every call, for which no plan could be kept: then torch's own forward runs.
    """

    def _configure(self, how: Mapping[str, Any]) -> None:
        """After torch's constructor: keep what is handed to ``Recurrent``, which says at once if it is wrong.

        Raises UsageError for what a layer has no use for.
        """
        faults = [f"{name}: {why}" for name, why in _REFUSED.items() if name in how]
        if faults:
            raise UsageError(listed(f"invalid arguments of {type(self).__name__}:", faults))
        self.how = dict(how)
        self._nets: WeightKeyedCache[Nets] = WeightKeyedCache()
        self._networks()

    def make_step(self, weights: Mapping[str, Tensor | None]) -> LayerStep:
        """The cell of one layer and direction."""
        raise NotImplementedError

    @property
    def widths(self) -> tuple[int, ...]:
        """The width of every state."""
        return (self.hidden_size,)

    def forward(self, input: Any, hx: Any = None) -> tuple[Any, Any]:
        """As torch.nn's layer of the same name: ``(output, h_n)``, for an LSTM ``(output, (h_n, c_n))``.

        Args:
            input: T x N x D; N x T x D with ``batch_first``; T x D for one row; or a ``PackedSequence``.
            hx: the initial state, (layers * directions) x N x H, without N for one row; for an LSTM a pair, of
                which the first has width ``proj_size`` if there is one. ``None``: zeros.

        Raises ``LayerInputError``, which is a TypeError, ValueError and RuntimeError in one, with all that is wrong.
        """
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is None or dynamo.config.allow_rnn:
            return self._forward(input, hx)
        return _never_compiled()(self, input, hx)

    def _forward(self, input: Any, hx: Any) -> tuple[Any, Any]:
        weights = self._weights()
        given = read_input(self, weights[0], input, hx, self.widths)
        if not all(isinstance(weight, nn.Parameter) for weight in weights):
            return super().forward(input, hx)
        x = given.x
        last: list[tuple[Tensor, ...]] = []
        for layer, net in enumerate(self._networks()):
            x, after = _run(net, self._weights_of(layer), x, given, layer)
            last += after
            if self.training and self.dropout and layer < self.num_layers - 1:
                x = self._dropped(x, given)
        return self._output(x, given), self._last(last, given.batched)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._networks()  # an export has need of the networks of a copy

    def explain(self) -> str:
        """How every layer and direction runs; see ``Recurrent.explain``."""
        if not all(isinstance(weight, nn.Parameter) for weight in self._weights()):
            return "torch's own forward: a weight is no parameter, but made anew for every call"
        return FoldedText("\n\n".join(f"layer {layer}:\n{net.explain()}" for layer, net in enumerate(self._networks())))

    def extra_repr(self) -> str:
        """Torch's, and what is handed to ``Recurrent``."""
        return ", ".join([super().extra_repr(), *(f"{key}={value!r}" for key, value in self.how.items())])

    def _networks(self) -> Nets:
        """The networks of the layers, for the parameters that are there now."""
        return self._nets.get(self._weights(), self._make)

    def _weights(self) -> list[Tensor]:
        """The weights as they are now, in torch's order."""
        return [getattr(self, name) for name in cast("list[str]", self._flat_weights_names)]

    def _weights_of(self, layer: int) -> dict[str, Tensor]:
        """The weights of a layer as they are now, by their names in its network."""
        inside = {"cell": f"_l{layer}"}
        if self.bidirectional:
            inside = {"forward_net.cell": f"_l{layer}", "backward_net.cell": f"_l{layer}_reverse"}
        named = (
            (f"{net}.{kind}", getattr(self, kind + suffix, None))
            for net, suffix in inside.items()
            for kind in _WEIGHT_KINDS
        )
        return {name: weight for name, weight in named if weight is not None}

    def _make(self) -> Nets:
        nets: Nets = []
        for layer in range(self.num_layers):
            net = self._network(f"_l{layer}")
            nets.append(Bidirectional(net, self._network(f"_l{layer}_reverse")) if self.bidirectional else net)
        return nets

    def _network(self, suffix: str) -> Recurrent:
        return Recurrent(
            self.make_step({kind: getattr(self, kind + suffix, None) for kind in _WEIGHT_KINDS}), **self.how
        )

    def _dropped(self, x: Tensor, given: LayerInput) -> Tensor:
        """Dropout between layers; on packed rows, as torch does it, the numbers are drawn for what counts only."""
        packed = given.repacked(x)
        if packed is None:
            return dropout(x, self.dropout)
        return unpack(packed._replace(data=dropout(packed.data, self.dropout)))[0]

    def _output(self, x: Tensor, given: LayerInput) -> Any:
        if given.packed is not None:
            return given.repacked(x)
        if x.requires_grad and not self.bidirectional:  # both directions were put together in a tensor of its own
            x = (
                x.clone()
            )  # backward reads a layer's outputs again, and torch's may be written to, as by ReLU(inplace=True)
        if not given.batched:
            return x.squeeze(1)
        return x.transpose(0, 1) if self.batch_first else x

    def _last(self, last: list[tuple[Tensor, ...]], batched: bool) -> Any:
        stacked = [torch.stack(column) for column in zip(*last, strict=True)]
        parts = stacked if batched else [part.squeeze(1) for part in stacked]
        return tuple(parts) if len(parts) > 1 else parts[0]


def _run(
    net: Recurrent | Bidirectional, weights: dict[str, Tensor], x: Tensor, given: LayerInput, layer: int
) -> tuple[Tensor, list[Any]]:
    """One layer: its output, and the last state of each of its directions."""
    try:
        if isinstance(net, Bidirectional):
            states = given.states[2 * layer : 2 * layer + 2]
            result: Result = call_with(net, weights, x, states, lengths=given.lengths)
            return result.outputs, list(result.last)
        result = call_with(net, weights, x, given.states[layer], lengths=given.lengths)
        return result.outputs, [result.last]
    except Exception as error:
        error.add_note(f"weft: in layer {layer}")
        raise


@functools.cache
def _never_compiled() -> Any:
    """The insides of `forward`. Dynamo gives up every function that touches an RNN, and then tries those that it calls:
    they would be compiled piece by piece, for every shape anew."""
    return sys.modules["torch._dynamo"].disable(RNNBase._forward)


class LSTM(RNNBase, nn.LSTM):
    """A drop-in for ``torch.nn.LSTM`` (Hochreiter and Schmidhuber, 1997; projection: Sak et al., arXiv 1402.1128).

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size, device, dtype: as
            torch's, with the same errors.
        how: handed to :class:`weft.recurrent.Recurrent` for every layer and direction, such as ``backend=``.

    The class is a ``torch.nn.LSTM``: weights load both ways, and initialisation is torch's. Gates are in the order
    i, f, g, o. Dropout between layers draws the numbers that torch draws on the CPU. See `forward` for the call.

    Example:
        >>> net = weft.LSTM(8, 16)
        >>> outputs, (h, c) = net(torch.randn(20, 4, 8))
        >>> net.load_state_dict(nn.LSTM(8, 16).state_dict())
        <All keys matched successfully>
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **how: Any,
    ) -> None:
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size, device, dtype
        )
        self._configure(how)

    def make_step(self, weights: Mapping[str, Tensor | None]) -> LSTMStep:
        """The cell of one layer and direction."""
        return LSTMStep(weights)

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the hidden state and of the cell state."""
        return (self.proj_size or self.hidden_size, self.hidden_size)


class GRU(RNNBase, nn.GRU):
    """A drop-in for ``torch.nn.GRU`` (Cho et al., arXiv 1406.1078, with the reset gate behind the projection).

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype: as torch's, with
            the same errors.
        how: handed to :class:`weft.recurrent.Recurrent` for every layer and direction, such as ``backend=``.

    The class is a ``torch.nn.GRU``: weights load both ways, and initialisation is torch's. Gates are in the order
    r, z, n. Dropout between layers draws the numbers that torch draws on the CPU. See `forward` for the call.

    Example:
        >>> outputs, last = weft.GRU(8, 16, batch_first=True)(torch.randn(4, 20, 8))
        >>> outputs.shape, last.shape
        (torch.Size([4, 20, 16]), torch.Size([1, 4, 16]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **how: Any,
    ) -> None:
        options = {"bidirectional": bidirectional, "device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, **options)
        self._configure(how)

    def make_step(self, weights: Mapping[str, Tensor | None]) -> GRUStep:
        """The cell of one layer and direction."""
        return GRUStep(weights)


class RNN(RNNBase, nn.RNN):
    """A drop-in for ``torch.nn.RNN`` (Elman, "Finding structure in time", 1990).

    Args:
        input_size, hidden_size, num_layers, nonlinearity, bias, batch_first, dropout, bidirectional, device, dtype: as
            torch's, with the same errors.
        how: handed to :class:`weft.recurrent.Recurrent` for every layer and direction, such as ``backend=``.

    The class is a ``torch.nn.RNN``: weights load both ways, and initialisation is torch's. See `forward` for the call.

    Example:
        >>> outputs, last = weft.RNN(8, 16, nonlinearity="relu")(torch.randn(20, 4, 8))
        >>> outputs.shape
        torch.Size([20, 4, 16])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **how: Any,
    ) -> None:
        options = {"bidirectional": bidirectional, "device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, num_layers, nonlinearity, bias, batch_first, dropout, **options)
        self._configure(how)

    def make_step(self, weights: Mapping[str, Tensor | None]) -> RNNStep:
        """The cell of one layer and direction."""
        return RNNStep(weights, torch.tanh if self.nonlinearity == "tanh" else torch.relu)
