"""A plan: how a captured step is run over a whole sequence, and back. It depends on neither T nor lengths.

    forward    once -> before (bulk) -> loop (source, step by step) -> after (bulk)
    backward   before_back (bulk) -> loop_back (source, last step first) -> after_back (bulk sums)

Between the parts go values: stacked over time (T x ...) for the bulk parts, one per step for the loops. What a later
part reads of a loop's values is saved by the loop; these are the *scratches*, found by analysis.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor, fx

from weft.recurrent.bulk import Bulk
from weft.recurrent.captured import Captured, Value
from weft.recurrent.code import CompiledLoop, Loop
from weft.recurrent.parts import Parts, cut, dependences, explain

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
