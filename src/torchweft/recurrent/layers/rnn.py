"""Drop-in replacements for torch.nn's recurrent layers: the same arguments, parameters, keys and results.

    x -> [ forward | backward ] -> dropout -> [ forward | backward ] -> ... -> output
              layer 0                              layer 1
              h_n[0] | h_n[1]                      h_n[2] | h_n[3]

    nn.LSTM           weight_ih_l0, weight_hh_l0, ...          the only owner; keys and copies as torch has them
       |                    ^ the same parameters
       +-- cache:     Recurrent(LSTMStep(weights)), ...        not a child: no keys, not copied, not pickled

Constructor, parameters and their names are inherited from torch; only `forward` is replaced. It runs a network per
layer and direction, over cells that register the layer's own parameters. With such networks as children, keys, copies
and `isinstance` checks would not be those of a ``torch.nn`` layer.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypedDict, TypeVar, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from torchweft.core.errors import SpecError
from torchweft.core.validation import Validator, suggest
from torchweft.recurrent.backend_registry import BackendName
from torchweft.recurrent.layers.composite import Bidirectional, explain_networks
from torchweft.recurrent.plan_backends import Memory
from torchweft.recurrent.plan_cache import VerifyMode
from torchweft.recurrent.pytorch_internals import loaded_dynamo
from torchweft.recurrent.recurrent import Recurrent
from torchweft.recurrent.sequence import pack_like

Net = TypeVar("Net")


def is_exporting() -> bool:
    """Whether the parameters are symbolic stand-ins. Under Dynamo alone they are the real ones."""
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


class WeightKeyedCache(Generic[Net]):
    """A cache of one object, keyed by the tensors that it was made of."""

    def __init__(self) -> None:
        self._kept: tuple[list[Tensor], Net] | None = None

    def get(self, weights: Sequence[Tensor], make: Callable[[], Net]) -> Net:
        """The cached object if it was made of these tensors, else a new one."""
        kept = self._kept
        # An export brings stand-ins for the weights. The cached network must stay, because it is in the graph.
        if kept is None or (list(map(id, kept[0])) != list(map(id, weights)) and not is_exporting()):
            self._kept = kept = (list(weights), make())
        return kept[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return (WeightKeyedCache, ())  # a copy has other weights


class LayerInputError(SpecError, ValueError, RuntimeError):
    """Invalid arguments of a layer. A subclass of all errors that torch.nn's layers raise for them."""


class LayerInput(NamedTuple):
    """Time first, with rows. `lengths` (on the CPU) only if they differ from T. One state per network."""

    x: Tensor
    lengths: Tensor | None
    states: list[tuple[Tensor, ...]]
    packed: PackedSequence | None
    batched: bool

    def pack_again(self, x: Tensor) -> PackedSequence | None:
        """T x N x ... in the packed form of the input, or None if that was not packed."""
        if self.packed is None:
            return None
        lengths = pad_packed_sequence(self.packed)[1] if self.lengths is None else self.lengths
        return pack_like(x, lengths, self.packed)


State = tuple[Tensor, ...]


class LayerStep(nn.Module):
    """One time step. `weights` are attributes under their names, parameters as parameters."""

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
    """torch.nn.LSTM's step: gates in the order i, f, g, o. With weight_hr, the hidden state is projected."""

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
# Arguments of ``Recurrent`` that a layer rejects, and why.
_REJECTED = {
    "initial": "a layer starts from zeros, or from the hx of the call",
    "links": "the step of a layer is torch's, over tensors; use Recurrent for a step net over names",
    "time_step": "the step of a layer is torch's, which takes no step number",
}
_WEIGHT_KINDS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
_TORCH_OPTIONS = {
    *("input_size", "hidden_size", "num_layers", "nonlinearity", "bias", "batch_first", "dropout", "bidirectional"),
    *("proj_size", "device", "dtype"),
}


class LayerOptions(TypedDict, total=False):
    """Keyword arguments of every layer, for type checkers: those of torch.nn, and those of `Recurrent`."""

    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool
    device: Any
    dtype: torch.dtype | None
    truncate: int | None
    memory: Memory
    backend: BackendName
    verify: VerifyMode


class LSTMOptions(LayerOptions, total=False):
    proj_size: int


class RNNOptions(LayerOptions, total=False):
    nonlinearity: Literal["tanh", "relu"]


