"""The plan of a captured step: its operators by what each depends on, and how they run over a whole sequence.

    forward                                        backward, last step first
    -------                                        -------------------------
    once           depends on references only      before_back  on inputs, states and output gradients, but not
    before         on inputs only                               on the gradient that is carried from step t+1
    loop           leads from state to new state   loop_back    leads from carried gradient to carried gradient
    after          leads to outputs only           after_back   leads to gradients of inputs and parameters only

Only `loop` and `loop_back` must run step by step. All else runs for all steps at once (`Bulk`): what stands before the
loop is one operator over T x N rows, and a parameter's gradient is one product or sum after the loop, never an addition
per step. Hand-written kernels do so for the LSTM (cuDNN: Appleyard et al., arXiv 1604.01946); here it is derived.
A plan depends neither on T nor on lengths.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, fx

from weft.recurrent.captured import Captured, Value
from weft.recurrent.code import CompiledLoop, Loop

INPUT, STATE, CARRIED, GIVEN = "input", "state", "carried gradient", "output gradient"


@dataclass(frozen=True)
class Parts:
    """Each operator of the joint graph in exactly one part, in an order in which they can run."""

    once: list[fx.Node]
    before: list[fx.Node]
    loop: list[fx.Node]
    after: list[fx.Node]
    before_back: list[fx.Node]
    loop_back: list[fx.Node]
    after_back: list[fx.Node]


def dependences(captured: Captured, passing: str = STATE) -> dict[fx.Node, frozenset[str]]:
    """For every node, what it depends on of INPUT, STATE, CARRIED and GIVEN; nothing for references.

    A state that every step hands on as it is counts as `passing`.
    """
    roles = captured.roles
    found: dict[fx.Node, frozenset[str]] = {node: frozenset() for node in captured.module.graph.nodes}
    starts = [
        (INPUT, roles.inputs),
        (STATE, roles.states),
        (CARRIED, roles.new_state_gradients),
        (GIVEN, roles.output_gradients),
    ]
    for name, nodes in starts:
        found.update({node: frozenset([name]) for node in nodes})
    found.update({roles.states[k]: frozenset([passing]) for k in captured.passing})
    for node in captured.nodes:
        found[node] = frozenset[str]().union(*(found[each] for each in node.all_input_nodes))
    return found


def cut(captured: Captured) -> Parts:
    """Put every operator into its part."""
    roles, on = captured.roles, dependences(captured)
    to_state = leading_to(roles.new_states)
    to_carry = leading_to(roles.state_gradients)
    to_output = leading_to(roles.outputs)
    parts = Parts([], [], [], [], [], [], [])
    placed: dict[fx.Node, str] = {}
    for node in captured.nodes:
        placed[node] = _part_of(on[node], node in to_state, node in to_output, node in to_carry)
        if node.target is operator.getitem:  # one of several results: wherever they are made
            placed[node] = placed[node.all_input_nodes[0]]
        getattr(parts, placed[node]).append(node)
    return parts


def _part_of(on: frozenset[str], to_state: bool, to_output: bool, to_carry: bool) -> str:
    if CARRIED in on:
        return "loop_back" if to_carry else "after_back"
    if GIVEN in on:
        return "before_back"
    if STATE in on:
        return "loop" if to_state else "after" if to_output else "before_back"
    return "before" if on else "once"


def leading_to(ends: Iterable[Value], inside: Collection[fx.Node] | None = None) -> set[fx.Node]:
    """The nodes that some end is computed from, and the ends; looked for among `inside` only, if that is given."""
    found: set[fx.Node] = set()
    stack = [end for end in ends if end is not None]
    while stack:
        node = stack.pop()
        if node not in found and (inside is None or node in inside):
            found.add(node)
            stack += node.all_input_nodes
    return found


def explain(captured: Captured) -> str:
    """For a person: what runs step by step, what was moved out of the loops, and how large it is."""
    parts = cut(captured)
    lines: list[str] = []
    for field in fields(parts):
        nodes: list[fx.Node] = getattr(parts, field.name)
        lines.append(f"{field.name} ({_WHEN[field.name]}): {len(nodes)} operators")
        lines += [f"    {_line(node)}" for node in nodes]
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


def _line(node: fx.Node) -> str:
    shape = getattr(node.meta.get("val"), "shape", None)
    size = "" if shape is None else f"  [{' x '.join(str(each) for each in shape)}]"
    arguments = ", ".join(str(each) for each in node.args)
    return f"{node.name} = {getattr(node.target, '__name__', node.target)}({arguments}){size}"


_aten = cast(Any, torch.ops.aten)
_LINEAR_VIEWS = (
    _aten.t.default,
    _aten.reshape.default,
    _aten.transpose.int,
    _aten.permute.default,
    _aten.squeeze.dim,
    _aten.unsqueeze.default,
    _aten.neg.default,
)

_ZEROS = (_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default)


class Bulk:
    """Values of a graph for a whole sequence: `env` holds them by node, stacked where `varies` says so."""

    def __init__(self, steps: int, varies: Callable[[fx.Node], bool]) -> None:
        self.steps = steps
        self.varies = varies
        self.env: dict[fx.Node, Any] = {}

    def evaluate(self, nodes: Sequence[fx.Node], wanted: Sequence[fx.Node]) -> None:
        """Compute `wanted`, all of them among `nodes`, for all steps, and nothing that they do not need."""
        if not wanted:
            return
        inside = leading_to(wanted, set(nodes))
        nodes = [node for node in nodes if node in inside]
        given = list(dict.fromkeys(a for node in nodes for a in node.all_input_nodes if a not in inside))
        dims = tuple(0 if self.varies(node) else None for node in given)

        def step(*values: Any) -> tuple[Any, ...]:
            local = dict(zip(given, values, strict=True))
            for node in nodes:
                local[node] = _call(node, local)
            return tuple(local[node] for node in wanted)

        values = [self.env[node] for node in given]
        found = step(*values) if all(dim is None for dim in dims) else _vmap(step, dims)(*values)
        self.env.update(zip(wanted, found, strict=True))

    def summed(self, node: fx.Node, inside: Sequence[fx.Node]) -> Tensor:
        """The sum over all steps of a value that is computed by nodes `inside`."""
        if not self.varies(node):
            return self.env[node] * self.steps
        if node not in inside:
            return self.env[node].sum(0)
        args = node.args
        if summed_at_once(node):
            return self._rows_added(node, inside)
        if node.target in _LINEAR_VIEWS:
            return cast(Any, node.target)(self.summed(cast(fx.Node, args[0]), inside), *args[1:])
        if node.target is _aten.sum.dim_IntList:
            return self._sum_of_sum(node, inside)
        if node.target is _aten.mm.default:
            return self._sum_of_product(*cast("tuple[fx.Node, fx.Node]", args), inside)
        if node.target is _aten.add.Tensor and all(isinstance(each, fx.Node) for each in args) and not node.kwargs:
            one, other = cast("tuple[fx.Node, fx.Node]", args)
            if _shape(one) == _shape(other):
                return self.summed(one, inside) + self.summed(other, inside)
        return self._stacked(node, inside).sum(0)

    def _sum_of_sum(self, node: fx.Node, inside: Sequence[fx.Node]) -> Tensor:
        source, axes, *rest = node.args
        value = self._stacked(cast(fx.Node, source), inside)
        steps = [0, *(axis % (value.dim() - 1) + 1 for axis in cast("list[int]", axes))]
        keep = bool(rest[0]) if rest else False
        total = value.sum(steps, keepdim=keep)
        return total[0] if keep else total

    def _sum_of_product(self, one: fx.Node, other: fx.Node, inside: Sequence[fx.Node]) -> Tensor:
        if not self.varies(other):
            return self.summed(one, inside) @ self.env[other]
        if not self.varies(one):
            return self.env[one] @ self.summed(other, inside)
        left, right = self._stacked(one, inside), self._stacked(other, inside)
        return left.permute(1, 0, 2).reshape(left.shape[1], -1) @ right.reshape(-1, right.shape[2])

    def _rows_added(self, node: fx.Node, inside: Sequence[fx.Node]) -> Tensor:
        """Rows of all steps, added at their indices to a table of zeros."""
        if node.target is _aten.embedding_dense_backward.default:
            rows, index, count, padding, by_frequency = node.args
        else:
            (_, (index,), rows, _), shape = cast("tuple[Any, Any, Any, Any]", node.args), _shape(node)
            count, padding, by_frequency = shape[0], -1, False
        rows, index = (self._each(cast(fx.Node, each), inside) for each in (rows, index))
        flat, at = rows.reshape(index.numel(), -1), index.reshape(-1)
        at = at if node.target is _aten.embedding_dense_backward.default else at.remainder(cast(int, count))
        found = _aten.embedding_dense_backward.default(flat, at, count, padding, by_frequency)
        return found.reshape(_shape(node))

    def _each(self, node: fx.Node, inside: Sequence[fx.Node]) -> Tensor:
        """The value for all steps, also of what is the same in each."""
        value = self._stacked(node, inside)
        return value if self.varies(node) else value.expand(self.steps, *value.shape)

    def _stacked(self, node: fx.Node, inside: Sequence[fx.Node]) -> Tensor:
        """The value for all steps, computed when it is first asked for."""
        if node not in self.env:
            self.evaluate([each for each in inside if each not in self.env], [node])
        return self.env[node]


def summed_at_once(node: fx.Node) -> bool:
    """Whether an operator, given what it reads of all steps, yields the sum of what it yields in each step."""
    if node.target is _aten.embedding_dense_backward.default:
        return not node.args[4]  # by frequency, it counts within a step
    if node.target is not _aten.index_put.default or node.args[3:] != (True,):
        return False
    table, indices, rows, _ = cast("tuple[fx.Node, list[fx.Node | None], fx.Node, bool]", node.args)
    (index, *others), width = indices, _shape(table)[1:]
    whole = index is not None and not others and _shape(rows) == (*_shape(index), *width)
    small = rows.meta["val"].dtype not in (torch.float32, torch.float64)
    return whole and not small and table.target in _ZEROS


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = cast("tuple[Any, Any]", fx.map_arg((node.args, node.kwargs), lambda each: values[each]))
    return cast(Any, node.target)(*args, **kwargs)


def _vmap(function: Callable[..., Any], dims: tuple[int | None, ...]) -> Callable[..., Any]:
    return torch.vmap(function, in_dims=dims, randomness="error")


def _shape(node: fx.Node) -> Any:
    return getattr(node.meta.get("val"), "shape", None)


Gradients = list[Tensor | None]


class Trail:
    """The values of one sequence, stacked (`bulk.env`) and step by step (`rows`): what backward needs of forward."""

    def __init__(self, bulk: Bulk, rows: dict[fx.Node, Sequence[Tensor]]) -> None:
        self.bulk = bulk
        self.rows = rows

    def copy(self) -> "Trail":
        """For one backward, which adds values of its own; the graph may be retained for another."""
        bulk = Bulk(self.bulk.steps, self.bulk.varies)
        bulk.env.update(self.bulk.env)
        return Trail(bulk, dict(self.rows))

    def stacked(self, node: fx.Node) -> Tensor:
        """The value for all steps, T x ..."""
        env = self.bulk.env
        if node not in env:
            env[node] = torch.stack(list(self.rows[node]))
        value = env[node]
        return value if self.bulk.varies(node) else value.expand(self.bulk.steps, *value.shape)

    def in_steps(self, node: fx.Node) -> Sequence[Tensor]:
        """The value step by step."""
        if node not in self.rows:
            self.rows[node] = self.bulk.env[node].unbind(0)
        return self.rows[node]


class Plan:
    """The parts of a captured step, and the two loops that are left of it."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.parts: Parts = cut(captured)
        self._on = dependences(captured)

    def explain(self) -> str:
        """For a person: what runs step by step, what was moved out of the loops, and the source of the loops."""
        return "\n\n".join([explain(self.captured), self.loop.source, self.loop_back(False).source])

    @cached_property
    def loop(self) -> CompiledLoop:
        """The forward loop. It saves the new states, the outputs, and what backward reads."""
        parts, roles = self.parts, self.captured.roles
        later = [*parts.after, *parts.before_back, *parts.loop_back, *parts.after_back]
        ends = [*roles.outputs, *roles.new_states]
        saved = _read_by(later, [*parts.loop, *roles.states], ends)
        return self._compiled(parts.loop, roles.states, roles.new_states, saved, backward=False)

    def loop_back(self, states_have_gradients: bool) -> CompiledLoop:
        """The backward loop, with or without gradients that come from the states of all steps."""
        return self._loops_back[states_have_gradients]

    @cached_property
    def _loops_back(self) -> tuple[CompiledLoop, CompiledLoop]:
        parts, roles = self.parts, self.captured.roles
        ends = [*roles.input_gradients, *roles.parameter_gradients]
        saved = _read_by(parts.after_back, [*parts.loop_back, *roles.new_state_gradients], ends)
        carried, back = roles.new_state_gradients, roles.state_gradients
        plain, given = (
            self._compiled(parts.loop_back, carried, back, saved, backward=True, given=given) for given in (False, True)
        )
        return plain, given

    def forward(self, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], Trail]:
        """Outputs (T x ...), states (T+1 x ..., row 0 the initial one), and what `backward` needs.

        `inputs` are the flat leaves, T x ..., T at least 1; `states` those of the initial state.
        """
        roles, parts = self.captured.roles, self.parts
        trail = Trail(Bulk(len(inputs[0]), lambda node: bool(self._on[node])), {})
        env = trail.bulk.env
        env.update(zip(roles.inputs, inputs, strict=True))
        for node in roles.references:
            env[node] = self.captured.reference(node).detach()
        back = [*parts.before_back, *parts.loop_back, *parts.after_back]
        backward_ends = [*roles.input_gradients, *roles.state_gradients, *roles.parameter_gradients]
        ends = [*roles.outputs, *roles.new_states, *backward_ends]
        later = [*parts.before, *parts.loop, *parts.after, *back]
        trail.bulk.evaluate(parts.once, _read_by(later, parts.once, ends))
        trail.bulk.evaluate(parts.before, _read_by([*parts.loop, *parts.after, *back], parts.before, ends))
        new_states = _nodes(roles.new_states)
        for k, first in enumerate(states):
            if new_states[k] is roles.states[k]:  # handed on as it is: one tensor stands for all steps
                env[roles.states[k]] = first.expand(trail.bulk.steps, *first.shape)
        buffers = self._buffers(self.loop, trail, dict(zip(reversed(new_states), reversed(list(states)), strict=True)))
        _, saved = self._run(self.loop, trail, states)
        trail.rows.update(saved)
        self._stack_for(parts.after, trail)
        trail.bulk.evaluate(parts.after, _read_by(back, parts.after, ends))
        all_states = [
            buffers[new]
            if new in buffers and new_states.index(new) == k
            else first
            if new is roles.states[k]
            else torch.cat([first[None], trail.stacked(new)])
            for k, (first, new) in enumerate(zip(states, new_states, strict=True))
        ]
        return [trail.stacked(node) for node in _nodes(roles.outputs)], all_states, trail

    def compile(self, loop: Loop) -> CompiledLoop:
        """A loop as a function; other engines have other ways."""
        return loop.compile()

    def varies(self, node: fx.Node) -> bool:
        """Whether a value may differ from step to step."""
        return bool(self._on[node])

    def kept(self) -> list[fx.Node]:
        """The nodes whose values stay from forward to backward, for all steps."""
        forward = [*self.parts.before, *self.parts.after]
        return list(dict.fromkeys([*self.loop.loop.saved, *forward]))

    def backward(
        self, trail: Trail, outputs: Sequence[Tensor], states: Sequence[Tensor] | None, last: Sequence[Tensor]
    ) -> tuple[Gradients, list[Tensor], Gradients]:
        """The gradients of inputs (T x ...), initial states and parameters, out of those of outputs and states.

        `outputs` are T x ...; `states`, T x ..., are those of the states after every step, or None; `last` are
        those of the state after the last one.
        """
        roles, parts = self.captured.roles, self.parts
        trail = trail.copy()
        trail.bulk.env.update(zip(roles.output_gradients, outputs, strict=True))
        ends = [*roles.state_gradients, *roles.input_gradients, *roles.parameter_gradients]
        self._stack_for(parts.before_back, trail)
        trail.bulk.evaluate(parts.before_back, _read_by([*parts.loop_back, *parts.after_back], parts.before_back, ends))
        loop = self.loop_back(states is not None)
        self._buffers(loop, trail, {})
        carried, saved = self._run(loop, trail, last, states)
        trail.rows.update(saved)
        self._stack_for(parts.after_back, trail)
        inside = parts.after_back
        wanted = [node for node in dict.fromkeys(roles.input_gradients) if node in inside]
        trail.bulk.evaluate(parts.after_back, wanted)
        of_inputs = [None if node is None else trail.stacked(node) for node in roles.input_gradients]
        of_parameters = [self._sum(trail, node, inside) for node in roles.parameter_gradients]
        return of_inputs, carried, of_parameters

    def _sum(self, trail: Trail, node: Value, inside: Sequence[fx.Node]) -> Tensor | None:
        """A parameter's gradient: the sum over time, by one product or reduction."""
        if node is None:
            return None
        if node not in inside:
            trail.stacked(node)
        return trail.bulk.summed(node, inside)

    def _compiled(
        self,
        nodes: Sequence[fx.Node],
        carried: Sequence[fx.Node],
        ends: Sequence[Value],
        saved: Sequence[fx.Node],
        *,
        backward: bool,
        given: bool = False,
    ) -> CompiledLoop:
        inside = {*nodes, *carried}
        readers = [each for node in nodes for each in node.all_input_nodes] + [end for end in ends if end is not None]
        outside = [each for each in dict.fromkeys(readers) if each not in inside]
        rows = [node for node in outside if self._on[node]]
        constants = [node for node in outside if not self._on[node]]
        saved = [node for node in saved if node in inside]
        return self.compile(Loop(nodes, constants, rows, carried, ends, saved, backward, given))

    def _run(
        self,
        compiled: CompiledLoop,
        trail: Trail,
        carried: Sequence[Tensor],
        given: Sequence[Tensor] | None = None,
    ) -> tuple[list[Tensor], dict[fx.Node, list[Tensor]]]:
        rows = {node: trail.in_steps(node) for node in (*compiled.loop.rows, *compiled.loop.written)}
        added = [] if given is None else [each.unbind(0) for each in given]
        return compiled.run(trail.bulk.steps, trail.bulk.env, carried, rows, added)

    def _buffers(self, compiled: CompiledLoop, trail: Trail, first: dict[fx.Node, Tensor]) -> dict[fx.Node, Tensor]:
        """Storage over time for what the loop writes, allocated once: T rows, or T+1 with a first one given.

        A state's buffer has the initial state as row 0; step t reads row t and writes row t+1 (as Caffe2's
        ``recurrent_net`` laid them out). The result holds these whole buffers.
        """
        whole: dict[fx.Node, Tensor] = {}
        for node in compiled.loop.written:
            value = node.meta["val"]
            initial = first.get(node)
            device = next(iter(trail.bulk.env[each] for each in self.captured.roles.inputs)).device
            rows = trail.bulk.steps + (initial is not None)
            buffer = torch.empty((rows, *value.shape), dtype=value.dtype, device=device)
            if initial is not None:
                buffer[0].copy_(initial)
                whole[node] = buffer
                buffer = buffer[1:]
            trail.bulk.env[node] = buffer
            trail.rows[node] = buffer.unbind(0)
        return whole

    def _stack_for(self, nodes: Sequence[fx.Node], trail: Trail) -> None:
        """Stack what these nodes read of the loops' values."""
        inside = set(nodes)
        for node in nodes:
            for each in node.all_input_nodes:
                if each not in inside and each in trail.rows and each not in trail.bulk.env:
                    trail.stacked(each)


def _read_by(readers: Iterable[fx.Node], of: Sequence[fx.Node], ends: Iterable[Value]) -> list[fx.Node]:
    """The nodes among `of` that some reader reads, or that are an end."""
    read = {each for reader in readers for each in reader.all_input_nodes} | {end for end in ends if end is not None}
    return [node for node in of if node in read]


def _nodes(values: Sequence[Value]) -> list[fx.Node]:
    return [value for value in values if value is not None]
