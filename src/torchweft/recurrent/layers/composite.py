"""Networks made of networks: one from each end of a sequence, or layers upon each other.

    x_0  x_1  x_2 ...           forward_net   -> -> ->     y_0   y_1   y_2
                                backward_net  <- <- <-     z_0   z_1   z_2
                                outputs                    merge(y, z), at every step

After Schuster and Paliwal, "Bidirectional recurrent neural networks" (1997). Backward, a row is read within its length:

    t            0  1  2  3  4          flipped      0  1  2  3  4
    row, len 3   a  b  c  .  .                       .  .  c  b  a      mask: . . x x x
    reset              R                             a reset lies between two steps, b | c:
                                                     .  .  c  R  a      so it moves by one step

Reversing each row by a gather with its own indices is the usual way. Here all of time is flipped, which puts the
padding first, and a mask marks it. A row then begins with its mask, and the flip back restores every position.

    x --> layer 0 --> dropout --> layer 1 --> dropout --(+)--> layer 2 --(+)--> y       (+): residual, adds the layer's
                               '-------------------------^ '--------------^                  input

Each layer of a stack runs over the whole sequence before the next one begins.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from torchweft.core.errors import SpecError, join_faults
from torchweft.core.pytree import difference, flatten, map_leaves, structure_paths, unflatten
from torchweft.core.validation import Validator
from torchweft.recurrent.recurrent import FoldedText, Result
from torchweft.recurrent.sequence import Lengths, unpack_inputs

Merge = Literal["cat", "sum"] | Callable[[Any, Any], Any]


class Bidirectional(nn.Module):
    """Runs one network from the first step to the last, and another from the last to the first.

    Args:
        forward_net: a :class:`weft.recurrent.Recurrent`, or any module that is called like one.
        backward_net: the same for the other direction. ``None``: a copy of ``forward_net`` with separate weights. They
            are initialised again in every module that has ``reset_parameters``; the others start as copies.
            The same module twice shares its weights.
        merge: how to combine both outputs: ``"cat"`` along the last axis, their ``"sum"``, or a function of both,
            nested as the networks return them, T x N x ... each. Outputs that are ``None`` in both stay ``None``.

    Raises ``UsageError`` that lists all invalid arguments.

    Example:
        >>> net = weft.Bidirectional(weft.Recurrent(nn.GRUCell(8, 16), backend="eager"))
        >>> net(torch.randn(20, 4, 8), lengths=[20, 7, 3, 9]).outputs.shape
        torch.Size([20, 4, 32])
    """

    def __init__(self, forward_net: nn.Module, backward_net: nn.Module | None = None, merge: Merge = "cat") -> None:
        super().__init__()
        self.forward_net = forward_net
        self.backward_net = _copy_reinitialized(forward_net) if backward_net is None else backward_net
        self.merge: Merge = merge
        first = [bool(getattr(net, "batch_first", False)) for net in (forward_net, self.backward_net)]
        with Validator("invalid arguments of Bidirectional") as check:
            known = callable(merge) or merge in ("cat", "sum")
            check.require(known, f"merge is {merge!r}, wanted 'cat', 'sum' or a function of both outputs")
            check.require(
                first[0] == first[1], f"forward_net has batch_first={first[0]}, backward_net has batch_first={first[1]}"
            )
        self.batch_first = first[0]

    def forward(
        self,
        inputs: Any,
        state: Any = None,
        *,
        lengths: Lengths | None = None,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        start: int = 0,
    ) -> Result:
        """Run both over a whole sequence. Arguments as for :class:`weft.recurrent.Recurrent`, but:

        Args:
            state: a pair of states, one for each direction (each can be ``None``). The second belongs to the end.
            lengths, mask: a row is read backward from its own last valid step.
            reset: cuts a row between two steps. The backward network starts again where it reaches the cut.
            start: the number of the first step that each network takes, so of the last step for the backward one.

        Returns ``Result``: the merged outputs; ``last`` and ``states`` as pairs. The backward network's output for
        step t is at t; its last state is the one after step 0.
        Raises as the networks do, and ``SpecError`` if their outputs cannot be merged.
        """
        if state is not None and (not isinstance(state, (tuple, list)) or len(cast("tuple[Any]", state)) != 2):
            raise SpecError(
                f"the state of a Bidirectional is a pair, for the forward and the backward network; this is a "
                f"{type(cast(object, state)).__name__}; give (state, None) for one of them alone"
            )
        ahead, back = (None, None) if state is None else cast("tuple[Any, Any]", state)
        unpacked = unpack_inputs(inputs, lengths, batch_first=self.batch_first, who="Bidirectional")
        inputs, lengths = unpacked.inputs, unpacked.lengths
        one: Result = self.forward_net(inputs, ahead, lengths=lengths, mask=mask, reset=reset, start=start)
        axes = SequenceAxes.of(inputs, self.batch_first)  # already validated by the forward network
        # Lengths become a mask, because in reverse the padding comes first.
        mask, reset = reverse_rows(axes, lengths, mask, reset)
        try:
            flipped = reverse(inputs, axes.time_of_input)
            other: Result = self.backward_net(flipped, back, mask=mask, reset=reset, start=start)
        except Exception as error:
            error.add_note(
                "torchweft: in the backward network of a Bidirectional, which reads the sequence from its end"
            )
            raise
        outputs, states = (reverse(value, axes.time_of_result) for value in (other.outputs, other.states))
        outputs = self._merge_outputs(one.outputs, outputs, 3 if axes.deep else 2)
        return Result(unpacked.pack_outputs(outputs), (one.last, other.last), (one.states, states))

    def _merge_outputs(self, one: Any, other: Any, least: int) -> Any:
        # Both outputs in one. Only an output with at least `least` axes can be concatenated along its last.
        if not isinstance(self.merge, str):
            return self.merge(one, other)
        fault = f"the outputs of both networks have no {self.merge}; give a function as merge"
        return combine_nested(one, other, fault, least if self.merge == "cat" else None)

    def explain(self) -> str:
        """Both networks' explanations."""
        return explain_networks({"forward": self.forward_net, "backward": self.backward_net})

    def extra_repr(self) -> str:
        return f"merge={self.merge!r}"


