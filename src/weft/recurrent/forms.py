"""Forms: what a compiled graph cannot hold of a call to a recurrent network.

    graph       weft.recurrent(form 7, tensors, references, ...)
    form 7      which network, how its arguments are nested, what is no tensor, under which autocast

A form is known by a number, which stands in the graph as a constant. So a graph works in the process that traced it,
as long as the network lives. A network's tensors are arguments (`references`): a graph may be run with others.
"""

import itertools
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from weft.core.ambient import Ambient
from weft.core.errors import UsageError
from weft.core.tree import Structure, flatten, unflatten
from weft.recurrent.looks import Looks, places

_numbers = itertools.count(1)
_networks: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_forms: dict[int, "Form"] = {}


def enrol(network: nn.Module) -> int:
    """A number for a network, by which graphs know it."""
    number = next(_numbers)
    _networks[number] = network
    return number


def network_of(number: int) -> nn.Module:
    """The network that was enrolled. Raises UsageError if it is gone."""
    network = _networks.get(number)
    if network is None:
        raise UsageError(GONE)
    return network


def tensors_of(network: nn.Module) -> dict[str, Tensor]:
    """A network's parameters and buffers by name: the references of its calls, in their order."""
    return dict(itertools.chain(network.named_parameters(), network.named_buffers()))


@dataclass(eq=False)
class Form:
    """One kind of call: everything about it but the tensors."""

    network: int
    structure: Structure
    """How (inputs, state, further arguments by name) are nested."""
    constants: tuple[Any, ...]
    """Their leaves that are no tensors; None stands for a tensor."""
    ambient: Ambient
    number: int = field(default_factory=lambda: next(_numbers))
    results: tuple[Structure, list[int | None]] | None = None
    """How (outputs, last, states) are nested, and which tensor of the operator each leaf is."""

    def run(self, tensors: Sequence[Tensor], references: Sequence[Tensor], start: int, looks: bool) -> list[Tensor]:
        """The tensors that the network returns, each memory once; with `looks`, fake ones for fake ones."""
        network = cast(Any, network_of(self.network))
        rest = iter(tensors)
        leaves = [next(rest) if each is None else each for each in self.constants]
        inputs, state, more = unflatten(self.structure, leaves)
        if looks and "lengths" in more:  # their content is not known; they act as a mask does
            more = {"mask": _table(inputs, network.batch_first), **{k: v for k, v in more.items() if k != "lengths"}}
        plans = Looks() if looks else network._plans
        given = {"plans": plans, "start": start, **more}
        with ExitStack() as stack:
            stack.enter_context(self.ambient.here())
            stack.enter_context(self.ambient.casting())
            result = _called(network, references, (inputs, None if state == NOTHING else state), given)
        parts = (result.outputs, result.last, result.states if network.memory in ("full", "states") else None)
        ends, structure = flatten(parts)
        if looks or self.results is None:
            found, at = places(ends)
            self.results = (structure, at)
            return found
        return _in_places(ends, self.results[1])

    def nested(self, values: Sequence[Tensor]) -> Any:
        """(outputs, last, states) out of the operator's tensors, with 0 for None, which a traced call cannot return."""
        assert self.results is not None
        structure, at = self.results
        return unflatten(structure, [0 if i is None else values[i] for i in at])


GONE = (
    "a compiled or exported graph runs a recurrent network that is not there: it was deleted, or the graph was loaded "
    "in another process; keep the module, or compile and export it anew where it runs"
)
NOTHING = "weft: nothing"
"""Stands for None, which a traced call cannot take."""


def known(number: int) -> Form:
    """The form of this number. Raises UsageError if it is gone."""
    form = _forms.get(number)
    if form is None:
        raise UsageError(GONE)
    return form


def form_of(network: int, structure: Structure, constants: tuple[Any, ...]) -> Form:
    """The form of a call, always the same one for the same kind."""
    ambient = Ambient.capture([each.device.type for each in network_of(network).parameters()])
    key = (network, constants, ambient.autocast, structure)
    for form in _forms.values():
        if (form.network, form.constants, form.ambient.autocast, form.structure) == key:
            return form
    form = Form(network, structure, constants, ambient)
    _forms[form.number] = form
    weakref.finalize(network_of(network), _forms.pop, form.number, None)
    return form


class _Inside(nn.Module):
    """The network with other tensors in the place of its own, for one call."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Any, state: Any, given: dict[str, Any]) -> Any:
        return cast(Any, self.network).run_plainly(inputs, state, **given)


def _called(network: nn.Module, references: Sequence[Tensor], arguments: tuple[Any, Any], given: dict[str, Any]) -> Any:
    own = tensors_of(network)
    if all(each is other for each, other in zip(own.values(), references, strict=True)):
        return cast(Any, network).run_plainly(*arguments, **given)
    swapped = {f"network.{name}": each for name, each in zip(own, references, strict=True)}
    return torch.func.functional_call(_Inside(network), swapped, (*arguments, given))


def _in_places(ends: Sequence[Any], at: Sequence[int | None]) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for end, place in zip(ends, at, strict=True):
        if place is not None:
            found.setdefault(place, end)
    return [found[i] for i in range(len(found))]


def _table(inputs: Any, batch_first: bool) -> Tensor:
    """A mask for these inputs, its content arbitrary."""
    leaf = next(each for each in flatten(inputs)[0] if isinstance(each, Tensor) and each.dim() > 1)
    return torch.ones(leaf.shape[:2], dtype=torch.bool, device=leaf.device)
