"""The Python backend: bulk operators of PyTorch around two minimal loops, whose source is generated; no compiler.

    def loop(T, reference..., row lists..., state..., save...):
        for step in range(T):
            v_x = rows_x[step]                computed for all steps before the loop
            v_h = tanh(addmm(v_x, v_s, v_w))  the operators of this part, by PyTorch's own functions
            save_h(v_h)                       read after the loop, if it cannot be written in place
            v_s = v_h                         new state to state
        return [v_s]

The source is generated once per plan, whatever T. The backward loop comes from the same generator, with `step` running
down.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, fx

from weft.recurrent.backends import Chunk, Gradients, chunk_length
from weft.recurrent.graph import StepGraph, Value
from weft.recurrent.plan import BulkEvaluator, DependencePartition, dependences, explain, partition

_aten = cast(Any, torch.ops.aten)
_QUICK: dict[Any, Callable[..., Any]] = {
    _aten.add.Tensor: torch.add,
    _aten.sub.Tensor: torch.sub,
    _aten.mul.Tensor: torch.mul,
    _aten.div.Tensor: torch.div,
    _aten.sigmoid.default: torch.sigmoid,
    _aten.tanh.default: torch.tanh,
    _aten.exp.default: torch.exp,
    _aten.neg.default: torch.neg,
    _aten.rsub.Scalar: torch.rsub,
    _aten.relu.default: torch.relu,
    _aten.addmm.default: torch.addmm,
    _aten.addcmul.default: torch.addcmul,
    _aten.mm.default: torch.mm,
    _aten.bmm.default: torch.bmm,
    _aten.cat.default: torch.cat,
    _aten.t.default: torch.t,
    _aten.split.Tensor: torch.unsafe_split,
}
"""The same operators by a shorter way: a call through the dispatcher's Python object costs about twice as much."""

_INTO: dict[Any, tuple[Any, str]] = {
    **{
        target: (quick, "out")
        for target, quick in _QUICK.items()
        if quick not in (torch.relu, torch.t, torch.rsub, torch.unsafe_split)
    },
    _aten.sigmoid_backward.default: (_aten.sigmoid_backward.grad_input, "grad_input"),
    _aten.tanh_backward.default: (_aten.tanh_backward.grad_input, "grad_input"),
}
"""Operators that can write their result into a given tensor: the function, and the argument's name."""


@dataclass(frozen=True)
class Loop:
    """A loop to be written. Nodes stand for their values in one step.

    `rows` come as one list per node with a value per step; `constants` are the same in all steps; `carried` are
    the values that go from step to step, with `ends` what they become; `saved` are kept for all steps: written into a
    row of a buffer where the operator can do that, or with `all_written`, else collected into a list. With `added`
    every carried value gets a value of the step added to it before it is read.
    """

    nodes: Sequence[fx.Node]
    constants: Sequence[fx.Node]
    rows: Sequence[fx.Node]
    carried: Sequence[fx.Node]
    ends: Sequence[fx.Node | None]
    saved: Sequence[fx.Node]
    backward: bool
    added: bool = False
    all_written: bool = False

    @cached_property
    def written(self) -> list[fx.Node]:
        """The saved nodes whose values are written into rows of a buffer."""
        inside = set(self.nodes)
        made = [node for node in self.saved if node in inside]
        if self.all_written:
            return [node for node in made if isinstance(node.meta.get("val"), Tensor)]
        return [node for node in made if node.target in _INTO and not node.kwargs]

    def compile(self) -> "CompiledLoop":
        """Write the source and make a function of it."""
        names: dict[str, Any] = {"zero": torch.zeros_like}
        lines = [f"    {_name(node)} = rows_{node}[step]" for node in self.rows]
        if self.added:
            lines += [f"    {_name(node)} = {_name(node)} + added_{node}[step]" for node in self.carried]
        written = self.written
        collected = [node for node in self.saved if node not in written]
        for index, node in enumerate(self.nodes):
            if node in written:
                names[f"op{index}"], into = _INTO[node.target]
                lines.append(f"    {_name(node)} = rows_{node}[step]")
                lines.append(f"    op{index}({_arguments(node, names)}, {into}={_name(node)})")
            else:
                names[f"op{index}"] = _QUICK.get(node.target, node.target)
                lines.append(f"    {_name(node)} = op{index}({_arguments(node, names)})")
        lines += [f"    save_{node}({_name(node)})" for node in collected]
        carried = [_name(each) for each in self.carried]
        ends = [f"zero({kept})" if end is None else _name(end) for kept, end in zip(carried, self.ends, strict=True)]
        if ends:
            lines.append(f"    {', '.join(carried)}, = {', '.join(ends)},")
        parameters = [_name(each) for each in self.constants] + carried
        parameters += [f"rows_{each}" for each in (*self.rows, *written)] + [f"save_{each}" for each in collected]
        parameters += [f"added_{each}" for each in self.carried] if self.added else []
        steps = "range(T - 1, -1, -1)" if self.backward else "range(T)"
        body = "\n".join(lines or ["    pass"])
        source = (
            f"def loop(T, {', '.join(parameters)}):\n  for step in {steps}:\n{body}\n  return [{', '.join(carried)}]\n"
        )
        exec(compile(source, "<recurrent loop>", "exec"), names)  # the source is made of our own names only
        return CompiledLoop(self, source, names["loop"])


