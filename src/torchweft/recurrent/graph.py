"""The joint graph of one step, forward and backward, with its signature and the random numbers that it reads.

    mask = bernoulli(shape of h, 0.9)      becomes      an input "mask", T x ..., drawn before the loop

A plan reorders the operators of all steps, so a random operator inside it would draw different numbers from the eager
loop's. The numbers are therefore drawn before the loop, in the order of the eager loop and from the same generator.
Backward and recomputation read the drawn numbers again. Numbers that depend on a computed value, such as a sampled
action, cannot be drawn in advance.
"""

import operator
import re
import weakref
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from torchweft.core.pytree import Structure

Value = fx.Node | None  # A node of the graph. None for the gradient of a value that has none.


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
    """Shape and dtype of one step's value. Calls read it faster than the fake tensors of the graph."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty_over(self, steps: int, device: torch.device) -> Tensor:
        """An uninitialised tensor for `steps` steps."""
        return torch.empty((steps, *self.shape), dtype=self.dtype, device=device)


@dataclass(frozen=True)
class StepGraph:
    """The joint graph of one step."""

    module: fx.GraphModule
    signature: GraphSignature
    held: Sequence["Tensor | weakref.ref[Tensor]"]  # the references that require a gradient
    input_structure: Structure
    state_structure: Structure
    output_structure: Structure
    output_is_tensor: tuple[bool, ...]  # flags the leaves of the output that are tensors. The others are None.
    wanted_inputs: tuple[bool, ...]  # flags the inputs that require a gradient
    draws: "list[Draw]"  # random numbers of a step. They are further inputs, after those of the cell.

    @property
    def parameters(self) -> list[Tensor]:
        return [strong_reference(tensor) for tensor in self.held]

    @property
    def nodes(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.op == "call_function"]

    @property
    def checks(self) -> list[fx.Node]:
        return [node for node in self.nodes if is_check(node)]

    def reference(self, node: fx.Node) -> Tensor:
        return strong_reference(self.held_reference(node))

    def held_reference(self, node: fx.Node) -> "Tensor | weakref.ref[Tensor]":
        return getattr(self.module, str(node.target))

    def referred(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, Tensor]:
        return {node: self.reference(node).detach() for node in nodes}

    def value(self, node: fx.Node) -> Any:
        """The value of a node when the step was captured. For a reference, its tensor."""
        value = node.meta.get("val")
        return self.reference(node) if node.op == "get_attr" and not isinstance(value, Tensor) else value

    @property
    def constants(self) -> list[Tensor]:
        """The references that do not require a gradient: frozen parameters and buffers."""
        return [strong_reference(held) for held in self._held_constants]

    @cached_property
    def _held_constants(self) -> "list[Tensor | weakref.ref[Tensor]]":
        # Read when a plan runs, after `hold_weakly`. Whether they require a gradient is part of the plan's key.
        nodes = [node for node in self.signature.references if not self.reference(node).requires_grad]
        return [self.held_reference(node) for node in nodes]

    def hold_weakly(self, owned: Iterable[Tensor]) -> "StepGraph":
        """The same graph with weak references to tensors `owned` by the cell, which a plan must not keep alive."""
        # By identity: a tensor of the graph that the step itself created must stay alive with the graph.
        owned_ids = {id(tensor) for tensor in owned}
        for node in self.signature.references:
            name, tensor = str(node.target), self.reference(node)
            if id(tensor) in owned_ids and hasattr(self.module, name):
                delattr(self.module, name)
                setattr(self.module, name, weakref.ref(tensor))
        return replace(self, held=[weakref.ref(tensor) for tensor in self.parameters])

    @cached_property
    def forward_operators(self) -> int:
        """The number of operators of a forward step, without those that only select one of several results."""
        inside = {*self.signature.outputs, *self.signature.new_states}
        for node in reversed(self.nodes):
            if node in inside:
                inside.update(node.all_input_nodes)
        return sum(node in inside and node.target is not operator.getitem for node in self.nodes)

    @cached_property
    def outputs(self) -> list[TensorMeta]:
        return [_meta_of(node) for node in self.signature.outputs if node is not None]

    @cached_property
    def input_gradients(self) -> list[TensorMeta | None]:
        return [None if node is None else _meta_of(node) for node in self.signature.input_gradients]

    def with_rows(self, rows: int) -> "StepGraph":
        """The same graph for another number of rows, if those are the first axis of all outputs and inputs."""
        graph = replace(self)
        vars(graph)["outputs"] = [meta._replace(shape=(rows, *meta.shape[1:])) for meta in self.outputs]
        vars(graph)["input_gradients"] = [
            None if meta is None else meta._replace(shape=(rows, *meta.shape[1:])) for meta in self.input_gradients
        ]
        return graph

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


def strong_reference(held: "Tensor | weakref.ref[Tensor]") -> Tensor:
    if isinstance(held, Tensor):
        return held
    tensor = held()
    # A plan is dropped with the first of its tensors (see `PlanCache`), and a running call holds all of them.
    assert tensor is not None
    return tensor


def is_check(node: fx.Node) -> bool:
    """Whether an operator has no result, but can raise an error, e.g. for a singular matrix."""
    return node.target is _aten._linalg_check_errors.default


def alike(node: fx.Node) -> bool:
    """Whether all arguments of an operator have the shape and dtype of its result: no broadcast, no conversion."""
    values = [operand.meta.get("val") if isinstance(operand, fx.Node) else None for operand in (*node.args, node)]
    forms = {(value.shape, value.dtype) if isinstance(value, Tensor) else None for value in values}
    return len(forms) == 1 and None not in forms


def same_but_rows(one: StepGraph, other: StepGraph) -> bool:
    """Whether two steps differ in sizes only."""
    # Sizes stand in lists. A `len(x)` that the cell divides by stands alone, so it makes the steps differ.
    texts = [
        [re.sub(r"\[[-\d, ]*\]", "[]", f"{node.target} {node.args} {node.kwargs}") for node in graph.nodes]
        for graph in (one, other)
    ]
    references = [[graph.reference(node) for node in graph.signature.references] for graph in (one, other)]
    same_tensors = all(a is b or (a.shape == b.shape and torch.equal(a, b)) for a, b in zip(*references, strict=False))
    return texts[0] == texts[1] and same_tensors


def _meta_of(node: fx.Node) -> TensorMeta:
    value: Tensor = node.meta["val"]
    return TensorMeta(tuple(value.shape), value.dtype)


def graph_signature(module: fx.GraphModule, counts: tuple[int, int, int, int]) -> GraphSignature:
    inputs, states, new_states, outputs = counts
    nodes = list(module.graph.nodes)
    starts, ends = (n for n in nodes if n.op == "placeholder"), iter(nodes[-1].args[0])
    arguments: list[list[Any]] = [list(islice(starts, size)) for size in (inputs, states, new_states, outputs)]
    results: list[list[Any]] = [list(islice(ends, size)) for size in (new_states, outputs, inputs, states, None)]
    return cast(Any, GraphSignature)(*arguments, [n for n in nodes if n.op == "get_attr"], *results)


_aten = cast(Any, torch.ops.aten)
# Operators that read only shape, dtype and device of their tensor arguments.
_BY_SHAPE = {
    *(_aten.bernoulli.p, _aten.rand.default, _aten.rand_like.default, _aten.randn.default, _aten.randn_like.default),
    *(_aten.randint.default, _aten.randint.low, _aten.randint_like.default, _aten.randint_like.low_dtype),
    *(_aten.normal_functional.default, _aten.uniform.default, _aten.exponential.default),
}
# In-place operators that cells call, by their functional form in the graph.
_IN_PLACE = {
    _aten.bernoulli.p: _aten.bernoulli_.float,
    _aten.normal_functional.default: _aten.normal_.default,
    _aten.uniform.default: _aten.uniform_.default,
    _aten.exponential.default: _aten.exponential_.default,
}
# Arguments without which nothing is drawn: attention has a dropout rate, which is usually 0.
_SWITCHES = frozenset({"dropout_p", "train", "training"})
_STRIDES = "torchweft: strides"


@dataclass(frozen=True)
class Draw:
    """One random operator: its arguments, and the metadata of the result. None stands for a tensor."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # numbers are drawn in the order of memory, so another layout gives other numbers
    dtype: torch.dtype

    def draw_into(self, row: Tensor) -> None:
        like = torch.empty_strided(self.shape, self.strides, dtype=row.dtype, device=row.device)
        args = [like if argument is None else argument for argument in self.args]
        kwargs = {**self.kwargs, "device": row.device} if "device" in self.kwargs else self.kwargs
        row.copy_(self.target(*args, **kwargs))