class RNNBase(nn.RNNBase):
    """A layer of torch.nn whose sequences are run by :class:`weft.recurrent.Recurrent`, one per layer and direction.

    If a weight is not a parameter (a parametrization, pruning, ``torch.func.functional_call``), it is a new tensor at
    every call, so no plan could be reused. Then torch's own forward runs.
    """

    def __init__(self, input_size: int, hidden_size: int, *more: Any, **options: Any) -> None:
        """Torch's arguments, with torch's errors. All others go to ``Recurrent``."""
        how = {name: options.pop(name) for name in [*options] if name not in _TORCH_OPTIONS}
        super().__init__(*cast(Any, (input_size, hidden_size, *more)), **options)
        with Validator(f"invalid arguments of {type(self).__name__}") as check:
            check.add(*(f"{name}: {why}" for name, why in _REJECTED.items() if name in how))
            known = {*_TORCH_OPTIONS, *_REJECTED, *inspect.signature(Recurrent).parameters} - {"cell"}
            for name in how.keys() - known:
                check.mismatch(f"{name} is not an option of {type(self).__name__}{suggest(name, known)}")
        self.how = how
        self._nets: WeightKeyedCache[Nets] = WeightKeyedCache()
        self._layer_networks()

    def forward(self, input: Any, hx: Any = None) -> tuple[Any, Any]:
        """The results of torch.nn's layer: ``(output, h_n)``, for an LSTM ``(output, (h_n, c_n))``.

        Args:
            input: T x N x D; N x T x D with ``batch_first``; T x D for one row; or a ``PackedSequence``.
            hx: the initial state, (layers * directions) x N x H, without N for one row; for an LSTM a pair, whose
                first state has width ``proj_size`` if it is set. ``None``: zeros.

        Raises ``LayerInputError``, which is a TypeError, ValueError and RuntimeError in one, and lists all faults.
        """
        dynamo = loaded_dynamo()
        if dynamo is None or dynamo.config.allow_rnn:
            return self._run_layers(input, hx)
        return _uncompiled_forward()(self, input, hx)

    def _run_layers(self, input: Any, hx: Any) -> tuple[Any, Any]:
        weights = self._flat_parameters()
        call = self._read_call(weights[0], input, hx)
        # After the checks, so that both paths report the same errors.
        if not all(isinstance(weight, nn.Parameter) for weight in weights):
            return super().forward(input, hx)
        x = call.x
        last: list[tuple[Tensor, ...]] = []
        for layer, net in enumerate(self._layer_networks()):
            try:
                x, after = self._run_layer(layer, net, x, call)
            except Exception as error:
                error.add_note(f"torchweft: in layer {layer}")
                raise
            last += after
            if self.training and self.dropout and layer < self.num_layers - 1:
                x = self._drop_entries(x, call)
        stacked = [torch.stack(column) for column in zip(*last, strict=True)]
        parts = stacked if call.batched else [part.squeeze(1) for part in stacked]
        return self._restore_form(x, call), tuple(parts) if len(parts) > 1 else parts[0]

    def _run_layer(
        self, layer: int, net: Recurrent | Bidirectional, x: Tensor, call: LayerInput
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        two_way = isinstance(net, Bidirectional)
        state = call.states[2 * layer : 2 * layer + 2] if two_way else call.states[layer]
        if is_exporting():
            # The network holds the original parameters. Replace them by the stand-ins of the export.
            prefixes = ("forward_net.cell", "backward_net.cell") if two_way else ("cell",)
            named = zip(prefixes, self._weights_by_kind(layer), strict=True)
            weights = {f"{at}.{kind}": w for at, kinds in named for kind, w in kinds.items() if w is not None}
            result = torch.func.functional_call(net, weights, (x, state), {"lengths": call.lengths})
        else:
            result = net(x, state, lengths=call.lengths)
        return result.outputs, list(result.last) if two_way else [result.last]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._layer_networks()  # an export cannot create them, because its weights are not real

    def explain(self) -> str:
        """The explanation of every layer and direction; see ``Recurrent.explain``."""
        if not all(isinstance(weight, nn.Parameter) for weight in self._flat_parameters()):
            return "torch's own forward: a weight is not a parameter, but computed again for every call"
        return explain_networks({f"layer {layer}": net for layer, net in enumerate(self._layer_networks())})

    def extra_repr(self) -> str:
        return ", ".join([super().extra_repr(), *(f"{key}={value!r}" for key, value in self.how.items())])

    def _flat_parameters(self) -> list[Tensor]:
        return [getattr(self, name) for name in cast("list[str]", self._flat_weights_names)]

    def _weights_by_kind(self, layer: int) -> list[dict[str, Tensor | None]]:
        suffixes = ("", "_reverse") if self.bidirectional else ("",)
        return [{kind: getattr(self, f"{kind}_l{layer}{end}", None) for kind in _WEIGHT_KINDS} for end in suffixes]

    def _layer_networks(self) -> Nets:
        # The networks of the layers, for the current parameters.

        def make_networks() -> Nets:
            step, layers = _STEPS[self.mode], range(self.num_layers)
            nets = [[Recurrent(step(kinds), **self.how) for kinds in self._weights_by_kind(i)] for i in layers]
            return [Bidirectional(*directions) if self.bidirectional else directions[0] for directions in nets]

        return self._nets.get(self._flat_parameters(), make_networks)

    def _read_call(self, weight: Tensor, input: Any, hx: Any) -> LayerInput:
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
            # Without padding no mask is needed, and the plan is the one of plain tensors.
            lengths = lengths if int(lengths.min()) < len(x) else None
        elif batched:
            x = data.transpose(0, 1) if self.batch_first else data
        else:
            x = data.unsqueeze(1)
        parts = [x.new_zeros(shape) for shape in shapes] if hx is None else [hx] if len(shapes) == 1 else hx
        columns = [(part if batched else part.unsqueeze(1)).unbind(0) for part in parts]
        return LayerInput(x, lengths, list(zip(*columns, strict=True)), packed, batched)

    def _check_input(self, weight: Tensor, data: Any, packed: bool, check: Validator) -> bool:
        """Add the faults of the input to `check`. Returns whether its number of axes is right."""
        steps = "; if the list holds the steps: torch.stack(steps)" if isinstance(cast(object, data), list) else ""
        if not check.instance("input", data, Tensor, f"a tensor or a PackedSequence{steps}"):
            return False
        shape, fits = tuple(data.shape), data.dim() in ((2,) if packed else (2, 3))
        if not fits:
            axes = "N x T x D" if self.batch_first else "T x N x D"
            form = "packed rows of width D" if packed else f"{axes}, or T x D for one row"
            check.add(f"input has shape {shape}, wanted {form}")
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
        names, parts = (["hx"], [hx]) if len(shapes) == 1 else (["hx[0]", "hx[1]"], hx)
        if hx is None:
            return
        if not isinstance(parts, tuple | list) or len(cast("Sequence[Any]", parts)) != len(names):
            check.add(f"hx is of type {type(hx).__name__}, wanted the pair (h_0, c_0)")
            return
        for name, part, shape in zip(names, cast("Sequence[Any]", parts), shapes, strict=True):
            if check.instance(name, part, Tensor, "a tensor"):
                if tuple(part.shape) != shape:
                    axes = "layers * directions x " + ("H" if len(shape) == 2 else "N x H")
                    check.add(f"{name} has shape {tuple(part.shape)}, wanted {axes} = {shape}")
                if part.dtype != data.dtype and not torch.is_autocast_enabled(data.device.type):
                    check.add(f"{name} is {part.dtype}, the input is {data.dtype}")
                if part.device != data.device:
                    check.add(f"{name} is on {part.device}, the input is on {data.device}")

    def _drop_entries(self, x: Tensor, call: LayerInput) -> Tensor:
        # On packed rows torch draws numbers for the valid steps only. Other numbers would not reproduce its results.
        packed = call.pack_again(x)
        if packed is None:
            return dropout(x, self.dropout)
        return pad_packed_sequence(packed._replace(data=dropout(packed.data, self.dropout)))[0]

    def _restore_form(self, x: Tensor, call: LayerInput) -> Any:
        if call.packed is not None:
            return call.pack_again(x)
        # Backward reads the outputs again, but the caller can write into torch's, e.g. by ReLU(inplace=True). A
        # bidirectional layer already concatenated its outputs into a new tensor.
        x = x.clone() if x.requires_grad and not self.bidirectional else x
        if not call.batched:
            return x.squeeze(1)
        return x.transpose(0, 1) if self.batch_first else x


@functools.cache
def _uncompiled_forward() -> Any:
    # Dynamo gives up on every function that touches an RNN, and then tries the functions that it calls. Those would be
    # compiled piece by piece, again for every shape.
    return loaded_dynamo().disable(RNNBase._run_layers)


class LSTM(RNNBase, nn.LSTM):
    """A drop-in for ``torch.nn.LSTM`` (Hochreiter and Schmidhuber, 1997; projection: Sak et al., arXiv 1402.1128).

    Arguments are torch's, with the same errors. Further ones, such as ``backend=``, go to
    :class:`weft.recurrent.Recurrent` for every layer and direction. The class is a ``torch.nn.LSTM``: weights load in
    both directions, and initialisation is torch's. Dropout between layers draws torch's numbers on the CPU.

    Example:
        >>> net = weft.LSTM(8, 16)
        >>> outputs, (h, c) = net(torch.randn(20, 4, 8))
        >>> net.load_state_dict(nn.LSTM(8, 16).state_dict())
        <All keys matched successfully>
    """

    def __init__(self, input_size: int, hidden_size: int, *more: Any, **options: Unpack[LSTMOptions]) -> None:
        super().__init__(input_size, hidden_size, *more, **options)


class GRU(RNNBase, nn.GRU):
    """A drop-in for ``torch.nn.GRU`` (Cho et al., arXiv 1406.1078, with the reset gate after the projection).

    Arguments and weights as for :class:`LSTM`, but no ``proj_size``.

    Example:
        >>> outputs, last = weft.GRU(8, 16, batch_first=True)(torch.randn(4, 20, 8))
    """

    def __init__(self, input_size: int, hidden_size: int, *more: Any, **options: Unpack[LayerOptions]) -> None:
        super().__init__(input_size, hidden_size, *more, **options)


class RNN(RNNBase, nn.RNN):
    """A drop-in for ``torch.nn.RNN`` (Elman, "Finding structure in time", 1990).

    Arguments and weights as for :class:`LSTM`, but no ``proj_size``, and ``nonlinearity`` is ``"tanh"`` or ``"relu"``.

    Example:
        >>> outputs, last = weft.RNN(8, 16, nonlinearity="relu")(torch.randn(20, 4, 8))
    """

    def __init__(self, input_size: int, hidden_size: int, *more: Any, **options: Unpack[RNNOptions]) -> None:
        super().__init__(input_size, hidden_size, *more, **options)