@dataclass(frozen=True)
class CompiledLoop:
    """A loop as a function, and the source that it was made of."""

    loop: Loop
    source: str
    function: Callable[..., list[Tensor]]


def _name(node: fx.Node) -> str:
    """The variable that holds the node's value: a node may be called ``t``, or like a function of ours."""
    return f"v_{node}"


def _arguments(node: fx.Node, names: dict[str, Any]) -> str:
    """The arguments as source; what is neither node nor plain number gets a name."""

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return _name(value)
        if isinstance(value, list | tuple):
            return "[" + ", ".join(text(each) for each in cast("list[Any]", value)) + "]"
        if value is None or isinstance(value, bool | int):
            return repr(value)
        name = f"k{len(names)}"
        names[name] = value
        return name

    return ", ".join([*map(text, node.args), *(f"{key}={text(value)}" for key, value in node.kwargs.items())])


class SavedValues:
    """The values of one sequence, stacked (`bulk.env`) and step by step (`rows`): what backward needs of forward."""

    def __init__(self, bulk: BulkEvaluator, rows: dict[fx.Node, Sequence[Tensor]]) -> None:
        self.bulk = bulk
        self.rows = rows

    def copy(self) -> "SavedValues":
        """For one backward, which adds values of its own; the graph may be retained for another."""
        return SavedValues(replace(self.bulk, env=dict(self.bulk.env)), dict(self.rows))

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


