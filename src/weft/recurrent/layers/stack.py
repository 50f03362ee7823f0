"""Layer upon layer.

    x --> layer 0 --> dropout --> layer 1 --> dropout --(+)--> layer 2 --(+)--> y       (+): residual, adds the layer's
                               '-------------------------^ '--------------^                  own input

Each layer runs over the whole sequence before the next one begins.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import dropout

from weft.core.errors import SpecError
from weft.core.pytree import map_leaves
from weft.core.validation import Validator
from weft.recurrent.layers.bidirectional import combined, explained
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

    def __init__(self, layers: Sequence[nn.Module], *, residual: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        first = [bool(getattr(layer, "batch_first", False)) for layer in layers]
        with Validator("invalid arguments of Stack") as check:
            check.that(bool(layers), "there are no layers")
            which = ", ".join(str(i) for i, each in enumerate(first) if each)
            check.that(len({*first}) < 2, f"layers {which} have batch_first=True, the others have not")
            check.number("dropout", dropout, most=1.0)
            for i, layer in enumerate(layers):
                fault = f"layer {i} is a {type(layer).__name__}, which is called otherwise; wrap a cell in Recurrent"
                check.that(not isinstance(layer, nn.RNNCellBase | nn.RNNBase), fault)
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
        given = unpack_inputs(inputs, lengths, batch_first=self.batch_first, who="Stack")
        results: list[Result] = []

        def run(layer: Any, x: Any, before: Any) -> Any:
            results.append(layer(x, before, lengths=given.lengths, mask=mask, reset=reset, start=start))
            return results[-1].outputs

        y = self._through(run, given.inputs, state)
        return Result(given.close(y), [each.last for each in results], [each.states for each in results])

    def step(self, x: Any, state: Sequence[Any] | None = None, *, t: int = 0) -> tuple[Any, list[Any]]:
        """One step, number ``t``, of a stream through all layers: ``(y, new_state)``; see ``Recurrent.step``."""
        after: list[Any] = []

        def run(layer: Any, x: Any, before: Any) -> Any:
            y, new = layer.step(x, before, t=t)
            after.append(new)
            return y

        return self._through(run, x, state), after

    def _through(self, run: Callable[[Any, Any, Any], Any], x: Any, state: Sequence[Any] | None) -> Any:
        """The output of the last layer, each being run with its input and its state."""
        count = len(self.layers)
        states = [None] * count if state is None else state
        if not isinstance(states, list | tuple) or len(states) != count:
            what = f"{len(states)} entries" if isinstance(states, list | tuple) else f"type {type(states).__name__}"
            raise SpecError(
                f"the state of a Stack is a list with one entry for each of its {count} layers; this one has {what}; "
                "an entry may be None"
            )
        for index, (layer, before) in enumerate(zip(self.layers, states, strict=True)):
            try:
                y = run(layer, x, before)
            except Exception as error:
                error.add_note(f"weft: in layer {index} ({type(layer).__name__}) of a Stack")
                raise
            if self.training and self.dropout and index < count - 1:
                y = map_leaves(self._dropped, y)
            if self.residual and index:
                fault = f"residual: the input of layer {index} cannot be added to its output"
                y = combined(y, x, _alike, _added, fault)
            x = y
        return x

    def explain(self) -> str:
        """Every layer's explanation; see ``Recurrent.explain``."""
        return explained({f"layer {i}": layer for i, layer in enumerate(self.layers)})

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in ("residual", "dropout") if getattr(self, name))

    def _dropped(self, leaf: Any) -> Any:
        floats = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return dropout(leaf, self.dropout) if floats else leaf


def _alike(leaf: Any, other: Any) -> bool:
    if isinstance(leaf, Tensor) and isinstance(other, Tensor):
        return leaf.shape == other.shape
    return leaf is None and other is None


def _added(leaf: Any, other: Any) -> Any:
    return leaf if leaf is None else leaf + other