def explain_networks(nets: dict[str, Any]) -> str:
    parts = [f"{name}:\n{net.explain()}" for name, net in nets.items() if callable(getattr(net, "explain", None))]
    return FoldedText("\n\n".join(parts))


def combine_nested(one: Any, other: Any, fault: str, least: int | None = None) -> Any:
    """The sum of two nested values, leaf by leaf. Raises ``SpecError`` that lists the leaves that do not fit."""
    # With `least`, their concatenation along the last axis, for leaves with at least `least` axes. ``None`` in both
    # stays.

    def fits(x: Any, y: Any) -> bool:
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            return x is None and y is None
        # A number per step and row has no further axis to concatenate along.
        return x.shape == y.shape if least is None else x.dim() >= least and x.shape[:-1] == y.shape[:-1]

    def join(x: Any, y: Any) -> Any:
        return x if x is None else x + y if least is None else torch.cat([x, y], -1)

    (leaves, structure), (others, seen) = flatten(one), flatten(other)
    nesting = difference(structure, seen, "output")
    faults = [nesting] if nesting else []
    if not faults:
        paths = zip(structure_paths(structure, "output"), leaves, others, strict=True)
        faults = [
            f"{name} is {_describe_leaf(x)}, the other {_describe_leaf(y)}" for name, x, y in paths if not fits(x, y)
        ]
    if faults:
        raise SpecError(join_faults(f"{fault}:", faults))
    return unflatten(structure, [join(x, y) for x, y in zip(leaves, others, strict=True)])


def _describe_leaf(leaf: Any) -> str:
    return f"of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"{leaf!r}"


def _copy_reinitialized(net: nn.Module) -> nn.Module:
    other = copy.deepcopy(net)
    for module in other.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
    return other


class SequenceAxes(NamedTuple):
    """The layout of a call: its numbers of steps and rows (None: unknown), and which axis comes first."""

    # `deep`: an input has three axes, so there certainly are rows.

    steps: int
    rows: int | None
    batch_first: bool
    deep: bool = False
    device: torch.device = torch.device("cpu")

    @staticmethod
    def of(inputs: Any, batch_first: bool) -> "SequenceAxes":
        tensors = [leaf for leaf in flatten(inputs)[0] if isinstance(leaf, Tensor)]
        deepest = max([leaf.dim() for leaf in tensors])  # without key=, at which torch.compile breaks the graph
        most = next(leaf for leaf in tensors if leaf.dim() == deepest)
        if most.dim() < 2:
            return SequenceAxes(len(most), None, batch_first, device=most.device)
        time = int(batch_first)
        return SequenceAxes(most.shape[time], most.shape[1 - time], batch_first, most.dim() > 2, most.device)

    def time_of_input(self, leaf: Tensor) -> int:
        """The time axis of an input. Every input with two axes has rows."""
        return int(self.batch_first and leaf.dim() > 1)

    def time_of_result(self, leaf: Tensor) -> int:
        """The time axis of an output or of all states. Without rows it is axis 0."""
        return int(self.batch_first and leaf.dim() > 1 and tuple(leaf.shape[:2]) == (self.rows, self.steps))


def reverse(value: Any, time: Callable[[Tensor], int]) -> Any:
    """Nested values from the last step to the first. Leaves that are not tensors stay."""

    def flip_leaf(leaf: Any) -> Any:
        return leaf.flip(time(leaf)) if isinstance(leaf, Tensor) else leaf

    return map_leaves(flip_leaf, value)


