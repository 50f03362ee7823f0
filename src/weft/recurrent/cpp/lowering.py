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

from weft.recurrent.cpp.expressions import is_view
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
from weft.recurrent.cpp.operators import lower_node
from weft.recurrent.cpp.partitioner import ForwardBackwardSplit, ReductionPattern
from weft.recurrent.cpp.scheduling import Argument, LoopFunction
from weft.recurrent.graph import StepGraph


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
    written = [str(node.target) for node in captured.nodes if _writes(node)]
    if written:
        raise Unsupported(f"loops in C are made of pure operators, but this step writes by {', '.join(written)}")
    split = ForwardBackwardSplit(captured)
    lowered = Lowered(split, saved=split.saved, made=split.made)
    for context in (_ForwardLowering, _AgainLowering, _BackwardLowering):
        context(lowered).make()
    return lowered


def _writes(node: fx.Node) -> bool:
    """Whether an operator changes one of its arguments: some of PyTorch's decompositions hold such."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


class _FunctionLowering:
    """Fills in one function."""

    function: LoopFunction

    def __init__(self, lowered: Lowered) -> None:
        self.split, self.lowered = lowered.split, lowered
        self.captured = captured = lowered.split.captured
        self.signature, self.invariant = captured.signature, captured.invariant
        """The states that a step hands on as they are."""
        self.views: dict[fx.Node, View] = {}
        """The arguments of the function."""
        self.context = LoweringContext({})

    # -- what it reads ----------------------------------------------------------------------------------------------

    def given(self, name: str, node: fx.Node, row: Row) -> Value:
        """The node's value is an argument. Constants come in the dtype that C computes in: products pack them."""
        shape, dtype = _meta(node, self.captured)
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
                shape, dtype = _meta(node, self.captured)
                value = Value(f"n{k}", shape, dtype)
                self.function.allocate(value, f"h{k}", "next")
                self.views[node] = whole_view(value)

    # -- what it makes ----------------------------------------------------------------------------------------------

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
        return self.context.as_dtype(self.context.view(node), _meta(node, self.captured)[1])

    def want(self, name: str, node: fx.Node, row: Row = "step") -> None:
        """Write a node's value into a new argument."""
        shape, dtype = _meta(node, self.captured)
        check_dtype(dtype, name)
        argument = self.function.argument(name, dtype, torch.Size(shape).numel(), row)
        self.function.wanted.append((self.end(node), argument))

    def want_saved(self) -> None:
        for j, node in enumerate(self.lowered.saved):
            self.want(f"v{j}", node)

    def _from_outside(self, node: fx.Node) -> None:
        """Give what PyTorch makes, for all steps or for each."""
        if node in self.context.views:
            return
        if not self.split.varies(node):
            self._constant(node)
        elif node in self.split.torch:
            self.context.views[node] = whole_view(self._given_as("u", self.lowered.outside, node, "step"))

    def _given_as(self, letter: str, known: list[fx.Node], node: fx.Node, row: Row) -> Value:
        """The node's value is an argument with a number in a list that all functions share."""
        if node not in known:
            known.append(node)
        return self.given(f"{letter}{known.index(node)}", node, row)

    def _constant(self, node: fx.Node) -> None:
        """Give a value that is the same in all steps: as a view of another such, or as an argument."""
        if node in self.context.views:
            return
        if is_view(node) and not self.split.varies(node.all_input_nodes[0]):
            self._constant(node.all_input_nodes[0])
            try:
                lower_node(self.context, node)
                return
            except Unsupported:
                pass  # PyTorch makes it, then
        if isinstance(node.meta.get("val"), list | tuple):
            raise Unsupported(f"{node.target} on weights yields several tensors")
        self.context.views[node] = whole_view(self._given_as("c", self.lowered.constants, node, "same"))


