"""The Python backend: bulk operators of PyTorch around two minimal loops, whose source is generated. No compiler.

    def loop(T, reference..., state..., row lists...):
        for step in range(T):
            v_x = rows_x[step]                       computed for all steps before the loop
            v_h = rows_h[step]                       read after the loop: a row of T x ...
            addmm(v_x, v_s, v_w, out=v_h)            the operators of this part, by PyTorch's own functions
            v_s = v_h                                new state to state
        return [v_s]

Interpreting the graph in each step would be simpler, but its bookkeeping per operator costs about as much as a small
operator. The source is generated once per plan, for any T. The backward loop comes from the same generator, with `step`
running down.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, fx

from torchweft.recurrent.graph import StepGraph, Value
from torchweft.recurrent.plan_backends import Chunk, Gradients, chunk_length
from torchweft.recurrent.step_plan import BulkEvaluator, DependencePartition, dependences, explain, partition

_aten = cast(Any, torch.ops.aten)
# The same operators as direct functions. A call through the dispatcher's Python object costs about twice as much.
_QUICK: dict[Any, Callable[..., Any]] = {
    **{getattr(_aten, name).Tensor: getattr(torch, name) for name in ("add", "sub", "mul", "div")},
    **{
        getattr(_aten, name).default: getattr(torch, name)
        for name in ("sigmoid", "tanh", "exp", "neg", "relu", "addmm", "addcmul", "mm", "bmm", "cat", "t")
    },
    _aten.rsub.Scalar: torch.rsub,
    _aten.split.Tensor: torch.unsafe_split,
}

# Operators that can write their result into a given tensor: the function, and the argument's name.
_INTO: dict[Any, tuple[Any, str]] = {
    **{
        target: (quick, "out")
        for target, quick in _QUICK.items()
        if quick not in (torch.relu, torch.t, torch.rsub, torch.unsafe_split)
    },
    _aten.sigmoid_backward.default: (_aten.sigmoid_backward.grad_input, "grad_input"),
    _aten.tanh_backward.default: (_aten.tanh_backward.grad_input, "grad_input"),
}


@dataclass(frozen=True)
class Loop:
    """A loop to generate. Nodes stand for their values in one step."""

    # `constants` are the same in all steps. `rows` are read from lists with a tensor per step. `carried` are passed
    # from step to step and become `ends`. `saved` are left in a list per node. For those also in `written`, it holds
    # rows to write to. With `added`, every carried value gets a value of the step added to it before it is read.

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
        names: dict[str, Any] = {"zero": torch.zeros_like}
        lines = [f"    {_variable(node)} = rows_{node}[step]" for node in self.rows]
        if self.added:
            lines += [f"    {_variable(node)} = {_variable(node)} + added_{node}[step]" for node in self.carried]
        lines += [f"    rows_{node}[step] = {_variable(node)}" for node in self.saved if node in self.carried]
        for index, node in enumerate(self.nodes):
            value, arguments = _variable(node), _argument_source(node, names)
            if node in self.written:
                names[f"op{index}"], into = _INTO[node.target]
                lines += [f"    {value} = rows_{node}[step]", f"    op{index}({arguments}, {into}={value})"]
                continue
            names[f"op{index}"] = _QUICK.get(node.target, node.target)
            lines.append(f"    {value} = op{index}({arguments})")
            if node in self.saved:
                lines.append(f"    rows_{node}[step] = {value}")
        carried = [_variable(node) for node in self.carried]
        ends = [f"zero({old})" if end is None else _variable(end) for old, end in zip(carried, self.ends, strict=True)]
        if ends:
            # One assignment for all, because states can swap places.
            lines.append(f"    {', '.join(carried)}, = {', '.join(ends)},")
        parameters = [*map(_variable, self.constants), *carried]
        parameters += [f"rows_{node}" for node in (*self.rows, *self.saved)]
        parameters += [f"added_{node}" for node in self.carried] if self.added else []
        steps = "range(T - 1, -1, -1)" if self.backward else "range(T)"
        body = "\n".join(lines or ["    pass"])
        source = (
            f"def loop(T, {', '.join(parameters)}):\n  for step in {steps}:\n{body}\n  return [{', '.join(carried)}]\n"
        )
        exec(compile(source, "<recurrent loop>", "exec"), names)  # the source contains only names generated here
        return CompiledLoop(self, source, names["loop"])


@dataclass(frozen=True)
class CompiledLoop:
    """A loop as a function, with its source."""

    loop: Loop
    source: str
    function: Callable[..., list[Tensor]]


def _variable(node: fx.Node) -> str:
    return f"v_{node}"  # a prefix, because a node can have the name of a function or parameter of the loop


def _argument_source(node: fx.Node, names: dict[str, Any]) -> str:
    # The arguments as source. A value that is not a node or a plain number is added to `names`.

    def source_of(value: Any) -> str:
        if isinstance(value, fx.Node):
            return _variable(value)
        if isinstance(value, list | tuple):
            return "[" + ", ".join(map(source_of, cast("list[Any]", value))) + "]"
        if value is None or isinstance(value, bool | int):
            return repr(value)
        name = f"k{len(names)}"
        names[name] = value
        return name

    named = (f"{key}={source_of(value)}" for key, value in node.kwargs.items())
    return ", ".join([*map(source_of, node.args), *named])


class PythonBackend:
    """See `weft.recurrent.plan_backends.Backend`: the parts of a captured step, with its two loops as functions."""

    missing = 0

    def __init__(self, captured: StepGraph) -> None:
        self.captured = captured
        self.parts: DependencePartition = partition(captured)
        self._on = dependences(captured)
        self._invariant = {captured.signature.states[k] for k in captured.invariant}
        self._read_later = {part.name: self._nodes_read_after(part.name) for part in fields(self.parts)}
        values = dict.fromkeys([*self.loop.loop.saved, *self.parts.before, *self.parts.after])
        self._step_bytes = _bytes_of(values)
        states = captured.signature.states
        shape = states[0].meta["val"].shape if states else ()
        self.chunk_steps = chunk_length(self._step_bytes, shape[0] if shape else 1)

    def begin(self) -> None:
        """None, because constants are cheap compared with a loop in Python."""

    def forward(self, constants: None, chunk: Chunk, keep: bool) -> BulkEvaluator:
        outputs, states, kept = self.run_forward(chunk.inputs, self._first_states(chunk))
        copy_into(chunk.outputs, outputs)
        moving = [k for k in range(len(states)) if k not in self.captured.invariant]
        copy_into([chunk.states[k][1:] for k in moving], [states[k] for k in moving])
        return kept

    def recompute(self, constants: None, chunk: Chunk) -> BulkEvaluator:
        """See `Backend`. Runs the loop again, although all states are known."""
        return self.run_forward(chunk.inputs, self._first_states(chunk))[2]

    def backward(self, constants: None, chunk: Chunk, kept: BulkEvaluator, gradients: Gradients) -> None:
        states = None
        if any(gradient is not None for gradient in gradients.states):
            pairs = zip(gradients.carried, gradients.states, strict=True)
            states = [c.new_zeros(chunk.steps, *c.shape) if grad is None else grad for c, grad in pairs]
        inputs, carried, parameters = self.run_backward(kept, gradients.outputs, states, gradients.carried)
        copy_into(gradients.carried, carried)
        for buffer, gradient in zip(gradients.inputs, inputs, strict=True):
            if buffer is not None and gradient is not None:
                buffer.copy_(gradient)
        for total, gradient in zip(gradients.parameters, parameters, strict=True):
            if total is not None and gradient is not None:
                total.add_(gradient)

    def release(self, kept: Any) -> None:
        """Nothing to do, because the memory is freed with `kept`."""

    def kept_bytes(self, steps: int) -> int:
        return steps * self._step_bytes

    def work_bytes(self, steps: int) -> int:
        """See `Backend`: values of the backward loop and of the part after it, all steps at once."""
        back = [*self.parts.before_back, *self.parts.loop_back, *self.parts.after_back]
        return steps * _bytes_of([node for node in back if self.varies(node)])

    def explain(self) -> str:
        """See `Backend`. Includes the source of the loops."""
        return "\n\n".join([explain(self.captured), self.loop.source, self.loops_back[False].source])

    def _first_states(self, chunk: Chunk) -> list[Tensor]:
        return [state if k in self.captured.invariant else state[0] for k, state in enumerate(chunk.states)]

    @cached_property
    def loop(self) -> CompiledLoop:
        """The forward loop. It saves the new states, the outputs, and the values that backward reads."""
        signature = self.captured.signature
        return self._compile_part("loop", signature.states, signature.new_states)

    @cached_property
    def loops_back(self) -> tuple[CompiledLoop, CompiledLoop]:
        """The backward loop, without and with gradients that come from the states of all steps."""
        carried, back = self.captured.signature.new_state_gradients, self.captured.signature.state_gradients
        without = self._compile_part("loop_back", carried, back)
        return without, self._compile_part("loop_back", carried, back, added=True)

    def run_forward(
        self, inputs: Sequence[Tensor], states: Sequence[Tensor], references: Mapping[fx.Node, Tensor] | None = None
    ) -> tuple[list[Tensor], list[Tensor], BulkEvaluator]:
        """Outputs and states after every step (T x ...), and the values that `run_backward` reads."""
        # `inputs` are the flat leaves, T x ..., T at least 1; `states` those of the initial state. `references` are
        # the tensors that the cell reads, if not its own.
        signature, parts = self.captured.signature, self.parts
        bulk = BulkEvaluator(len(inputs[0]), self.varies)
        bulk.env.update(zip(signature.inputs, inputs, strict=True))
        bulk.env.update(self.captured.referred(signature.references) if references is None else references)
        for node, first in zip(signature.states, states, strict=True):
            if node in self._invariant:  # one tensor stands for all steps
                bulk.env[node] = first.expand(bulk.steps, *first.shape)
        bulk.evaluate(parts.once, self._read_later["once"])
        bulk.evaluate(parts.before, self._read_later["before"])
        self._run_loop(self.loop, bulk, states)
        bulk.evaluate(parts.after, self._read_later["after"])
        outputs, after = (
            [bulk.stacked(node) for node in nodes if node is not None]
            for nodes in (signature.outputs, signature.new_states)
        )
        return outputs, after, bulk

    def run_backward(
        self, kept: BulkEvaluator, outputs: Sequence[Tensor], states: Sequence[Tensor] | None, last: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], list[Tensor], list[Tensor | None]]:
        """The gradients of inputs (T x ...), initial states and parameters, from those of outputs and states."""
        # `outputs` are T x ...; `states`, T x ..., are those of the states after every step, or None; `last` are those
        # of the state after the last one.
        signature, inside = self.captured.signature, self.parts.after_back
        # A copy of the table, so that `kept` can serve another backward of a retained graph.
        bulk = replace(kept, env=dict(kept.env))
        bulk.env.update(zip(signature.output_gradients, outputs, strict=True))
        bulk.evaluate(self.parts.before_back, self._read_later["before_back"])
        carried = self._run_loop(self.loops_back[states is not None], bulk, last, states)
        bulk.evaluate(inside, [node for node in dict.fromkeys(signature.input_gradients) if node in inside])
        of_inputs = [None if node is None else bulk.stacked(node) for node in signature.input_gradients]
        of_parameters = [None if node is None else bulk.summed(node, inside) for node in signature.parameter_gradients]
        return of_inputs, carried, of_parameters

    def varies(self, node: fx.Node) -> bool:
        """Whether a value can differ from step to step."""
        return bool(self._on[node])

    def _nodes_read_after(self, name: str) -> list[fx.Node]:
        # The nodes of a part, and the values carried by its loop, that later parts read or that are results.
        parts, signature = self.parts, self.captured.signature
        carried = {"loop": signature.states, "loop_back": signature.new_state_gradients}.get(name, ())
        nodes: list[fx.Node] = [*getattr(parts, name), *carried]
        names = [part.name for part in fields(parts)]
        later = [node for other in names[names.index(name) + 1 :] for node in getattr(parts, other)]
        ends = [*signature.outputs, *signature.new_states, *signature.input_gradients, *signature.parameter_gradients]
        ends += self.captured.checks
        # Of the state gradients only the last ones are results. The backward loop returns those, without rows.
        if name != "loop_back":
            ends += signature.state_gradients
        read = {operand for node in later for operand in node.all_input_nodes} | {*ends}
        return [node for node in nodes if node in read and node not in self._invariant]

    def _compile_part(
        self, name: str, carried: Sequence[fx.Node], ends: Sequence[Value], *, added: bool = False
    ) -> CompiledLoop:
        nodes: list[fx.Node] = getattr(self.parts, name)
        inside = {*nodes, *carried}
        read = [operand for node in nodes for operand in node.all_input_nodes] + [
            end for end in ends if end is not None
        ]
        outside = [node for node in dict.fromkeys(read) if node not in inside]
        rows = [node for node in outside if self.varies(node)]
        constants = [node for node in outside if not self.varies(node)]
        saved, backward = self._read_later[name], name == "loop_back"
        # These are written into a row of T x ... The rows of the others are stacked after the loop.
        written = [node for node in saved if node.target in _INTO and not node.kwargs]
        return Loop(nodes, constants, rows, carried, ends, saved, written, backward, added).compile()

    def _run_loop(
        self,
        compiled: CompiledLoop,
        bulk: BulkEvaluator,
        carried: Sequence[Tensor],
        added: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """The carried values after the last step. The values that the loop saves go to `bulk`, T x ..."""
        loop, env = compiled.loop, bulk.env
        for node in loop.written:
            value = node.meta["val"]
            env[node] = torch.empty((bulk.steps, *value.shape), dtype=value.dtype, device=value.device)
        # Per node a list of rows to write to, or a list whose entries the steps replace and any tensor can fill.
        saved = [env[node].unbind(0) if node in loop.written else [carried[0]] * bulk.steps for node in loop.saved]
        last = compiled.function(
            bulk.steps,
            *(env[node] for node in loop.constants),
            *carried,
            *(env[node].unbind(0) for node in loop.rows),
            *saved,
            *(values.unbind(0) for values in added or ()),
        )
        env.update({n: torch.stack(rows) for n, rows in zip(loop.saved, saved, strict=True) if n not in loop.written})
        return last


def copy_into(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into places that can overlap with them."""
    # If a cell swaps two states, each value lies in the place of the other. Clone it before the first copy.
    taken = {place.untyped_storage().data_ptr() for place in places}
    values = [value.clone() if value.untyped_storage().data_ptr() in taken else value for value in values]
    for place, value in zip(places, values, strict=True):
        place.copy_(value)


def _bytes_of(nodes: Iterable[fx.Node]) -> int:
    values = [node.meta.get("val") for node in nodes]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))
