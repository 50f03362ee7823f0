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
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from weft.core.errors import SpecError
from weft.core.validation import Validator
from weft.recurrent.layers.composite import Bidirectional, explained
from weft.recurrent.recurrent import Recurrent
from weft.recurrent.sequence import pack_like

Net = TypeVar("Net")


def exporting() -> bool:
    """Whether a graph is made of values that are not there yet; not by Dynamo, which sees the real parameters."""
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


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
    """Arguments that do not fit a layer. It is whatever torch.nn's layers raise for such a fault.

    Example:
        >>> weft.GRU(3, 8)(torch.ones(5, 2, 4))
        Traceback (most recent call last):
        weft.errors.LayerInputError: ...
    """


class LayerInput(NamedTuple):
    """Time first, with rows; `lengths` (on the CPU) only where they differ from T; a state per network."""

    x: Tensor
    lengths: Tensor | None
    states: list[tuple[Tensor, ...]]
    packed: PackedSequence | None
    batched: bool

    def repacked(self, x: Tensor) -> PackedSequence | None:
        """T x N x ... in the form of the input, where that was packed."""
        if self.packed is None:
            return None
        lengths = pad_packed_sequence(self.packed)[1] if self.lengths is None else self.lengths
        return pack_like(x, lengths, self.packed)


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
        (hidden,) = state
        of_input, of_hidden = self.projections(x, hidden)
        r_input, z_input, n_input = of_input.chunk(3, -1)
        r_hidden, z_hidden, n_hidden = of_hidden.chunk(3, -1)
        new = (n_input + (r_input + r_hidden).sigmoid() * n_hidden).tanh()
        hidden = new + (z_input + z_hidden).sigmoid() * (hidden - new)
        return hidden, (hidden,)


class RNNStep(LayerStep):
    """torch.nn.RNN's step, the Elman network."""

    activation = staticmethod(torch.tanh)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        of_input, of_hidden = self.projections(x, state[0])
        hidden = self.activation(of_input + of_hidden)
        return hidden, (hidden,)


class _ReluStep(RNNStep):
    activation = staticmethod(torch.relu)


Nets = list[Recurrent | Bidirectional]
_STEPS: dict[str, type[LayerStep]] = {"LSTM": LSTMStep, "GRU": GRUStep, "RNN_TANH": RNNStep, "RNN_RELU": _ReluStep}
_REFUSED = {
    "initial": "a layer begins with zeros, or with the hx of the call",
    "links": "the step of a layer is torch's, over tensors; use Recurrent for a step net over names",
    "time_step": "the step of a layer is torch's, which takes no step number",
}
"""Arguments of ``Recurrent`` that a layer refuses, and why."""
_WEIGHT_KINDS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
_TORCHS = {
    *("input_size", "hidden_size", "num_layers", "nonlinearity", "bias", "batch_first", "dropout", "bidirectional"),
    *("proj_size", "device", "dtype"),
}