class _ForwardLowering(_FunctionLowering):
    def make(self) -> None:
        self.function = self.lowered.forward
        self.give_inputs()
        self.function.carried = [(value, value) for value in self.give_states()]
        self.run(self.split.front)
        same = self.captured.aliases
        for k, node in enumerate(self.signature.new_states):
            if k not in self.invariant:
                old = self.signature.states[k]
                shape, dtype = _meta(old, self.captured)
                argument = Argument(f"h{k}", dtype, torch.Size(shape).numel(), "next")
                self.function.wanted.append((self.end(cast(fx.Node, node)), argument))
        for i, node in enumerate(self.signature.outputs):
            output = cast(fx.Node, node)
            if i not in same and not self.split.outside(output):  # one that is a new state as well is stored once
                self.want(f"y{i}", output)
        self.want_saved()
        self.function.finalize(self.context.made)


class _AgainLowering(_FunctionLowering):
    def make(self) -> None:
        self.function = self.lowered.recompute
        self.give_inputs()
        self.give_states()
        self.give_new_states(self.split.front)
        self.run(self.split.ancestors(self.lowered.saved, {*self.views} | self.split.torch))
        self.want_saved()
        self.function.finalize(self.context.made)


class _BackwardLowering(_FunctionLowering):
    def make(self) -> None:
        self.function = self.lowered.backward
        self.give_inputs()
        self.give_states()
        self._give_kept()
        carried = self._give_gradients()
        self.run(self.split.back | self.split.views)
        self._want_carried(carried)
        for i, node in enumerate(self.signature.input_gradients):
            if node is not None and not self.split.outside(node):
                self.want(f"dx{i}", node)
        for j, node in enumerate(self.lowered.made):
            self.want(f"g{j}", node)
        totals = self._totals()
        self.function.finalize([*self.context.made, *totals])

    def _give_kept(self) -> None:
        """The results of forward: states, outputs and saved values."""
        bases = {*self.split.bases}
        self.give_new_states(bases)
        for i, node in enumerate(self.signature.outputs):
            if node in bases and node not in self.views:
                self.given(f"y{i}", node, "step")
        for j, node in enumerate(self.lowered.saved):
            self.given(f"v{j}", node, "step")

    def _give_gradients(self) -> list[tuple[int, Value]]:
        """Gradients of outputs, and of the states after the step: the carried ones, with their numbers."""
        for i, node in enumerate(self.signature.output_gradients):
            if not self.split.outside(node):
                self.given(f"dy{i}", node, "step")
        carried: list[tuple[int, Value]] = []
        for k, node in enumerate(self.signature.new_state_gradients):
            _, dtype = _meta(self.signature.states[k], self.captured)
            if dtype.is_floating_point:
                value = self.given(f"dh{k}", node, "in")
                argument = self.function.argument(f"a{k}", dtype, value.size, "step")
                self.function.added.append((value, argument))
                carried.append((k, value))
        return carried

    def _want_carried(self, carried: list[tuple[int, Value]]) -> None:
        """The new values of the carried gradients."""
        for k, value in carried:
            node = self.signature.state_gradients[k]
            end = None if node is None else self.end(node)
            self.function.carried.append((value, None if end is None else end.value))
            if end is not None:
                self.function.wanted.append((end, Argument(f"dh{k}", value.dtype, value.size, "out")))

    def _totals(self) -> list[Value]:
        """The parameters' gradients, piece by piece."""
        made: list[Value] = []
        for j, pieces in enumerate(self.split.totals):
            node = self.signature.parameter_gradients[j]
            if node is not None and pieces:
                shape, dtype = _meta(node, self.captured)
                into = self.function.given(f"dp{j}", shape, dtype, "same")
                for piece in pieces:
                    total = Value(f"total{len(made)}", tuple(piece.at.shape), dtype, TimeReduction(self._of(piece)))
                    made.append(total)
                    self.function.totals.append((total, View(into, piece.at)))
        return made

    def _of(self, piece: ReductionPattern) -> Product | Reduce | View:
        sides = [self.context.as_dtype(self.end(each), piece.at.dtype) for each in piece.read]
        match piece.kind:
            case "product":
                mask = self.split.sparsity.mask if piece.node in self.split.sparsity.totals else None
                return Product(*sides, row_mask=None if mask is None else self.views[mask])
            case "sum":
                return Reduce("sum", sides[0], piece.axes, piece.keep)
            case "value":
                return sides[0]


def _meta(node: fx.Node, captured: StepGraph) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a node's value; a reference's is that of the tensor behind it."""
    value: Tensor = captured.value(node)
    return tuple(value.shape), value.dtype
