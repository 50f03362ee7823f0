"""Layer upon layer.

    x --> layer 0 --> dropout --> layer 1 --> dropout --(+)--> layer 2 --(+)--> y       (+): residual, adds the layer's
                               '-------------------------^ '--------------^                  own input

Each layer runs over the whole sequence before the next one begins.
"""

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.functional import dropout

from weft.core.errors import SpecError, UsageError, listed
from weft.core.pytree import difference, flatten, map_leaves, structure_paths
from weft.recurrent.layers.bidirectional import told
from weft.recurrent.recurrent import Result
from weft.recurrent.sequence import Lengths, unpack_inputs


class Stack(nn.Module):
    """Runs layers one upon the other; the outputs of one are the inputs of the next.

    Args:
        layers: :class:`weft.recurrent.Recurrent` networks, or modules that are called like one (``Bidirectional``,
            another ``Stack``). They become ``layers.0``, ``layers.1``, ...; all have the same ``batch_first``.
        residual: every layer but the first adds its input to its output (Wu et al., arXiv 1609.08144).
        dropout: the probability with which, in training, an entry of what a layer hands to the next is set to zero;
            before the layer's input is added.

    Raises ``UsageError`` that lists all that is wrong with the arguments.

    Example:
        >>> layers = [weft.Recurrent(nn.GRUCell(8, 8), backend="eager") for _ in range(2)]
        >>> weft.Stack(layers, residual=True)(torch.randn(20, 4, 8)).outputs.shape
        torch.Size([20, 4, 8])
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        residual: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _check(layers, dropout)
        self.layers = nn.ModuleList(layers)
        self.residual = residual
        self.dropout = float(dropout)
        self.batch_first = bool(getattr(layers[0], "batch_first", False))

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
        states = self._each(state)
        given = unpack_inputs(inputs, lengths, batch_first=self.batch_first, who="Stack")
        x = given.inputs
        last: list[Any] = []
        histories: list[Any] = []
        for index, (layer, before) in enumerate(zip(self.layers, states, strict=True)):
            try:
                result: Result = layer(x, before, lengths=given.lengths, mask=mask, reset=reset, start=start)
            except Exception as error:
                error.add_note(_note(index, layer))
                raise
            x = self._handed(index, x, result.outputs)
            last.append(result.last)
            histories.append(result.states)
        return Result(given.close(x), last, histories)

    def step(self, x: Any, state: Sequence[Any] | None = None, *, t: int = 0) -> tuple[Any, list[Any]]:
        """One step, number ``t``, of a stream through all layers: ``(y, new_state)``; see ``Recurrent.step``."""
        after: list[Any] = []
        for index, before in enumerate(self._each(state)):
            layer = cast(Any, self.layers[index])
            try:
                y, new = layer.step(x, before, t=t)
            except Exception as error:
                error.add_note(_note(index, layer))
                raise
            x = self._handed(index, x, y)
            after.append(new)
        return x, after

    def explain(self) -> str:
        """Every layer's explanation; see ``Recurrent.explain``."""
        return told({f"layer {i}": layer for i, layer in enumerate(self.layers)})

    def extra_repr(self) -> str:
        """The arguments that are not as by default."""
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in ("residual", "dropout") if getattr(self, name))

    def _handed(self, index: int, x: Any, y: Any) -> Any:
        """Output ``y`` of a layer as the next one gets it; for the last layer, as the caller does."""
        if self.training and self.dropout and index < len(self.layers) - 1:
            y = map_leaves(self._dropped, y)
        if not self.residual or not index:
            return y
        (leaves, structure), (inputs, seen) = flatten(y), flatten(x)
        nesting = difference(structure, seen, "input")
        faults = [nesting] if nesting else []
        if not faults:
            faults = [
                f"{name} is {_look(leaf)}, the input is {_look(other)}"
                for name, leaf, other in zip(structure_paths(structure, "output"), leaves, inputs, strict=True)
                if _look(leaf) != _look(other)
            ]
        if faults:
            raise SpecError(listed(f"residual: the input of layer {index} cannot be added to its output:", faults))
        return map_leaves(_added, y, x)

    def _dropped(self, leaf: Any) -> Any:
        floats = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return dropout(leaf, self.dropout) if floats else leaf

    def _each(self, state: Sequence[Any] | None) -> list[Any]:
        if state is None:
            return [None] * len(self.layers)
        if not isinstance(state, (list, tuple)) or len(state) != len(self.layers):
            what = f"{len(state)} entries" if isinstance(state, (list, tuple)) else f"type {type(state).__name__}"
            raise SpecError(
                f"the state of a Stack is a list with one entry for each of its {len(self.layers)} layers; "
                f"this one has {what}; an entry may be None"
            )
        return list(state)


def _added(leaf: Any, other: Any) -> Any:
    return leaf if leaf is None else leaf + other


def _look(leaf: Any) -> str:
    return f"of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"{leaf!r}"


def _note(index: int, layer: nn.Module) -> str:
    return f"weft: in layer {index} ({type(layer).__name__}) of a Stack"


def _check(layers: Sequence[nn.Module], dropout: float) -> None:
    """Raise UsageError that lists all that is wrong with the arguments of a stack."""
    faults = [] if layers else ["there are no layers"]
    first = {bool(getattr(layer, "batch_first", False)) for layer in layers}
    if len(first) > 1:
        which = [str(i) for i, layer in enumerate(layers) if getattr(layer, "batch_first", False)]
        faults.append(f"layers {', '.join(which)} have batch_first=True, the others have not")
    if not 0 <= dropout <= 1:
        faults.append(f"dropout is {dropout}, wanted a probability from 0 to 1")
    for i, layer in enumerate(layers):
        if isinstance(layer, (nn.RNNCellBase, nn.RNNBase)):
            faults.append(f"layer {i} is a {type(layer).__name__}, which is called otherwise; wrap a cell in Recurrent")
    if faults:
        raise UsageError(listed("invalid arguments of Stack:", faults))