class RNNBase(nn.RNNBase):
    """A layer of torch.nn whose sequences are run by :class:`weft.recurrent.Recurrent`, one per layer and direction.

    Where a weight is no parameter (a parametrization, pruning, ``torch.func.functional_call``), it is another tensor at
    every call, for which no plan could be kept: then torch's own forward runs.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Torch's arguments, as torch has them and with its errors; all others go to ``Recurrent``."""
        how = {name: options.pop(name) for name in [*options] if name not in _TORCHS}
        super().__init__(*arguments, **options)
        with Validator(f"invalid arguments of {type(self).__name__}") as check:
            check.add(*(f"{name}: {why}" for name, why in _REFUSED.items() if name in how))
            known = {*_TORCHS, *_REFUSED, *inspect.signature(Recurrent).parameters} - {"cell"}
            for name in how.keys() - known:
                near = "".join(f"; did you mean {each}?" for each in get_close_matches(name, known, 1))
                check.mismatch(f"{name} is not an option of {type(self).__name__}{near}")
        self.how = how
        self._nets: WeightKeyedCache[Nets] = WeightKeyedCache()
        self._networks()

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
        given = self._read(weights[0], input, hx)
        if not all(isinstance(weight, nn.Parameter) for weight in weights):
            return super().forward(input, hx)
        x = given.x
        last: list[tuple[Tensor, ...]] = []
        for layer, net in enumerate(self._networks()):
            try:
                x, after = self._run(layer, net, x, given)
            except Exception as error:
                error.add_note(f"weft: in layer {layer}")
                raise
            last += after
            if self.training and self.dropout and layer < self.num_layers - 1:
                x = self._dropped(x, given)
        stacked = [torch.stack(column) for column in zip(*last, strict=True)]
        parts = stacked if given.batched else [part.squeeze(1) for part in stacked]
        return self._output(x, given), tuple(parts) if len(parts) > 1 else parts[0]

    def _run(
        self, layer: int, net: Recurrent | Bidirectional, x: Tensor, given: LayerInput
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """One layer: its output, and the last state of each of its directions."""
        both = isinstance(net, Bidirectional)
        state = given.states[2 * layer : 2 * layer + 2] if both else given.states[layer]
        if exporting():  # with the weights of the export, by their names in the network
            prefixes = ("forward_net.cell", "backward_net.cell") if both else ("cell",)
            named = zip(prefixes, self._kinds(layer), strict=True)
            weights = {f"{at}.{kind}": w for at, kinds in named for kind, w in kinds.items() if w is not None}
            result = torch.func.functional_call(net, weights, (x, state), {"lengths": given.lengths})
        else:
            result = net(x, state, lengths=given.lengths)
        return result.outputs, list(result.last) if both else [result.last]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._networks()  # an export has need of the networks of a copy

    def explain(self) -> str:
        """How every layer and direction runs; see ``Recurrent.explain``."""
        if not all(isinstance(weight, nn.Parameter) for weight in self._weights()):
            return "torch's own forward: a weight is no parameter, but made anew for every call"
        return explained({f"layer {layer}": net for layer, net in enumerate(self._networks())})

    def extra_repr(self) -> str:
        return ", ".join([super().extra_repr(), *(f"{key}={value!r}" for key, value in self.how.items())])

    def _weights(self) -> list[Tensor]:
        """The weights as they are now, in torch's order."""
        return [getattr(self, name) for name in cast("list[str]", self._flat_weights_names)]

    def _kinds(self, layer: int) -> list[dict[str, Tensor | None]]:
        """The weights of each direction of a layer as they are now."""
        suffixes = ("", "_reverse") if self.bidirectional else ("",)
        return [{kind: getattr(self, f"{kind}_l{layer}{each}", None) for kind in _WEIGHT_KINDS} for each in suffixes]

    def _networks(self) -> Nets:
        """The networks of the layers, for the parameters that are there now."""

        def make() -> Nets:
            step = _STEPS[self.mode]
            layers = [[Recurrent(step(kinds), **self.how) for kinds in self._kinds(i)] for i in range(self.num_layers)]
            return [Bidirectional(*each) if self.bidirectional else each[0] for each in layers]

        return self._nets.get(self._weights(), make)

    def _read(self, weight: Tensor, input: Any, hx: Any) -> LayerInput:
        """The arguments of a call, checked against the layer, of which `weight` is one."""
        packed = input if isinstance(input, PackedSequence) else None
        data: Any = input if packed is None else packed.data
        widths = [*([self.proj_size or self.hidden_size] if self.mode == "LSTM" else []), self.hidden_size]
        shapes: list[tuple[int, ...]] = []
        with Validator(f"{type(self).__name__} cannot run on these arguments", LayerInputError) as check:
            if self._check_input(weight, data, packed is not None, check):
                rows = [] if packed is None and data.dim() == 2 else [data.shape[0 if self.batch_first else 1]]
                rows = rows if packed is None else [int(packed.batch_sizes[0])]
                count = self.num_layers * (2 if self.bidirectional else 1)
                shapes = [(count, *rows, width) for width in widths]
                self._check_states(hx, shapes, data, check)
        batched = packed is not None or data.dim() != 2
        lengths = None
        if packed is not None:
            x, lengths = pad_packed_sequence(packed)
            lengths = lengths if int(lengths.min()) < len(x) else None
        elif batched:
            x = data.transpose(0, 1) if self.batch_first else data
        else:
            x = data.unsqueeze(1)
        parts = [x.new_zeros(each) for each in shapes] if hx is None else [hx] if len(shapes) == 1 else hx
        columns = [(part if batched else part.unsqueeze(1)).unbind(0) for part in parts]
        return LayerInput(x, lengths, list(zip(*columns, strict=True)), packed, batched)

    def _check_input(self, weight: Tensor, data: Any, packed: bool, check: Validator) -> bool:
        """Note what is wrong with the input; whether it has as many axes as it should."""
        if not check.instance("input", data, Tensor, "a tensor or a PackedSequence"):
            return False
        shape, fits = tuple(data.shape), data.dim() in ((2,) if packed else (2, 3))
        if not fits:
            axes = "N x T x D" if self.batch_first else "T x N x D"
            wanted = "packed rows of width D" if packed else f"{axes}, or T x D for one row"
            check.add(f"input has shape {shape}, wanted {wanted}")
        elif shape[-1] != self.input_size:
            check.add(f"input has shape {shape}, wanted {self.input_size} (input_size) as its last size")
        if data.dtype != weight.dtype and not torch.is_autocast_enabled(data.device.type):
            check.add(
                f"input is {data.dtype}, the weights are {weight.dtype}; convert the input with .to({weight.dtype}) "
                f"or the layer with .to({data.dtype})"
            )
        if data.device != weight.device:
            check.add(f"input is on {data.device}, the weights are on {weight.device}")
        return fits

    def _check_states(self, hx: Any, shapes: Sequence[tuple[int, ...]], data: Tensor, check: Validator) -> None:
        """Note what is wrong with the initial state."""
        names, found = (["hx"], [hx]) if len(shapes) == 1 else (["hx[0]", "hx[1]"], hx)
        if hx is None:
            return
        if not isinstance(found, tuple | list) or len(cast("Sequence[Any]", found)) != len(names):
            check.add(f"hx is of type {type(hx).__name__}, wanted the pair (h_0, c_0)")
            return
        for name, part, wanted in zip(names, cast("Sequence[Any]", found), shapes, strict=True):
            if check.instance(name, part, Tensor, "a tensor"):
                if tuple(part.shape) != wanted:
                    axes = "layers * directions x " + ("H" if len(wanted) == 2 else "N x H")
                    check.add(f"{name} has shape {tuple(part.shape)}, wanted {axes} = {wanted}")
                if part.dtype != data.dtype and not torch.is_autocast_enabled(data.device.type):
                    check.add(f"{name} is {part.dtype}, the input is {data.dtype}")
                if part.device != data.device:
                    check.add(f"{name} is on {part.device}, the input is on {data.device}")

    def _dropped(self, x: Tensor, given: LayerInput) -> Tensor:
        """Dropout between layers; on packed rows, as torch does it, the numbers are drawn for what counts only."""
        packed = given.repacked(x)
        if packed is None:
            return dropout(x, self.dropout)
        return pad_packed_sequence(packed._replace(data=dropout(packed.data, self.dropout)))[0]

    def _output(self, x: Tensor, given: LayerInput) -> Any:
        if given.packed is not None:
            return given.repacked(x)
        # Backward reads a layer's outputs again, and torch's may be written to, as by ReLU(inplace=True). Both
        # directions were put together in a tensor of its own.
        x = x.clone() if x.requires_grad and not self.bidirectional else x
        if not given.batched:
            return x.squeeze(1)
        return x.transpose(0, 1) if self.batch_first else x


@functools.cache
def _never_compiled() -> Any:
    """The insides of `forward`. Dynamo gives up every function that touches an RNN, and then tries those that it calls:
    they would be compiled piece by piece, for every shape anew."""
    return sys.modules["torch._dynamo"].disable(RNNBase._forward)


class LSTM(RNNBase, nn.LSTM):
    """A drop-in for ``torch.nn.LSTM`` (Hochreiter and Schmidhuber, 1997; projection: Sak et al., arXiv 1402.1128).

    Arguments are torch's, with the same errors; further ones, such as ``backend=``, go to
    :class:`weft.recurrent.Recurrent` for every layer and direction. The class is a ``torch.nn.LSTM``: weights load both
    ways, and initialisation is torch's. Dropout between layers draws the numbers that torch draws on the CPU.

    Example:
        >>> net = weft.LSTM(8, 16)
        >>> outputs, (h, c) = net(torch.randn(20, 4, 8))
        >>> net.load_state_dict(nn.LSTM(8, 16).state_dict())
        <All keys matched successfully>
    """


class GRU(RNNBase, nn.GRU):
    """A drop-in for ``torch.nn.GRU`` (Cho et al., arXiv 1406.1078, with the reset gate behind the projection).

    Arguments and weights as for :class:`LSTM`, but no ``proj_size``.

    Example:
        >>> outputs, last = weft.GRU(8, 16, batch_first=True)(torch.randn(4, 20, 8))
        >>> outputs.shape, last.shape
        (torch.Size([4, 20, 16]), torch.Size([1, 4, 16]))
    """


class RNN(RNNBase, nn.RNN):
    """A drop-in for ``torch.nn.RNN`` (Elman, "Finding structure in time", 1990).

    Arguments and weights as for :class:`LSTM`, but no ``proj_size``, and ``nonlinearity`` is ``"tanh"`` or ``"relu"``.

    Example:
        >>> outputs, last = weft.RNN(8, 16, nonlinearity="relu")(torch.randn(20, 4, 8))
        >>> outputs.shape
        torch.Size([20, 4, 16])
    """
