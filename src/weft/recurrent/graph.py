"""The joint graph of one step, forward and backward, with its signature and the metadata of its values."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from weft.core.pytree import Structure
from weft.recurrent.random import Draw

Value = fx.Node | None
"""A node of the graph, or None where there is no value: a gradient of what has none."""


@dataclass(frozen=True)
class GraphSignature:
    """The meaning of the graph's inputs and outputs, parallel to the flat leaves of inputs, states and outputs."""

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


class TensorMeta(NamedTuple):
    """Shape and dtype of one step's value. Faster to read at every call than the fake tensors of the graph."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def over(self, steps: int, device: torch.device) -> Tensor:
        """An uninitialised tensor for this many steps."""
        return torch.empty((steps, *self.shape), dtype=self.dtype, device=device)


@dataclass(frozen=True)
class StepGraph:
    """The joint graph of one step."""

    module: fx.GraphModule
    signature: GraphSignature
    held: Sequence["Tensor | weakref.ref[Tensor]"]
    """The references that want a gradient."""
    input_structure: Structure
    state_structure: Structure
    output_structure: Structure
    given: tuple[bool, ...]
    """Which leaves of the output are tensors; the others are None."""
    wanted_inputs: tuple[bool, ...]
    """Which inputs want a gradient."""
    draws: list[Draw]
    """Random numbers of a step; they are further inputs, after those of the cell."""

    @property
    def parameters(self) -> list[Tensor]:
        """The references that want a gradient."""
        return [_alive(each) for each in self.held]

    @property
    def nodes(self) -> list[fx.Node]:
        """The operators, in an order in which they can run."""
        return [node for node in self.module.graph.nodes if node.op == "call_function"]

    def reference(self, node: fx.Node) -> Tensor:
        """The tensor behind one of the references."""
        return _alive(getattr(self.module, str(node.target)))

    def referred(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, Tensor]:
        """The tensors behind some of the references, detached."""
        return {node: self.reference(node).detach() for node in nodes}

    def value(self, node: fx.Node) -> Any:
        """The value of a node when the step was captured; of a reference, the tensor behind it."""
        found = node.meta.get("val")
        return self.reference(node) if node.op == "get_attr" and not isinstance(found, Tensor) else found

    @property
    def constants(self) -> list[Tensor]:
        """The references that want no gradient: frozen parameters and buffers."""
        return [each for each in map(self.reference, self.signature.references) if not each.requires_grad]

    def weakly_bound(self, owned: Iterable[Tensor]) -> "StepGraph":
        """The same graph, with weak references to these tensors: a plan outlives calls, and they are its cell's."""
        mine = {id(each) for each in owned}
        for node in self.signature.references:
            name, tensor = str(node.target), self.reference(node)
            if id(tensor) in mine and hasattr(self.module, name):
                delattr(self.module, name)
                setattr(self.module, name, weakref.ref(tensor))
        return replace(self, held=[weakref.ref(each) for each in self.parameters])

    @cached_property
    def outputs(self) -> list[TensorMeta]:
        """Metadata of the outputs."""
        return [_meta(node) for node in self.signature.outputs if node is not None]

    @cached_property
    def input_gradients(self) -> list[TensorMeta | None]:
        """Metadata of the gradients of inputs, None where there is none."""
        return [None if node is None else _meta(node) for node in self.signature.input_gradients]

    @cached_property
    def invariant(self) -> set[int]:
        """The states that every step passes on unchanged: constants of the call, such as an encoded source."""
        return {k for k, new in enumerate(self.signature.new_states) if new is self.signature.states[k]}

    @cached_property
    def aliases(self) -> dict[int, int]:
        """For each output that is also a new state, the index of that state: both are stored once."""
        nodes = [new for new in self.signature.new_states if new is not None and new.op == "call_function"]
        moving = {new: self.signature.new_states.index(new) for new in nodes}
        return {i: moving[node] for i, node in enumerate(self.signature.outputs) if node is not None and node in moving}


def _alive(held: "Tensor | weakref.ref[Tensor]") -> Tensor:
    if isinstance(held, Tensor):
        return held
    tensor = held()
    assert tensor is not None
    return tensor


def alike(node: fx.Node) -> bool:
    """Whether all arguments of an operator have the shape and dtype of its result: no broadcast, no conversion."""
    metas = [each.meta.get("val") if isinstance(each, fx.Node) else None for each in (*node.args, node)]
    seen = {(each.shape, each.dtype) if isinstance(each, Tensor) else None for each in metas}
    return len(seen) == 1 and None not in seen


def _meta(node: fx.Node) -> TensorMeta:
    value: Tensor = node.meta["val"]
    return TensorMeta(tuple(value.shape), value.dtype)


def graph_signature(module: fx.GraphModule, counts: tuple[int, int, int, int]) -> GraphSignature:
    """The signature of a joint graph, from the numbers of inputs, states, new states and outputs."""
    inputs, states, new_states, outputs = counts
    nodes = list(module.graph.nodes)
    starts = _parts([n for n in nodes if n.op == "placeholder"], [inputs, states, new_states, outputs])
    ends = list(next(n for n in nodes if n.op == "output").args[0])
    found = _parts(ends, [new_states, outputs, inputs, states, len(ends)])
    return GraphSignature(
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
