"""What the drop-ins of torch.nn's recurrent layers have in common: their way through layers and directions.

    x -> [ forward | backward ] -> dropout -> [ forward | backward ] -> ... -> output
              layer 0                              layer 1
              h_n[0] | h_n[1]                      h_n[2] | h_n[3]

Constructor, parameters and their names are torch's own, inherited. Only `forward` is ours.
"""

import functools
import sys
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from weft.core.errors import UsageError, listed
from weft.recurrent.layers.arguments import Arguments, read
from weft.recurrent.layers.beside import Beside, call
from weft.recurrent.layers.bidirectional import Bidirectional
from weft.recurrent.layers.steps import Step
from weft.recurrent.network import FoldedText, Recurrent
from weft.recurrent.packed import unpack
from weft.recurrent.unrolling import Result

Nets = list[Recurrent | Bidirectional]
NOT_OURS = {
    "initial": "a layer begins with zeros, or with the hx of the call",
    "links": "the step of a layer is torch's, over tensors; use Recurrent for a step net over names",
    "time_step": "the step of a layer is torch's, which takes no step number",
}
"""Arguments of ``Recurrent`` that a layer refuses, and why."""
KINDS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


class DropIn(nn.RNNBase):
    """A layer of torch.nn whose sequences are run by :class:`weft.recurrent.Recurrent`, one per layer and direction.

    Where a weight is no parameter (a parametrization, pruning, ``torch.func.functional_call``), it is another tensor at
    every call, for which no plan could be kept: then torch's own forward runs.
    """

    def begin(self, how: Mapping[str, Any]) -> None:
        """After torch's constructor: keep what is handed to ``Recurrent``, which says at once if it is wrong.

        Raises UsageError for what a layer has no use for.
        """
        faults = [f"{name}: {why}" for name, why in NOT_OURS.items() if name in how]
        if faults:
            raise UsageError(listed(f"{type(self).__name__} cannot be built from these arguments:", faults))
        self.how = dict(how)
        self._nets: Beside[Nets] = Beside()
        self._made()

    def make_step(self, weights: Mapping[str, Tensor | None]) -> Step:
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
        given = read(self, weights[0], input, hx, self.widths)
        if not all(isinstance(weight, nn.Parameter) for weight in weights):
            return super().forward(input, hx)
        x = given.x
        last: list[tuple[Tensor, ...]] = []
        for layer, net in enumerate(self._made()):
            x, after = _run(net, self._weights_of(layer), x, given, layer)
            last += after
            if self.training and self.dropout and layer < self.num_layers - 1:
                x = self._dropped(x, given)
        return self._output(x, given), self._last(last, given.batched)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._made()  # an export has need of the networks of a copy

    def explain(self) -> str:
        """How every layer and direction runs; see ``Recurrent.explain``."""
        if not all(isinstance(weight, nn.Parameter) for weight in self._weights()):
            return "torch's own forward: a weight is no parameter, but made anew for every call"
        return FoldedText("\n\n".join(f"layer {layer}:\n{net.explain()}" for layer, net in enumerate(self._made())))

    def extra_repr(self) -> str:
        """Torch's, and what is handed to ``Recurrent``."""
        return ", ".join([super().extra_repr(), *(f"{key}={value!r}" for key, value in self.how.items())])

    def _made(self) -> Nets:
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
            (f"{net}.{kind}", getattr(self, kind + suffix, None)) for net, suffix in inside.items() for kind in KINDS
        )
        return {name: weight for name, weight in named if weight is not None}

    def _make(self) -> Nets:
        nets: Nets = []
        for layer in range(self.num_layers):
            net = self._network(f"_l{layer}")
            nets.append(Bidirectional(net, self._network(f"_l{layer}_reverse")) if self.bidirectional else net)
        return nets

    def _network(self, suffix: str) -> Recurrent:
        return Recurrent(self.make_step({kind: getattr(self, kind + suffix, None) for kind in KINDS}), **self.how)

    def _dropped(self, x: Tensor, given: Arguments) -> Tensor:
        """Dropout between layers; on packed rows, as torch does it, the numbers are drawn for what counts only."""
        packed = given.repacked(x)
        if packed is None:
            return dropout(x, self.dropout)
        return unpack(packed._replace(data=dropout(packed.data, self.dropout)))[0]

    def _output(self, x: Tensor, given: Arguments) -> Any:
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
    net: Recurrent | Bidirectional, weights: dict[str, Tensor], x: Tensor, given: Arguments, layer: int
) -> tuple[Tensor, list[Any]]:
    """One layer: its output, and the last state of each of its directions."""
    try:
        if isinstance(net, Bidirectional):
            states = given.states[2 * layer : 2 * layer + 2]
            result: Result = call(net, weights, x, states, lengths=given.lengths)
            return result.outputs, list(result.last)
        result = call(net, weights, x, given.states[layer], lengths=given.lengths)
        return result.outputs, [result.last]
    except Exception as error:
        error.add_note(f"weft: in layer {layer}")
        raise


@functools.cache
def _never_compiled() -> Any:
    """The insides of `forward`. Dynamo gives up every function that touches an RNN, and then tries those that it calls:
    they would be compiled piece by piece, for every shape anew."""
    return sys.modules["torch._dynamo"].disable(DropIn._forward)
