"""The plan of a captured step: its operators by their dependences, and how they run over a whole sequence.

    forward                                        backward, last step first
    -------                                        -------------------------
    once           depends on references only      before_back  on inputs, states and output gradients, but not
    before         on inputs only                               on the gradient that is carried from step t+1
    loop           leads from state to new state   loop_back    leads from carried gradient to carried gradient
    after          leads to outputs only           after_back   leads to gradients of inputs and parameters only

The obvious alternative runs the whole graph once per step. But only `loop` and `loop_back` must run step by step. The
other parts run for all steps at once (`BulkEvaluator`): an operator before the loop is one over T x N rows, and a
parameter's gradient is one product or sum after the loop, never an addition per step.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx

from torchweft.recurrent.graph import StepGraph, Value, is_check

INPUT, STATE, CARRIED, GIVEN = "input", "state", "carried gradient", "output gradient"


@dataclass(frozen=True)
class DependencePartition:
    """Each operator of the joint graph in exactly one part, in an order in which they can run."""

    once: list[fx.Node]
    before: list[fx.Node]
    loop: list[fx.Node]
    after: list[fx.Node]
    before_back: list[fx.Node]
    loop_back: list[fx.Node]
    after_back: list[fx.Node]


def dependences(captured: StepGraph, invariant: str = STATE) -> dict[fx.Node, frozenset[str]]:
    """For every node, its dependences among INPUT, STATE, CARRIED and GIVEN. A reference has none."""
    # A state that every step passes on unchanged counts as `invariant`.
    signature = captured.signature
    on: dict[fx.Node, frozenset[str]] = {node: frozenset() for node in captured.module.graph.nodes}
    starts = [
        (INPUT, signature.inputs),
        (STATE, signature.states),
        (CARRIED, signature.new_state_gradients),
        (GIVEN, signature.output_gradients),
    ]
    for name, nodes in starts:
        on.update({node: frozenset([name]) for node in nodes})
    on.update({signature.states[k]: frozenset([invariant]) for k in captured.invariant})
    for node in captured.nodes:
        on[node] = frozenset[str]().union(*(on[operand] for operand in node.all_input_nodes))
    return on


def partition(captured: StepGraph) -> DependencePartition:
    signature, on = captured.signature, dependences(captured)
    to_state = leading_to(signature.new_states)
    to_carry = leading_to(signature.state_gradients)
    to_output = leading_to([*signature.outputs, *captured.checks])
    parts = DependencePartition([], [], [], [], [], [], [])
    placed: dict[fx.Node, str] = {}
    for node in captured.nodes:
        placed[node] = _part_of(on[node], node in to_state, node in to_output, node in to_carry)
        if node.target is operator.getitem:  # one of several results of an operator, which must be in the same part
            placed[node] = placed[node.all_input_nodes[0]]
        getattr(parts, placed[node]).append(node)
    return parts


def _part_of(on: frozenset[str], to_state: bool, to_output: bool, to_carry: bool) -> str:
    # The order matters: a carried gradient makes an operator sequential regardless of its other dependences.
    if CARRIED in on:
        return "loop_back" if to_carry else "after_back"
    if GIVEN in on:
        return "before_back"
    if STATE in on:
        return "loop" if to_state else "after" if to_output else "before_back"
    return "before" if on else "once"


def leading_to(ends: Iterable[Value], inside: Collection[fx.Node] | None = None) -> set[fx.Node]:
    """The ends and the nodes that they are computed from. With `inside`, the search is limited to these nodes."""
    reached: set[fx.Node] = set()
    stack = [end for end in ends if end is not None]
    while stack:
        node = stack.pop()
        if node not in reached and (inside is None or node in inside):
            reached.add(node)
            stack += node.all_input_nodes
    return reached


def explain(captured: StepGraph) -> str:
    parts = partition(captured)
    lines: list[str] = []
    for name, when in _WHEN.items():
        nodes: list[fx.Node] = getattr(parts, name)
        lines.append(f"{name} ({when}): {len(nodes)} operators")
        lines += [f"    {_describe_node(node)}" for node in nodes]
    return "\n".join(lines)


_WHEN = {
    "once": "for all calls with these parameters",
    "before": "before the loop, all steps at once",
    "loop": "step by step",
    "after": "after the loop, all steps at once",
    "before_back": "before the backward loop, all steps at once",
    "loop_back": "step by step, backward",
    "after_back": "after the backward loop, all steps at once",
}


def _describe_node(node: fx.Node) -> str:
    shape = _shape_of(node)
    size = "" if shape is None else f"  [{' x '.join(map(str, shape))}]"
    arguments = ", ".join(map(str, node.args))
    return f"{node.name} = {getattr(node.target, '__name__', node.target)}({arguments}){size}"


_aten = cast(Any, torch.ops.aten)
# Operators that can be applied to a sum over time instead of to each summand.
_LINEAR_VIEWS = (
    _aten.t.default,
    _aten.reshape.default,
    _aten.transpose.int,
    _aten.permute.default,
    _aten.squeeze.dim,
    _aten.unsqueeze.default,
    _aten.neg.default,
)

ZEROS = (_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default)


@dataclass
class BulkEvaluator:
    """Evaluates nodes for all steps of a sequence at once. `env` holds values by node, stacked where `varies`."""

    steps: int
    varies: Callable[[fx.Node], bool]
    env: dict[fx.Node, Any] = field(default_factory=dict[fx.Node, Any])

    def evaluate(self, nodes: Sequence[fx.Node], wanted: Sequence[fx.Node]) -> None:
        """Compute `wanted`, which must be among `nodes`, for all steps, and only the nodes that it needs."""
        checks = [node for node in wanted if is_check(node)]
        if checks:
            # A check has no result, and `vmap` accepts only functions that return tensors. So it runs per step.
            operands = [operand for node in checks for operand in node.all_input_nodes if operand not in self.env]
            values = [node for node in wanted if node not in checks]
            self.evaluate(nodes, [*dict.fromkeys([*values, *operands])])
            for node, info in ((node, node.all_input_nodes[0]) for node in checks):
                for step in self.env[info].unbind(0) if self.varies(info) else [self.env[info]]:
                    _call_node(node, {info: step})
            return
        if not wanted:
            return
        inside = leading_to(wanted, set(nodes))
        nodes = [node for node in nodes if node in inside]
        arguments = list(dict.fromkeys(a for node in nodes for a in node.all_input_nodes if a not in inside))
        dims = tuple(0 if self.varies(node) else None for node in arguments)

        def one_step(*values: Any) -> tuple[Any, ...]:
            local = dict(zip(arguments, values, strict=True))
            for node in nodes:
                local[node] = _call_node(node, local)
            return tuple(local[node] for node in wanted)

        # `randomness`: all random numbers are inputs by now. An operator that still draws is a bug.
        constant = all(dim is None for dim in dims)
        every_step = one_step if constant else torch.vmap(one_step, in_dims=dims, randomness="error")
        self.env.update(zip(wanted, every_step(*[self.env[node] for node in arguments]), strict=True))

    def summed(self, node: fx.Node, inside: Sequence[fx.Node]) -> Tensor:
        """The sum over all steps of a value that is computed by nodes `inside`."""
        # Linear operators are applied after the sum, so that the values of single steps need not exist.
        if not self.varies(node):
            return self.env[node] * self.steps
        if node not in inside:
            return self.env[node].sum(0)
        args = node.args
        if summed_at_once(node):
            return self._sum_of_rows(node, inside)
        if node.target in _LINEAR_VIEWS:
            return cast(Any, node.target)(self.summed(cast(fx.Node, args[0]), inside), *args[1:])
        if node.target is _aten.mm.default:
            return self._sum_of_product(*cast("tuple[fx.Node, fx.Node]", args), inside)
        if node.target is _aten.add.Tensor and all(isinstance(each, fx.Node) for each in args) and not node.kwargs:
            one, other = cast("tuple[fx.Node, fx.Node]", args)
            if _shape_of(one) == _shape_of(other):
                return self.summed(one, inside) + self.summed(other, inside)
        return self._computed(node, inside).sum(0)

    def _sum_of_product(self, one: fx.Node, other: fx.Node, inside: Sequence[fx.Node]) -> Tensor:
        if not self.varies(other):
            return self.summed(one, inside) @ self.env[other]
        if not self.varies(one):
            return self.env[one] @ self.summed(other, inside)
        # One product with an inner dimension of T x N replaces T products and their sum.
        left, right = self._computed(one, inside), self._computed(other, inside)
        return left.permute(1, 0, 2).reshape(left.shape[1], -1) @ right.reshape(-1, right.shape[2])

    def _sum_of_rows(self, node: fx.Node, inside: Sequence[fx.Node]) -> Tensor:
        # Rows of all steps, added at their indices to a table of zeros.
        if node.target is _aten.embedding_dense_backward.default:
            rows, index, count, padding, by_frequency = node.args
        else:
            (_, (index,), rows, _), shape = cast("tuple[Any, Any, Any, Any]", node.args), _shape_of(node)
            count, padding, by_frequency = shape[0], -1, False
        for operand in (rows, index):
            self._computed(cast(fx.Node, operand), inside)
        rows, index = (self.stacked(cast(fx.Node, operand)) for operand in (rows, index))
        flat, at = rows.reshape(index.numel(), -1), index.reshape(-1)
        # `index_put` accepts negative indices, `embedding_dense_backward` does not.
        at = at if node.target is _aten.embedding_dense_backward.default else at.remainder(cast(int, count))
        total = _aten.embedding_dense_backward.default(flat, at, count, padding, by_frequency)
        return total.reshape(_shape_of(node))

    def stacked(self, node: fx.Node) -> Tensor:
        value = self.env[node]
        return value if self.varies(node) else value.expand(self.steps, *value.shape)

    def _computed(self, node: fx.Node, inside: Sequence[fx.Node]) -> Tensor:
        if node not in self.env:
            self.evaluate([other for other in inside if other not in self.env], [node])
        return self.env[node]


def summed_at_once(node: fx.Node) -> bool:
    """Whether an operator, applied to its operands of all steps, yields the sum of its results in each step."""
    if node.target is _aten.embedding_dense_backward.default:
        return not node.args[4]  # by frequency, it counts within a step
    if node.target is not _aten.index_put.default or node.args[3:] != (True,):
        return False
    table, indices, rows, _ = cast("tuple[fx.Node, list[fx.Node | None], fx.Node, bool]", node.args)
    (index, *others), width = indices, _shape_of(table)[1:]
    whole_rows = index is not None and not others and _shape_of(rows) == (*_shape_of(index), *width)
    # In reduced precision, one sum over all steps rounds differently from a sum of the steps' results.
    reduced = rows.meta["val"].dtype not in (torch.float32, torch.float64)
    return whole_rows and not reduced and table.target in ZEROS


def _call_node(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = cast("tuple[Any, Any]", fx.map_arg((node.args, node.kwargs), lambda operand: values[operand]))
    return cast(Any, node.target)(*args, **kwargs)


def _shape_of(node: fx.Node) -> Any:
    return getattr(node.meta.get("val"), "shape", None)
