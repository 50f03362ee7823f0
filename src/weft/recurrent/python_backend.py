"""The Python backend: bulk operators of PyTorch around two minimal loops, whose source is generated; no compiler.

    def loop(T, reference..., state..., row lists...):
        for step in range(T):
            v_x = rows_x[step]                       computed for all steps before the loop
            v_h = rows_h[step]                       read after the loop: a row of T x ...
            addmm(v_x, v_s, v_w, out=v_h)            the operators of this part, by PyTorch's own functions
            v_s = v_h                                new state to state
        return [v_s]

The source is generated once per plan, whatever T. The backward loop comes from the same generator, with `step` running
down.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, fx

from weft.recurrent.graph import StepGraph, Value
from weft.recurrent.plan_backends import Chunk, Gradients, chunk_length
from weft.recurrent.step_plan import BulkEvaluator, DependencePartition, dependences, explain, partition

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

    `constants` are the same in all steps; `carried` go from step to step, with `ends` what they become. `rows` are read
    and `saved` are left in one list per node with a tensor per step; for the saved nodes among `written` it holds rows
    to write to. With `added` every carried value gets a value of the step added to it before it is read.
    """

    nodes: Sequence[fx.Node]
    constants: Sequence[fx.Node]
    rows: Sequence[fx.Node]
    carried: Sequence[fx.Node]
    ends: Sequence[fx.Node | None]
    saved: Sequence[fx.Node]
    written: Sequence[fx.Node]
    backward: bool
    added: bool = False

    def compile(self) -> "CompiledLoop":
        """Write the source and make a function of it."""
        names: dict[str, Any] = {"zero": torch.zeros_like}
        lines = [f"    {_name(node)} = rows_{node}[step]" for node in self.rows]
        if self.added:
            lines += [f"    {_name(node)} = {_name(node)} + added_{node}[step]" for node in self.carried]
        lines += [f"    rows_{node}[step] = {_name(node)}" for node in self.saved if node in self.carried]
        for index, node in enumerate(self.nodes):
            value, arguments = _name(node), _arguments(node, names)
            if node in self.written:
                names[f"op{index}"], into = _INTO[node.target]
                lines += [f"    {value} = rows_{node}[step]", f"    op{index}({arguments}, {into}={value})"]
                continue
            names[f"op{index}"] = _QUICK.get(node.target, node.target)
            lines.append(f"    {value} = op{index}({arguments})")
            if node in self.saved:
                lines.append(f"    rows_{node}[step] = {value}")
        carried = [_name(each) for each in self.carried]
        ends = [f"zero({kept})" if end is None else _name(end) for kept, end in zip(carried, self.ends, strict=True)]
        if ends:
            lines.append(f"    {', '.join(carried)}, = {', '.join(ends)},")
        parameters = [*map(_name, self.constants), *carried, *(f"rows_{each}" for each in (*self.rows, *self.saved))]
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


