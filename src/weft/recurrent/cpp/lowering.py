"""Lowering of a captured step to its three functions: forward, backward, and forward again where all states are known.

    forward    x, h (rows t)           ->  h (rows t + 1), y, and what backward reads (saved)
    recompute  x, h (rows t and t+1)   ->  saved             nothing is carried, so products are of all steps at once
    backward   x, h, y, saved, dy, dh  ->  dx, dh, and added to the parameters' gradients

What depends on the references only (`constants`) is computed by PyTorch, once for each call; what C does not know, for
each chunk (partitioner.py). Arguments are called

    x inputs   h states   y outputs   v saved   c constants   dy, dx, dh their gradients   dp those of parameters
    a          gradients of the states after each step, added to the carried one
    u          computed by PyTorch, read here   g   computed here, read by PyTorch after backward
"""

from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor, fx

from weft.recurrent.cpp.ir import (
    LoweringContext,
    Product,
    Reduce,
    Row,
    TimeReduction,
    Unsupported,
    Value,
    View,
    check_dtype,
    compute_dtype,
    whole_view,
)
from weft.recurrent.cpp.operators import is_view, lower_node
from weft.recurrent.cpp.partitioner import ForwardBackwardSplit, ReductionPattern
from weft.recurrent.cpp.scheduling import Argument, LoopFunction
from weft.recurrent.graph import StepGraph
from weft.recurrent.passes import writes


@dataclass
class Lowered:
    """The functions, and what their arguments mean."""

    split: ForwardBackwardSplit
    constants: list[fx.Node] = field(default_factory=list[fx.Node])
    saved: list[fx.Node] = field(default_factory=list[fx.Node])
    outside: list[fx.Node] = field(default_factory=list[fx.Node])
    """Computed by PyTorch, read by the functions."""
    made: list[fx.Node] = field(default_factory=list[fx.Node])
    """Computed by `backward`, read by PyTorch."""
    forward: LoopFunction = field(default_factory=partial(LoopFunction, "forward"))
    recompute: LoopFunction = field(default_factory=partial(LoopFunction, "recompute"))
    backward: LoopFunction = field(default_factory=partial(LoopFunction, "backward", backward=True))

    @property
    def functions(self) -> tuple[LoopFunction, LoopFunction, LoopFunction]:
        """Forward, recompute, backward."""
        return self.forward, self.recompute, self.backward


def lower(captured: StepGraph) -> Lowered:
    """Settle the three functions of a captured step. Raises Unsupported."""
    written = writes(captured.module)  # some of PyTorch's decompositions hold such
    if written:
        raise Unsupported(f"loops in C are made of pure operators, but this step writes by {', '.join(written)}")
    split = ForwardBackwardSplit(captured)
    lowered = Lowered(split, saved=split.saved, made=split.made)
    _forward(_FunctionLowering(lowered, lowered.forward))
    _recompute(_FunctionLowering(lowered, lowered.recompute))
    _backward(_FunctionLowering(lowered, lowered.backward))
    return lowered


class _FunctionLowering:
    """Fills in one function."""

    def __init__(self, lowered: Lowered, function: LoopFunction) -> None:
        self.split, self.lowered, self.function = lowered.split, lowered, function
        self.captured = captured = lowered.split.captured
        self.signature, self.invariant = captured.signature, captured.invariant
        """The states that a step hands on as they are."""
        self.views: dict[fx.Node, View] = {}
        """The arguments of the function."""
        self.context = LoweringContext({})

    def meta(self, node: fx.Node) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a node's value; a reference's is that of the tensor behind it."""
        value: Tensor = self.captured.value(node)
        return tuple(value.shape), value.dtype

    def given(self, name: str, node: fx.Node, row: Row) -> Value:
        """The node's value is an argument. Constants come in the dtype that C computes in: products pack them."""
        shape, dtype = self.meta(node)
        check_dtype(dtype, name)
        dtype = dtype if self.split.varies(node) else compute_dtype(dtype)
        value = self.function.given(name, shape, dtype, row)
        self.views[node] = whole_view(value)
        return value

    def give_inputs(self) -> None:
        for i, node in enumerate(self.signature.inputs):
            if not self.split.outside(node):
                self.given(f"x{i}", node, "step")

    def give_states(self) -> list[Value]:
        """The states before the step; of those that change from step to step, the values."""
        made = [
            self.given(f"h{k}", node, "same" if k in self.invariant else "step")
            for k, node in enumerate(self.signature.states)
        ]
        return [value for k, value in enumerate(made) if k not in self.invariant]

    def give_new_states(self, known: set[fx.Node]) -> None:
        """The states after the step, where they are known: the next rows of what holds the states."""
        for k, node in enumerate(self.signature.new_states):
            if node in known and k not in self.invariant and node not in self.views:
                shape, dtype = self.meta(node)
                value = Value(f"n{k}", shape, dtype)
                self.function.allocate(value, f"h{k}", "next")
                self.views[node] = whole_view(value)

    def run(self, nodes: set[fx.Node]) -> None:
        """Lower these operators."""
        sparsity = self.split.sparsity
        mask = None if sparsity.mask is None else self.views[sparsity.mask]
        self.context = LoweringContext(self.views, {} if mask is None else dict.fromkeys(sparsity.products, mask))
        for node in self.captured.nodes:
            if node in nodes:
                for each in node.all_input_nodes:
                    self._from_outside(each)
                lower_node(self.context, node)

    def end(self, node: fx.Node) -> View:
        """The view that a node is."""
        self._from_outside(node)
        return self.context.as_dtype(self.context.view(node), self.meta(node)[1])

    def want(self, name: str, node: fx.Node, row: Row = "step") -> None:
        """Write a node's value into a new argument."""
        shape, dtype = self.meta(node)
        check_dtype(dtype, name)
        argument = self.function.argument(name, dtype, torch.Size(shape).numel(), row)
        self.function.wanted.append((self.end(node), argument))

    def want_saved(self) -> None:
        for j, node in enumerate(self.lowered.saved):
            self.want(f"v{j}", node)

    def _from_outside(self, node: fx.Node) -> None:
        """Give what PyTorch makes: for all steps as a view of another such, or as an argument; or for each step."""
        if node in self.context.views:
            return
        if self.split.varies(node):
            if node in self.split.torch:
                self._numbered("u", self.lowered.outside, node, "step")
            return
        if is_view(node) and not self.split.varies(node.all_input_nodes[0]):
            self._from_outside(node.all_input_nodes[0])
            try:
                lower_node(self.context, node)
                return
            except Unsupported:
                pass  # PyTorch makes it, then
        if isinstance(node.meta.get("val"), list | tuple):
            raise Unsupported(f"{node.target} on weights yields several tensors")
        self._numbered("c", self.lowered.constants, node, "same")

    def _numbered(self, letter: str, known: list[fx.Node], node: fx.Node, row: Row) -> None:
        """The node's value is an argument with a number in a list that all functions share."""
        if node not in known:
            known.append(node)
        self.context.views[node] = whole_view(self.given(f"{letter}{known.index(node)}", node, row))


