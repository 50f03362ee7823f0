"""A compiled program as an engine: memory by address, threads where they pay."""

from typing import cast

import torch
from torch import Tensor, fx

from weft.recurrent.bulk import Bulk
from weft.recurrent.captured import Captured
from weft.recurrent.engine import Chunk, Gradients, chunk_length
from weft.recurrent.native.packs import ALIGN, aligned
from weft.recurrent.native.program import Program, Routine
from weft.recurrent.parts import explain, leading_to
from weft.recurrent.workspace import pool, rounded

WORTH = 4e6
"""Operations of a chunk from which more than one thread pays: to be woken, and to meet, costs them microseconds."""


class NativeEngine:
    """See `weft.recurrent.engine.Engine`. Raises Unsupported and CompileError when it is made."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.program = Program(captured)
        self._saved = [_size(each) for each in self.program.build.saved]
        routines = (self.program.forward, self.program.again, self.program.backward)
        stacks = max(sum(each.bytes for each in routine.function.stacks) for routine in routines)
        states = captured.roles.states
        shape = states[0].meta["val"].shape if states else ()
        self._chunk = chunk_length(sum(self._saved) + stacks, shape[0] if shape else 1)
        self._made_once = [each for each in self.program.build.constants if each.op == "call_function"]
        once = leading_to(self._made_once)
        self._once = [node for node in captured.nodes if node in once]
        wanted = {*self.program.build.constants, *(each for node in self._once for each in node.all_input_nodes)}
        self._references = [node for node in captured.roles.references if node in wanted]

    def chunk_steps(self) -> int:
        """See `Engine`."""
        return self._chunk

    def begin(self) -> list[Tensor]:
        """The constants, contiguous."""
        captured = self.captured
        bulk = Bulk(1, lambda node: False)
        bulk.env.update({node: captured.reference(node).detach() for node in self._references})
        if self._once:
            with torch.no_grad():
                bulk.evaluate(self._once, self._made_once)
        return [cast(Tensor, bulk.env[node]).resolve_neg().contiguous() for node in self.program.build.constants]

    def forward(self, constants: list[Tensor], chunk: Chunk, keep: bool) -> Tensor | None:
        """See `Engine`."""
        kept = pool.take(self.kept_bytes(chunk.steps))
        self._call(self.program.forward, constants, chunk, kept, None)
        if keep:
            return kept
        pool.give(kept)
        return None

    def again(self, constants: list[Tensor], chunk: Chunk) -> Tensor:
        """See `Engine`."""
        kept = pool.take(self.kept_bytes(chunk.steps))
        self._call(self.program.again, constants, chunk, kept, None)
        return kept

    def backward(self, constants: list[Tensor], chunk: Chunk, kept: Tensor, gradients: Gradients) -> None:
        """See `Engine`. A carried gradient has two rows, of which a step reads one and writes the other."""
        carried = [each.new_empty(2, *each.shape) if each.is_floating_point() else each for each in gradients.carried]
        for pair, given in zip(carried, gradients.carried, strict=True):
            if given.is_floating_point():
                pair[chunk.steps & 1].copy_(given)
        held = Gradients(gradients.outputs, gradients.states, carried, gradients.inputs, gradients.parameters)
        self._call(self.program.backward, constants, chunk, kept, held)
        for pair, given in zip(carried, gradients.carried, strict=True):
            if given.is_floating_point():
                given.copy_(pair[0])

    def release(self, kept: Tensor) -> None:
        """See `Engine`."""
        pool.give(kept)

    def kept_bytes(self, steps: int) -> int:
        """See `Engine`."""
        return rounded(sum(aligned(each * steps) for each in self._saved) + ALIGN)

    def work_bytes(self, steps: int) -> int:
        """See `Engine`."""
        threads = torch.get_num_threads()
        routines = (self.program.forward, self.program.again, self.program.backward)
        return rounded(max(routine.emitter.workspace(steps, threads) for routine in routines))

    def explain(self) -> str:
        """See `Engine`."""
        return explain(self.captured) + "\n\n" + self.program.explain(self._chunk)

    def _call(
        self, routine: Routine, constants: list[Tensor], chunk: Chunk, kept: Tensor, gradients: Gradients | None
    ) -> None:
        steps = chunk.steps
        offsets: list[int] = []
        at = -kept.data_ptr() % ALIGN
        for each in self._saved:
            offsets.append(kept.data_ptr() + at)
            at += aligned(each * steps)
        tables: dict[str, list[Tensor] | list[Tensor | None]] = {
            "x": chunk.inputs,
            "h": chunk.states,
            "y": chunk.outputs,
            "c": constants,
        }
        if gradients is not None:
            tables |= {
                "dy": gradients.outputs,
                "dh": gradients.carried,
                "a": gradients.states,
                "dx": gradients.inputs,
                "dp": gradients.parameters,
            }
        addresses = [
            offsets[index] if kind == "v" else _address(tables[kind][index]) for kind, index in routine.arguments
        ]
        threads = torch.get_num_threads() if routine.work * steps > WORTH else 1
        work = pool.take(self.work_bytes(steps), "work")  # of one size for all routines, so that they share it
        routine.call(steps, threads, addresses, work)
        pool.give(work, "work")


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _size(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.element_size()