class PythonBackend:
    """See `weft.recurrent.plan_backends.Backend`: the parts of a captured step, and the two loops that are left of
    it.
    """

    missing = 0

    def __init__(self, captured: StepGraph) -> None:
        self.captured = captured
        self.parts: DependencePartition = partition(captured)
        self._on = dependences(captured)
        self._invariant = {captured.signature.states[k] for k in captured.invariant}
        self._wanted = {each.name: self._read_after(each.name) for each in fields(self.parts)}
        self._step_bytes = _bytes(dict.fromkeys([*self.loop.loop.saved, *self.parts.before, *self.parts.after]))
        states = captured.signature.states
        shape = states[0].meta["val"].shape if states else ()
        self.chunk_steps = chunk_length(self._step_bytes, shape[0] if shape else 1)

    # -- a chunk: see `Backend` -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Nothing: constants are cheap next to a loop in Python."""

    def forward(self, constants: None, chunk: Chunk, keep: bool) -> BulkEvaluator:
        """See `Backend`."""
        outputs, states, kept = self.run_forward(chunk.inputs, self._first_states(chunk))
        _write(chunk.outputs, outputs)
        moving = [k for k in range(len(states)) if k not in self.captured.invariant]
        _write([chunk.states[k][1:] for k in moving], [states[k] for k in moving])
        return kept

    def recompute(self, constants: None, chunk: Chunk) -> BulkEvaluator:
        """See `Backend`; by Python, step by step as before."""
        return self.run_forward(chunk.inputs, self._first_states(chunk))[2]

    def backward(self, constants: None, chunk: Chunk, kept: BulkEvaluator, gradients: Gradients) -> None:
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

    def release(self, kept: BulkEvaluator) -> None:
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
        signature = self.captured.signature
        return self._compiled("loop", signature.states, signature.new_states)

    @cached_property
    def loops_back(self) -> tuple[CompiledLoop, CompiledLoop]:
        """The backward loop, without and with gradients that come from the states of all steps."""
        carried, back = self.captured.signature.new_state_gradients, self.captured.signature.state_gradients
        return self._compiled("loop_back", carried, back), self._compiled("loop_back", carried, back, given=True)

    def run_forward(
        self, inputs: Sequence[Tensor], states: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], BulkEvaluator]:
        """Outputs and states after every step (T x ...), and what `run_backward` needs.

        `inputs` are the flat leaves, T x ..., T at least 1; `states` those of the initial state.
        """
        signature, parts = self.captured.signature, self.parts
        bulk = BulkEvaluator(len(inputs[0]), self.varies)
        bulk.env.update(zip(signature.inputs, inputs, strict=True))
        bulk.env.update(self.captured.referred(signature.references))
        for node, first in zip(signature.states, states, strict=True):
            if node in self._invariant:  # one tensor stands for all steps
                bulk.env[node] = first.expand(bulk.steps, *first.shape)
        bulk.evaluate(parts.once, self._wanted["once"])
        bulk.evaluate(parts.before, self._wanted["before"])
        self._run(self.loop, bulk, states)
        bulk.evaluate(parts.after, self._wanted["after"])
        outputs, after = (
            [bulk.stacked(node) for node in nodes if node is not None]
            for nodes in (signature.outputs, signature.new_states)
        )
        return outputs, after, bulk

    def run_backward(
        self, kept: BulkEvaluator, outputs: Sequence[Tensor], states: Sequence[Tensor] | None, last: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], list[Tensor], list[Tensor | None]]:
        """The gradients of inputs (T x ...), initial states and parameters, out of those of outputs and states.

        `outputs` are T x ...; `states`, T x ..., are those of the states after every step, or None; `last` are
        those of the state after the last one. `kept` is unchanged: the graph may be retained for another backward.
        """
        signature, inside = self.captured.signature, self.parts.after_back
        bulk = replace(kept, env=dict(kept.env))
        bulk.env.update(zip(signature.output_gradients, outputs, strict=True))
        bulk.evaluate(self.parts.before_back, self._wanted["before_back"])
        carried = self._run(self.loops_back[states is not None], bulk, last, states)
        bulk.evaluate(inside, [node for node in dict.fromkeys(signature.input_gradients) if node in inside])
        of_inputs = [None if node is None else bulk.stacked(node) for node in signature.input_gradients]
        of_parameters = [None if node is None else bulk.summed(node, inside) for node in signature.parameter_gradients]
        return of_inputs, carried, of_parameters

    def compile(self, loop: Loop) -> CompiledLoop:
        """A loop as a function; other backends have other ways."""
        return loop.compile()

    def writes(self, node: fx.Node) -> bool:
        """Whether a loop writes the value into a row of T x ...; else the rows are stacked when all are there."""
        return node.target in _INTO and not node.kwargs

    def varies(self, node: fx.Node) -> bool:
        """Whether a value may differ from step to step."""
        return bool(self._on[node])

    def _read_after(self, name: str) -> list[fx.Node]:
        """The nodes of a part, and what its loop carries, that later parts read or that are results."""
        parts, signature = self.parts, self.captured.signature
        carried = {"loop": signature.states, "loop_back": signature.new_state_gradients}.get(name, ())
        nodes: list[fx.Node] = [*getattr(parts, name), *carried]
        names = [each.name for each in fields(parts)]
        later = [node for each in names[names.index(name) + 1 :] for node in getattr(parts, each)]
        ends = [*signature.outputs, *signature.new_states, *signature.input_gradients, *signature.parameter_gradients]
        ends += self.captured.checks
        if name != "loop_back":  # whose last ones are all that is asked for
            ends += signature.state_gradients
        read = {each for node in later for each in node.all_input_nodes} | {*ends}
        return [node for node in nodes if node in read and node not in self._invariant]

    def _compiled(
        self, name: str, carried: Sequence[fx.Node], ends: Sequence[Value], *, given: bool = False
    ) -> CompiledLoop:
        nodes: list[fx.Node] = getattr(self.parts, name)
        inside = {*nodes, *carried}
        readers = [each for node in nodes for each in node.all_input_nodes] + [end for end in ends if end is not None]
        outside = [each for each in dict.fromkeys(readers) if each not in inside]
        rows = [node for node in outside if self.varies(node)]
        constants = [node for node in outside if not self.varies(node)]
        saved, backward = self._wanted[name], name == "loop_back"
        written = [node for node in saved if self.writes(node)]
        return self.compile(Loop(nodes, constants, rows, carried, ends, saved, written, backward, given))

    def _run(
        self,
        compiled: CompiledLoop,
        bulk: BulkEvaluator,
        carried: Sequence[Tensor],
        given: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """The carried values after the last step; what the loop saves goes to `bulk`, T x ..."""
        loop, env = compiled.loop, bulk.env
        for node in loop.written:
            value = node.meta["val"]
            env[node] = torch.empty((bulk.steps, *value.shape), dtype=value.dtype, device=value.device)
        # A list of rows to write to, or of places: any tensor stands there until its step puts another.
        saved = [env[node].unbind(0) if node in loop.written else [carried[0]] * bulk.steps for node in loop.saved]
        last = compiled.function(
            bulk.steps,
            *(env[node] for node in loop.constants),
            *carried,
            *(env[node].unbind(0) for node in loop.rows),
            *saved,
            *(each.unbind(0) for each in given or ()),
        )
        env.update({n: torch.stack(rows) for n, rows in zip(loop.saved, saved, strict=True) if n not in loop.written})
        return last


def _write(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into places; where states change places, a value may lie in the place of another."""
    taken = {place.untyped_storage().data_ptr() for place in places}
    values = [each.clone() if each.untyped_storage().data_ptr() in taken else each for each in values]
    for place, value in zip(places, values, strict=True):
        place.copy_(value)


def _bytes(nodes: Iterable[fx.Node]) -> int:
    values = [node.meta.get("val") for node in nodes]
    return sum(each.nbytes for each in values if isinstance(each, Tensor))