def is_random(node: fx.Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    declared = cast(Any, node.target)._schema.arguments
    passed = dict(zip([argument.name for argument in declared], node.args, strict=False)) | node.kwargs
    return all(passed.get(each.name, each.default_value) for each in declared if each.name in _SWITCHES)


def value_dependent_draws(module: fx.GraphModule) -> list[str]:
    """The random operators that depend on values, and therefore cannot be drawn in advance."""
    nodes = [node for node in module.graph.nodes if is_random(node)]
    return [str(node.target) for node in nodes if node.target not in _BY_SHAPE or len(node.all_input_nodes) > 1]


def separate_bernoulli(module: fx.GraphModule) -> None:
    """Let `bernoulli(x, p)` draw into a new tensor."""
    # Functionalization turns `x.bernoulli_(p)` into the same operator, but draws in the memory order of `x`.
    for node in [node for node in module.graph.nodes if node.target is _aten.bernoulli.p]:
        with module.graph.inserting_before(node):
            new = module.graph.call_function(_aten.empty_like.default, node.args[:1])
            new.kwargs = {"memory_format": torch.contiguous_format}
        node.replace_input_with(node.args[0], new)
    module.recompile()


def note_strides(module: fx.GraphModule) -> None:
    """Note the strides of the result at every random node, before later passes change them."""
    for node in filter(is_random, module.graph.nodes):
        written = node.args[0] if node.target in _IN_PLACE else node
        node.meta[_STRIDES] = tuple(written.meta["val"].stride())


def lift_draws(module: fx.GraphModule) -> tuple[list[fx.Node], list[Draw]]:
    """Replace every random node by a placeholder. Returns the placeholders and their draws, in order."""
    graph = module.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    inputs: list[fx.Node] = []
    draws: list[Draw] = []
    for node in [node for node in graph.nodes if is_random(node)]:
        args = tuple(None if isinstance(argument, fx.Node) else argument for argument in node.args)
        value = node.meta["val"]
        meta = (tuple(value.shape), node.meta[_STRIDES], value.dtype)
        draws.append(Draw(_IN_PLACE.get(node.target, node.target), args, dict(node.kwargs), *meta))
        with graph.inserting_after(last):
            last = graph.placeholder(f"draw{len(draws)}")
        last.meta = {"val": node.meta["val"]}
        node.replace_all_uses_with(last)
        graph.erase_node(node)
        inputs.append(last)
    if draws:
        # Random nodes gone, the tensors that only gave their shapes are dead.
        graph.eliminate_dead_code()
        module.recompile()
    return inputs, draws


def memory_order(tensor: Tensor) -> Hashable:
    """The strides of a new tensor like this one, which give the order of drawing. None for row-major."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    like = torch.empty_like(tensor, device="meta")
    strides = [stride for size, stride in zip(tensor.shape, like.stride(), strict=True) if size > 1]
    return None if like.is_contiguous() else tuple(strides)


def draw_numbers(draws: Sequence[Draw], steps: int, device: torch.device) -> list[Tensor]:
    rows = [torch.empty((steps, *draw.shape), dtype=draw.dtype, device=device) for draw in draws]
    # Step by step, and in the order of the operators, so that the generator advances as in the eager loop.
    with torch.no_grad():
        for t in range(steps if draws else 0):
            for draw, row in zip(draws, rows, strict=True):
                draw.draw_into(row[t])
    return rows
