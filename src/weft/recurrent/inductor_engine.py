"""A plan whose loops are compiled by Inductor, as an engine; on CUDA a whole chunk is one recorded graph of kernels.

    CPU      bulk operators | compiled step, L times | bulk operators
    CUDA     the same, recorded once for each length L of a chunk, and replayed

    forward recording    inputs, first states  ->  outputs, states, trail     the trail is copied out: the next chunk
    backward recording   inputs, trail, gradients  ->  gradients              uses the same memory again

The parts, the memory and the sums after the loop are the plan's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from weft.recurrent.bulk import Bulk
from weft.recurrent.captured import Captured
from weft.recurrent.code import CompiledLoop, Loop
from weft.recurrent.engine import Chunk, Gradients
from weft.recurrent.inductor_loop import InductorLoop
from weft.recurrent.plan import Plan, Trail
from weft.recurrent.python_engine import PythonEngine, first_states, state_gradients, take, write
from weft.recurrent.recording import Recorder, Recording, Recordings, cuda_recorder


class InductorPlan(Plan):
    """A plan whose steps are compiled."""

    def compile(self, loop: Loop) -> CompiledLoop:
        """See `Plan`."""
        return InductorLoop.of(loop)


@dataclass(frozen=True)
class _Copied:
    """What a recorded forward left, out of reach of the next one."""

    values: dict[fx.Node, Tensor]


class InductorEngine:
    """See `weft.recurrent.engine.Engine`. `record` is how a chunk is recorded; None runs it step by step."""

    def __init__(self, captured: Captured, record: Recorder | None = None) -> None:
        self.captured = captured
        self._plan = InductorPlan(captured)
        self._plain = PythonEngine(captured, self._plan)
        self._record = cuda_recorder if record is None and _on_cuda(captured) else record
        self._forwards, self._backwards = Recordings(), Recordings()
        self._still = captured.passing
        self._moving = [k for k in range(len(captured.roles.states)) if k not in self._still]
        self._nodes: list[fx.Node] = []
        self._once: list[fx.Node] = []
        self._why_not = ""

    def chunk_steps(self) -> int:
        """See `Engine`."""
        return self._plain.chunk_steps()

    def begin(self) -> None:
        """Nothing: constants are cheap next to the loop."""

    def forward(self, constants: None, chunk: Chunk, keep: bool) -> "Trail | _Copied":
        """See `Engine`."""
        recording = self._forward(chunk)
        if recording is None:
            return self._plain.forward(constants, chunk, keep)
        found = recording.run(self._given(chunk))
        write([*chunk.outputs, *(chunk.states[k][1:] for k in self._moving)], found[: self._made(chunk)])
        return self._copied(chunk, found) if keep else _Copied({})

    def again(self, constants: None, chunk: Chunk) -> "Trail | _Copied":
        """See `Engine`; the chunk's outputs and states are not written to."""
        recording = self._forward(chunk)
        if recording is None:
            return self._plain.again(constants, chunk)
        return self._copied(chunk, recording.run(self._given(chunk)))

    def backward(self, constants: None, chunk: Chunk, kept: "Trail | _Copied", gradients: Gradients) -> None:
        """See `Engine`."""
        recording = None if isinstance(kept, Trail) else self._backward(chunk, kept, gradients)
        if recording is None or isinstance(kept, Trail):
            trail = kept if isinstance(kept, Trail) else self._trail(chunk.steps, self._given(chunk), kept.values)
            self._plain.backward(constants, chunk, trail, gradients)
            return
        found = iter(recording.run(self._given_back(chunk, kept, gradients)))
        roles = self.captured.roles
        inputs = [None if node is None else next(found) for node in roles.input_gradients]
        write(gradients.carried, [next(found) for _ in gradients.carried])
        parameters = [None if node is None else next(found) for node in roles.parameter_gradients]
        take(gradients, inputs, parameters)

    def release(self, kept: "Trail | _Copied") -> None:
        """Its memory goes with it."""

    def kept_bytes(self, steps: int) -> int:
        """See `Engine`."""
        return self._plain.kept_bytes(steps)

    def work_bytes(self, steps: int) -> int:
        """See `Engine`; a recording has its own copy of what is kept, and of what comes in and goes out."""
        copies = 0 if self._record is None else 2 * self.kept_bytes(steps)
        return self._plain.work_bytes(steps) + copies

    def explain(self) -> str:
        """See `Engine`."""
        how = "step by step" if self._record is None else "a chunk at a time, recorded"
        return f"{self._plain.explain()}\n\nlaunched {how}{self._why_not}"

    # -- recordings -------------------------------------------------------------------------------------------------

    def _forward(self, chunk: Chunk) -> Recording | None:
        roles, count = self.captured.roles, len(chunk.inputs)
        given = {*roles.inputs, *roles.references, *(roles.states[k] for k in self._still)}

        def function(values: list[Tensor]) -> list[Tensor]:
            outputs, states, trail = self._plan.forward(values[:count], values[count:])
            env = trail.bulk.env
            for node in trail.rows:
                trail.stacked(node)
            self._nodes = [node for node in env if node not in given and self._plan.varies(node)]
            self._once = [node for node in env if node not in given and not self._plan.varies(node)]
            return [*outputs, *(states[k][1:] for k in self._moving), *(env[node] for node in self._nodes)]

        return self._recorded(self._forwards, self._key(chunk), self._given(chunk), function)

    def _backward(self, chunk: Chunk, kept: _Copied, gradients: Gradients) -> Recording | None:
        nodes, steps = list(kept.values), chunk.steps
        with_states = any(each is not None for each in gradients.states)
        sizes = [len(self._given(chunk)), len(nodes), len(gradients.outputs), len(gradients.carried)]

        def function(values: list[Tensor]) -> list[Tensor]:
            rest = iter(values)
            given, found, outputs, carried = ([next(rest) for _ in range(size)] for size in sizes)
            states = list(rest) if with_states else None
            trail = self._trail(steps, given, dict(zip(nodes, found, strict=True)))
            inputs, last, parameters = self._plan.backward(trail, outputs, states, carried)
            return [each for each in (*inputs, *last, *parameters) if each is not None]

        key = (*self._key(chunk), with_states)
        return self._recorded(self._backwards, key, self._given_back(chunk, kept, gradients), function)

    def _recorded(
        self,
        known: Recordings,
        key: tuple[int | bool, ...],
        like: list[Tensor],
        function: Callable[[list[Tensor]], list[Tensor]],
    ) -> Recording | None:
        """None where nothing is recorded, or cannot be."""
        record = self._record
        if record is None:
            return None
        try:
            return known.get(key, lambda: Recording.of(record, like, function))
        except RuntimeError as error:
            self._record, self._why_not = None, f", since it could not be recorded: {error}"
            return None

    def _key(self, chunk: Chunk) -> tuple[int | bool, ...]:
        """What a recording depends on: its length, and where the cell's tensors lie."""
        captured = self.captured
        return (chunk.steps, *(captured.reference(node).data_ptr() for node in captured.roles.references))

    def _given(self, chunk: Chunk) -> list[Tensor]:
        return [*chunk.inputs, *first_states(chunk, self._still)]

    def _made(self, chunk: Chunk) -> int:
        """How many outputs and states a recorded forward gives, before the trail."""
        return len(chunk.outputs) + len(self._moving)

    def _given_back(self, chunk: Chunk, kept: _Copied, gradients: Gradients) -> list[Tensor]:
        values = [*self._given(chunk), *kept.values.values(), *gradients.outputs, *gradients.carried]
        return [*values, *(state_gradients(chunk, gradients) or [])]

    def _copied(self, chunk: Chunk, found: list[Tensor]) -> _Copied:
        """The trail out of what a recorded forward gave."""
        values = zip(self._nodes, found[self._made(chunk) :], strict=True)
        return _Copied({node: value.clone(memory_format=torch.contiguous_format) for node, value in values})

    def _trail(self, steps: int, given: Sequence[Tensor], values: dict[fx.Node, Tensor]) -> Trail:
        """A trail of these values, as a forward would have left it."""
        roles = self.captured.roles
        trail = Trail(Bulk(steps, self._plan.varies), {})
        count = len(roles.inputs)
        env = trail.bulk.env
        env.update(zip(roles.inputs, given[:count], strict=True))
        env.update({node: self.captured.reference(node).detach() for node in roles.references})
        env.update({roles.states[k]: given[count + k].expand(steps, *given[count + k].shape) for k in self._still})
        env.update(values)
        trail.bulk.evaluate(self._plan.parts.once, self._once)
        return trail


def _on_cuda(captured: Captured) -> bool:
    nodes = [*captured.roles.inputs, *captured.roles.states]
    values = [node.meta.get("val") for node in nodes]
    return bool(values) and all(isinstance(each, torch.Tensor) and each.is_cuda for each in values)