class PythonBackend:
    """See `weft.recurrent.backends.Backend`: the parts of a captured step, and the two loops that are left of it."""

    def __init__(self, captured: StepGraph) -> None:
        self.captured = captured
        self.parts: DependencePartition = partition(captured)
        self._on = dependences(captured)
        self._step_bytes = _bytes(dict.fromkeys([*self.loop.loop.saved, *self.parts.before, *self.parts.after]))
        states = captured.signature.states
        shape = states[0].meta["val"].shape if states else ()
        self.chunk_steps = chunk_length(self._step_bytes, shape[0] if shape else 1)

    # -- a chunk: see `Backend` -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Nothing: constants are cheap next to a loop in Python."""

    def forward(self, constants: None, chunk: Chunk, keep: bool) -> SavedValues:
        """See `Backend`."""
        outputs, states, store = self.run_forward(chunk.inputs, self._first_states(chunk))
        _write(chunk.outputs, outputs)
        moving = [k for k in range(len(states)) if k not in self.captured.invariant]
        _write([chunk.states[k][1:] for k in moving], [states[k] for k in moving])
        return store

    def recompute(self, constants: None, chunk: Chunk) -> SavedValues:
        """See `Backend`; by Python, step by step as before."""
        return self.run_forward(chunk.inputs, self._first_states(chunk))[2]

    def backward(self, constants: None, chunk: Chunk, kept: SavedValues, gradients: Gradients) -> None:
        """See `Backend`."""
        states = None
        if any(each is not None for each in gradients.states):
            pairs = zip(gradients.carried, gradients.states, strict=True)
            states = [c.new_zeros(chunk.steps, *c.shape) if each is None else each for c, each in pairs]
        inputs, carried, parameters = self.run_backward(kept, gradients.outputs, states, gradients.carried)
        _write(gradients.carried, carried)
        for to, found in zip(gradients.inputs, inputs, strict=True):
            if to is not None and found is not None:
                to.copy_(found)
        for to, found in zip(gradients.parameters, parameters, strict=True):
            if to is not None and found is not None:
                to.add_(found)

    def release(self, kept: SavedValues) -> None:
        """Its memory goes with it."""

    def kept_bytes(self, steps: int) -> int:
        """See `Backend`."""
        return steps * self._step_bytes

    def work_bytes(self, steps: int) -> int:
        """See `Backend`: values of the backward loop and of what follows it, all steps at once."""
        back = [*self.parts.before_back, *self.parts.loop_back, *self.parts.after_back]
        return steps * _bytes([node for node in back if self.varies(node)])

    def explain(self) -> str:
        """See `Backend`; with the source of the loops."""
        return "\n\n".join([explain(self.captured), self.loop.source, self.loops_back[False].source])

    def _first_states(self, chunk: Chunk) -> list[Tensor]:
        return [each if k in self.captured.invariant else each[0] for k, each in enumerate(chunk.states)]

    # -- the two loops --------------------------------------------------------------------------------------------

    @cached_property
    def loop(self) -> CompiledLoop:
        """The forward loop. It saves the new states, the outputs, and what backward reads."""
        parts, signature = self.parts, self.captured.signature
        later = [*parts.after, *parts.before_back, *parts.loop_back, *parts.after_back]
        ends = [*signature.outputs, *signature.new_states]
        saved = _read_by(later, [*parts.loop, *signature.states], ends)
        return self._compiled(parts.loop, signature.states, signature.new_states, saved, backward=False)

    @cached_property
    def loops_back(self) -> tuple[CompiledLoop, CompiledLoop]:
        """The backward loop, without and with gradients that come from the states of all steps."""
        parts, signature = self.parts, self.captured.signature
        ends = [*signature.input_gradients, *signature.parameter_gradients]
        saved = _read_by(parts.after_back, [*parts.loop_back, *signature.new_state_gradients], ends)
        carried, back = signature.new_state_gradients, signature.state_gradients
        plain, given = (
            self._compiled(parts.loop_back, carried, back, saved, backward=True, given=given) for given in (False, True)
        )
        return plain, given

    def run_forward(
        self, inputs: Sequence[Tensor], states: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], SavedValues]:
        """Outputs and states after every step (T x ...), and what `run_backward` needs.

        `inputs` are the flat leaves, T x ..., T at least 1; `states` those of the initial state.
        """
        signature, parts = self.captured.signature, self.parts
        store = SavedValues(BulkEvaluator(len(inputs[0]), self.varies), {})
        env = store.bulk.env
        env.update(zip(signature.inputs, inputs, strict=True))
        env.update(self.captured.referred(signature.references))
        back = [*parts.before_back, *parts.loop_back, *parts.after_back]
        backward_ends = [*signature.input_gradients, *signature.state_gradients, *signature.parameter_gradients]
        ends = [*signature.outputs, *signature.new_states, *backward_ends]
        later = [*parts.before, *parts.loop, *parts.after, *back]
        store.bulk.evaluate(parts.once, _read_by(later, parts.once, ends))
        store.bulk.evaluate(parts.before, _read_by([*parts.loop, *parts.after, *back], parts.before, ends))
        new_states = [node for node in signature.new_states if node is not None]
        for k, first in enumerate(states):
            if new_states[k] is signature.states[k]:  # handed on as it is: one tensor stands for all steps
                env[signature.states[k]] = first.expand(store.bulk.steps, *first.shape)
        self._allocate(self.loop, store)
        self._run(self.loop, store, states)
        self._stack_for(parts.after, store)
        store.bulk.evaluate(parts.after, _read_by(back, parts.after, ends))
        outputs = [store.stacked(node) for node in signature.outputs if node is not None]
        return outputs, [store.stacked(node) for node in new_states], store

    def run_backward(
        self, store: SavedValues, outputs: Sequence[Tensor], states: Sequence[Tensor] | None, last: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], list[Tensor], list[Tensor | None]]:
        """The gradients of inputs (T x ...), initial states and parameters, out of those of outputs and states.

        `outputs` are T x ...; `states`, T x ..., are those of the states after every step, or None; `last` are
        those of the state after the last one.
        """
        signature, parts = self.captured.signature, self.parts
        store = store.copy()
        store.bulk.env.update(zip(signature.output_gradients, outputs, strict=True))
        ends = [*signature.state_gradients, *signature.input_gradients, *signature.parameter_gradients]
        self._stack_for(parts.before_back, store)
        store.bulk.evaluate(parts.before_back, _read_by([*parts.loop_back, *parts.after_back], parts.before_back, ends))
        loop = self.loops_back[states is not None]
        self._allocate(loop, store)
        carried = self._run(loop, store, last, states)
        self._stack_for(parts.after_back, store)
        inside, of_parameters = parts.after_back, list[Tensor | None]()
        wanted = [node for node in dict.fromkeys(signature.input_gradients) if node in inside]
        store.bulk.evaluate(inside, wanted)
        of_inputs = [None if node is None else store.stacked(node) for node in signature.input_gradients]
        for node in signature.parameter_gradients:
            if node is not None and node not in inside:
                store.stacked(node)
            of_parameters.append(None if node is None else store.bulk.summed(node, inside))
        return of_inputs, carried, of_parameters

    def compile(self, loop: Loop) -> CompiledLoop:
        """A loop as a function; other backends have other ways."""
        return loop.compile()

    def varies(self, node: fx.Node) -> bool:
        """Whether a value may differ from step to step."""
        return bool(self._on[node])

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
        rows = [node for node in outside if self.varies(node)]
        constants = [node for node in outside if not self.varies(node)]
        saved = [node for node in saved if node in inside]
        return self.compile(Loop(nodes, constants, rows, carried, ends, saved, backward, given))

    def _run(
        self,
        compiled: CompiledLoop,
        store: SavedValues,
        carried: Sequence[Tensor],
        given: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """The carried values after the last step; what the loop saves goes to the rows of `store`, in time order."""
        loop, env = compiled.loop, store.bulk.env
        saved: dict[fx.Node, list[Tensor]] = {node: [] for node in loop.saved if node not in loop.written}
        last = compiled.function(
            store.bulk.steps,
            *(env[node] for node in loop.constants),
            *carried,
            *(store.in_steps(node) for node in (*loop.rows, *loop.written)),
            *(each.append for each in saved.values()),
            *(each.unbind(0) for each in given or ()),
        )
        store.rows.update({node: each[::-1] if loop.backward else each for node, each in saved.items()})
        return last

    def _allocate(self, compiled: CompiledLoop, store: SavedValues) -> None:
        """Storage over time, T x ..., for what the loop writes."""
        device = store.bulk.env[self.captured.signature.inputs[0]].device
        for node in compiled.loop.written:
            value = node.meta["val"]
            buffer = torch.empty((store.bulk.steps, *value.shape), dtype=value.dtype, device=device)
            store.bulk.env[node], store.rows[node] = buffer, buffer.unbind(0)

    def _stack_for(self, nodes: Sequence[fx.Node], store: SavedValues) -> None:
        """Stack what these nodes read of the loops' values."""
        inside = set(nodes)
        for node in nodes:
            for each in node.all_input_nodes:
                if each not in inside and each in store.rows and each not in store.bulk.env:
                    store.stacked(each)


def _read_by(readers: Iterable[fx.Node], of: Sequence[fx.Node], ends: Iterable[Value]) -> list[fx.Node]:
    """The nodes among `of` that some reader reads, or that are an end."""
    read = {each for reader in readers for each in reader.all_input_nodes} | {end for end in ends if end is not None}
    return [node for node in of if node in read]


def _write(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into places; where states change places, a value may lie in the place of another."""
    taken = {place.untyped_storage().data_ptr() for place in places}
    values = [each.clone() if each.untyped_storage().data_ptr() in taken else each for each in values]
    for place, value in zip(places, values, strict=True):
        place.copy_(value)


def _bytes(nodes: Iterable[fx.Node]) -> int:
    values = [node.meta.get("val") for node in nodes]
    return sum(each.nbytes for each in values if isinstance(each, Tensor))