def _forward(it: _FunctionLowering) -> None:
    it.give_inputs()
    it.function.carried = [(value, value) for value in it.give_states()]
    it.run(it.split.front)
    for k, node in enumerate(it.signature.new_states):
        if k not in it.invariant:
            shape, dtype = it.meta(it.signature.states[k])
            argument = Argument(f"h{k}", dtype, torch.Size(shape).numel(), "next")
            it.function.wanted.append((it.end(cast(fx.Node, node)), argument))
    for i, node in enumerate(it.signature.outputs):
        output = cast(fx.Node, node)
        if i not in it.captured.aliases and not it.split.outside(output):  # one that is a new state is stored once
            it.want(f"y{i}", output)
    it.want_saved()
    it.function.finalize(it.context.made)


def _recompute(it: _FunctionLowering) -> None:
    it.give_inputs()
    it.give_states()
    it.give_new_states(it.split.front)
    it.run(it.split.ancestors(it.lowered.saved, {*it.views} | it.split.torch))
    it.want_saved()
    it.function.finalize(it.context.made)


def _backward(it: _FunctionLowering) -> None:
    it.give_inputs()
    it.give_states()
    _give_results(it)
    carried = _give_gradients(it)
    it.run(it.split.back | it.split.views)
    for k, value in carried.items():
        node = it.signature.state_gradients[k]
        end = None if node is None else it.end(node)
        it.function.carried.append((value, None if end is None else end.value))
        if end is not None:
            it.function.wanted.append((end, Argument(f"dh{k}", value.dtype, value.size, "out")))
    for i, node in enumerate(it.signature.input_gradients):
        if node is not None and not it.split.outside(node):
            it.want(f"dx{i}", node)
    for j, node in enumerate(it.lowered.made):
        it.want(f"g{j}", node)
    totals = _totals(it)  # which makes more values
    it.function.finalize([*it.context.made, *totals])


def _give_results(it: _FunctionLowering) -> None:
    """Of forward: states, outputs and saved values."""
    bases = {*it.split.bases}
    it.give_new_states(bases)
    for i, node in enumerate(it.signature.outputs):
        if node in bases and node not in it.views:
            it.given(f"y{i}", node, "step")
    for j, node in enumerate(it.lowered.saved):
        it.given(f"v{j}", node, "step")


def _give_gradients(it: _FunctionLowering) -> dict[int, Value]:
    """Gradients of outputs, and of the states after the step: the carried ones, by their numbers."""
    for i, node in enumerate(it.signature.output_gradients):
        if not it.split.outside(node):
            it.given(f"dy{i}", node, "step")
    carried: dict[int, Value] = {}
    for k, node in enumerate(it.signature.new_state_gradients):
        _, dtype = it.meta(it.signature.states[k])
        if dtype.is_floating_point:
            carried[k] = value = it.given(f"dh{k}", node, "in")
            it.function.added.append((value, it.function.argument(f"a{k}", dtype, value.size, "step")))
    return carried


def _totals(it: _FunctionLowering) -> list[Value]:
    """The parameters' gradients, piece by piece."""
    totals: list[Value] = []
    for j, (node, pieces) in enumerate(zip(it.signature.parameter_gradients, it.split.totals, strict=True)):
        if node is not None and pieces:
            shape, dtype = it.meta(node)
            into = it.function.given(f"dp{j}", shape, dtype, "same")
            for piece in pieces:
                made = TimeReduction(_summed(it, piece))
                totals.append(Value(f"total{len(totals)}", tuple(piece.at.shape), dtype, made))
                it.function.totals.append((totals[-1], View(into, piece.at)))
    return totals


def _summed(it: _FunctionLowering, piece: ReductionPattern) -> Product | Reduce | View:
    sides = [it.context.as_dtype(it.end(each), piece.at.dtype) for each in piece.read]
    match piece.kind:
        case "product":
            mask = it.split.sparsity.mask if piece.node in it.split.sparsity.totals else None
            return Product(*sides, row_mask=None if mask is None else it.views[mask])
        case "sum":
            return Reduce("sum", sides[0], piece.axes, piece.keep)
        case "value":
            return sides[0]
