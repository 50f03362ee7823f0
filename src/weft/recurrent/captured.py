"""What a captured step is: its joint graph, what the ends of the graph mean, and how its values look."""

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from weft.core.pytree import Structure, unflatten
from weft.recurrent.random import Draw

Value = fx.Node | None
"""A node of the graph, or None where there is no value: a gradient of what has none."""


@dataclass(frozen=True)
class Roles:
    """What the ends of the graph mean. Lists run parallel to the flat leaves of inputs, states and outputs."""

    inputs: list[fx.Node]
    states: list[fx.Node]
    new_state_gradients: list[fx.Node]
    output_gradients: list[fx.Node]
    references: list[fx.Node]
    new_states: list[Value]
    outputs: list[Value]
    input_gradients: list[Value]
    state_gradients: list[Value]
    parameter_gradients: list[Value]


class Look(NamedTuple):
    """Shape and dtype of one step's value. Quicker to ask at every call than the graph's tensors without memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def over(self, steps: int, device: torch.device) -> Tensor:
        """Room for so many steps."""
        return torch.empty((steps, *self.shape), dtype=self.dtype, device=device)


class Lent(Collection[Tensor]):
    """Tensors that are not kept alive here; who asks for them has them."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._refs = [weakref.ref(each) for each in tensors]

    def __iter__(self) -> Iterator[Tensor]:
        return map(_lent, self._refs)

    def __len__(self) -> int:
        return len(self._refs)

    def __contains__(self, tensor: object) -> bool:
        return any(each is tensor for each in self)


def _lent(ref: "weakref.ref[Tensor]") -> Tensor:
    tensor = ref()
    assert tensor is not None
    return tensor


@dataclass(frozen=True)
class Captured:
    """The joint graph of one step."""

    module: fx.GraphModule
    roles: Roles
    parameters: Collection[Tensor]
    input_structure: Structure
    state_structure: Structure
    output_structure: Structure
    given: tuple[bool, ...]
    """Which leaves of the output are tensors; the others are None."""
    wanted_inputs: tuple[bool, ...]
    """Which inputs want a gradient."""
    draws: list[Draw]
    """What a step draws; these are further inputs, behind those of the cell."""

    def nested(self, outputs: Sequence[Tensor]) -> Any:
        """Outputs as the cell nests them."""
        rest = iter(outputs)
        return unflatten(self.output_structure, [next(rest) if given else None for given in self.given])

    @property
    def nodes(self) -> list[fx.Node]:
        """The operators, in an order in which they can run."""
        return [node for node in self.module.graph.nodes if node.op == "call_function"]

    def reference(self, node: fx.Node) -> Tensor:
        """The tensor behind one of the references."""
        found = getattr(self.module, str(node.target))
        return _lent(cast("weakref.ref[Tensor]", found)) if type(found) is weakref.ref else found

    def value(self, node: fx.Node) -> Any:
        """What a node yielded when the step was captured; of a reference, the tensor behind it."""
        found = node.meta.get("val")
        return self.reference(node) if node.op == "get_attr" and not isinstance(found, Tensor) else found

    @property
    def constants(self) -> list[Tensor]:
        """The references that want no gradient: frozen parameters and buffers."""
        return [each for each in map(self.reference, self.roles.references) if not each.requires_grad]

    def lent(self, owned: Iterable[Tensor]) -> "Captured":
        """The same, which keeps none of these alive: a plan is kept for long, and they are its cell's."""
        mine = {id(each) for each in owned}
        for node in self.roles.references:
            name, tensor = str(node.target), self.reference(node)
            if id(tensor) in mine and hasattr(self.module, name):
                delattr(self.module, name)
                setattr(self.module, name, weakref.ref(tensor))
        return replace(self, parameters=Lent(self.parameters))

    @cached_property
    def outputs(self) -> list[Look]:
        """How the outputs look."""
        return [_looks(node) for node in self.roles.outputs if node is not None]

    @cached_property
    def input_gradients(self) -> list[Look | None]:
        """How the gradients of inputs look, None where there is none."""
        return [None if node is None else _looks(node) for node in self.roles.input_gradients]

    @cached_property
    def passing(self) -> set[int]:
        """The states that every step hands on as they are: constants of the call, such as an encoded source."""
        return {k for k, new in enumerate(self.roles.new_states) if new is self.roles.states[k]}

    @cached_property
    def aliases(self) -> dict[int, int]:
        """For each output that is a new state as well, the number of that state: both are stored once."""
        nodes = [new for new in self.roles.new_states if new is not None and new.op == "call_function"]
        moving = {new: self.roles.new_states.index(new) for new in nodes}
        return {i: moving[node] for i, node in enumerate(self.roles.outputs) if node is not None and node in moving}


def alike(node: fx.Node) -> bool:
    """Whether all arguments of an operator are values that look like its result: nothing is stretched or converted."""
    looks = [each.meta.get("val") if isinstance(each, fx.Node) else None for each in (*node.args, node)]
    seen = {(each.shape, each.dtype) if isinstance(each, Tensor) else None for each in looks}
    return len(seen) == 1 and None not in seen


def _looks(node: fx.Node) -> Look:
    value: Tensor = node.meta["val"]
    return Look(tuple(value.shape), value.dtype)


def roles_of(module: fx.GraphModule, counts: tuple[int, int, int, int]) -> Roles:
    """What the ends of a joint graph mean, by how many inputs, states, new states and outputs there are."""
    inputs, states, new_states, outputs = counts
    nodes = list(module.graph.nodes)
    starts = _parts([n for n in nodes if n.op == "placeholder"], [inputs, states, new_states, outputs])
    ends = list(next(n for n in nodes if n.op == "output").args[0])
    found = _parts(ends, [new_states, outputs, inputs, states, len(ends)])
    return Roles(
        inputs=starts[0],
        states=starts[1],
        new_state_gradients=starts[2],
        output_gradients=starts[3],
        references=[n for n in nodes if n.op == "get_attr"],
        new_states=found[0],
        outputs=found[1],
        input_gradients=found[2],
        state_gradients=found[3],
        parameter_gradients=found[4],
    )


def _parts(values: list[Any], sizes: Sequence[int]) -> list[list[Any]]:
    found: list[list[Any]] = []
    for size in sizes:
        found.append(values[:size])
        values = values[size:]
    return found