def reverse_rows(
    axes: SequenceAxes, lengths: Lengths | None, mask: Tensor | None, reset: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Mask and reset of the reversed sequence, from validated tables, with the batch axis unchanged."""
    time = int(axes.batch_first)
    if lengths is not None:
        counts = torch.as_tensor(lengths, dtype=torch.int64, device=axes.device)
        within = torch.arange(axes.steps, device=axes.device).unsqueeze(1 - time) < counts.unsqueeze(time)
        mask = within if mask is None else mask & within
        reset = None if reset is None else reset & within
    if reset is not None and axes.steps:
        # Shift each flag one step earlier: in reverse, the cut before step t comes before step t - 1.
        first = torch.zeros_like(reset.narrow(time, 0, 1))
        reset = torch.cat([reset.narrow(time, 1, axes.steps - 1), first], time)
    return None if mask is None else mask.flip(time), None if reset is None else reset.flip(time)


class Stack(nn.Module):
    """Runs layers one after another. The outputs of one are the inputs of the next.

    Args:
        layers: :class:`weft.recurrent.Recurrent` networks, or modules that are called like one (``Bidirectional``,
            another ``Stack``). They become ``layers.0``, ``layers.1``, ...; all have the same ``batch_first``.
        residual: every layer except the first adds its input to its output (Wu et al., arXiv 1609.08144).
        dropout: the probability of zeroing, in training, an entry of a layer's output before the next layer, and
            before the layer's input is added.

    Raises ``UsageError`` that lists all invalid arguments.

    Example:
        >>> layers = [weft.Recurrent(nn.GRUCell(8, 8), backend="eager") for _ in range(2)]
        >>> weft.Stack(layers, residual=True)(torch.randn(20, 4, 8)).outputs.shape
        torch.Size([20, 4, 8])
    """

    def __init__(self, layers: Sequence[nn.Module], *, residual: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        first = [bool(getattr(layer, "batch_first", False)) for layer in layers]
        with Validator("invalid arguments of Stack") as check:
            check.require(bool(layers), "there are no layers")
            which = ", ".join(str(i) for i, batch_first in enumerate(first) if batch_first)
            check.require(len({*first}) < 2, f"layers {which} have batch_first=True, the others have not")
            check.number("dropout", dropout, most=1.0)
            for i, layer in enumerate(layers):
                fault = f"layer {i} is a {type(layer).__name__}, which has another signature; wrap a cell in Recurrent"
                check.require(not isinstance(layer, nn.RNNCellBase | nn.RNNBase), fault)
        self.layers = nn.ModuleList(layers)
        self.residual = residual
        self.dropout = float(dropout)
        self.batch_first = first[0]

    def forward(
        self,
        inputs: Any,
        state: Sequence[Any] | None = None,
        *,
        lengths: Lengths | None = None,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        start: int = 0,
    ) -> Result:
        """Run over a whole sequence. Arguments as for :class:`weft.recurrent.Recurrent`, for all layers alike, but:

        Args:
            state: a list with the state of every layer, each as the layer takes it, or ``None``.

        Returns ``Result``: the outputs of the last layer; ``last`` and ``states`` as lists, one entry for every layer.
        Raises as the layers do, with a note that names the layer, and ``SpecError`` if an input cannot
        be added to an output.
        """
        unpacked = unpack_inputs(inputs, lengths, batch_first=self.batch_first, who="Stack")
        results: list[Result] = []

        def run_layer(layer: Any, x: Any, before: Any) -> Any:
            results.append(layer(x, before, lengths=unpacked.lengths, mask=mask, reset=reset, start=start))
            return results[-1].outputs

        y = self._run_layers(run_layer, unpacked.inputs, state)
        last, states = [result.last for result in results], [result.states for result in results]
        return Result(unpacked.pack_outputs(y), last, states)

    def step(self, x: Any, state: Sequence[Any] | None = None, *, t: int = 0) -> tuple[Any, list[Any]]:
        """One step, number ``t``, of a stream through all layers: ``(y, new_state)``; see ``Recurrent.step``."""
        after: list[Any] = []

        def step_layer(layer: Any, x: Any, before: Any) -> Any:
            y, new = layer.step(x, before, t=t)
            after.append(new)
            return y

        return self._run_layers(step_layer, x, state), after

    def _run_layers(self, run: Callable[[Any, Any, Any], Any], x: Any, state: Sequence[Any] | None) -> Any:
        count = len(self.layers)
        states = [None] * count if state is None else state
        if not isinstance(states, list | tuple) or len(states) != count:
            seen = f"{len(states)} entries" if isinstance(states, list | tuple) else f"type {type(states).__name__}"
            raise SpecError(
                f"the state of a Stack is a list with one entry for each of its {count} layers; this one has {seen}; "
                "an entry can be None"
            )
        for index, (layer, before) in enumerate(zip(self.layers, states, strict=True)):
            try:
                y = run(layer, x, before)
            except Exception as error:
                error.add_note(f"torchweft: in layer {index} ({type(layer).__name__}) of a Stack")
                raise
            if self.training and self.dropout and index < count - 1:
                y = map_leaves(self._drop_floats, y)
            # After dropout, so that the skip connection itself is never dropped.
            if self.residual and index:
                fault = f"residual: the input of layer {index} cannot be added to its output"
                y = combine_nested(y, x, fault)
            x = y
        return x

    def explain(self) -> str:
        """Every layer's explanation; see ``Recurrent.explain``."""
        return explain_networks({f"layer {i}": layer for i, layer in enumerate(self.layers)})

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in ("residual", "dropout") if getattr(self, name))

    def _drop_floats(self, leaf: Any) -> Any:
        floats = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return dropout(leaf, self.dropout) if floats else leaf
