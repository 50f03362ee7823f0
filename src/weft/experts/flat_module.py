"""A user's module as a function of flat tensors, which runs forward and backward without touching ``.grad``.

    flat inputs ── pack ──> module(*args, **kwargs) ── check, flatten ──> flat outputs
         |                                                                     |
    their gradients, and those of the parameters <── Tape.backward <── gradients of the outputs

``outputs.backward()`` would be shorter, but accumulates into ``.grad`` while the batch can still fail. A segment
returns all gradients as values, so a failed batch is dropped by dropping them. The module can call other experts. Their
errors become a ``RuntimeError``, because clients retry some errors of an expert, and must not retry these.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.context import ExecutionContext, on_device
from weft.core.errors import SpecError, listed
from weft.core.segment import MicroBatchContext, Segment
from weft.experts.errors import ExpertError, WireError
from weft.experts.graph_cache import ForwardGraph
from weft.experts.schema import NestedSchema, infer_outputs
from weft.experts.side_effects import SideEffects

_LARGE = 1 << 20  # bytes: the allocator keeps smaller blocks by itself


class FlatModule:
    """The module of one expert between its schemas. ``outputs_schema``: the user's, or None. Guarded by the expert."""

    def __init__(
        self, name: str, module: nn.Module, effects: SideEffects, call: NestedSchema, outputs_schema: Any
    ) -> None:
        self.effects = effects
        self.call = call
        self._module = module
        self._ambient = ExecutionContext.capture([effects.device.type])
        self._segment = Segment(self._flat_outputs)
        self._large_gradients: list[Tensor] = []
        self.outputs = infer_outputs(name, call, outputs_schema, effects.device, self._rehearse)

    def run_forward(self, inputs: Sequence[Tensor], seed: int) -> Sequence[Tensor]:
        """The flat outputs, without a graph."""
        return self._call_guarded(self._segment.forward, self._context(seed, inputs), inputs, "nothing")[0]

    def make_graph(
        self, inputs: Sequence[Tensor], seed: int, parameters: Sequence[Tensor]
    ) -> tuple[ForwardGraph, list[Tensor]]:
        """The graph that leads back to inputs and parameters, and the flat outputs without it."""
        pairs = zip(inputs, self.call.specs, strict=True)
        leaves = [tensor.detach().requires_grad_(spec.requires_grad) for tensor, spec in pairs]
        segment = Segment(self._flat_outputs, parameters)
        outputs, tape = self._call_guarded(segment.forward, self._context(seed, leaves), leaves, "graph")
        flat = [output.detach() for output in outputs]
        return ForwardGraph(tape, leaves, [output.shape for output in flat], seed), flat

    def walk_back(self, graph: ForwardGraph, gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
        """The gradients of inputs and parameters. Those of the parameters can share memory with other tensors."""
        faults = [  # of the free axes only: the pool has checked the fixed ones
            f"the gradient of {name} has shape {tuple(gradient.shape)}, wanted {tuple(shape)}"
            for name, shape, gradient in zip(self.outputs.names, graph.shapes, gradients, strict=True)
            if shape != gradient.shape
        ]
        if faults:
            raise SpecError(listed("the gradients do not fit the outputs:", faults))
        seeds = [[gradient] for gradient in gradients]
        of_inputs, of_parameters = self._call_guarded(self.effects.run_backward, graph.seed, graph.tape.backward, seeds)
        if self.effects.device.type == "cpu":
            # Hold large gradients until the next batch has its own. Otherwise the allocator returns their pages to the
            # system between two batches, and every batch pays the page faults again.
            dense = [g for g in of_parameters if g is not None and g.layout is torch.strided]
            self._large_gradients = [gradient for gradient in dense if gradient.nbytes >= _LARGE]
        pairs = zip(of_inputs, graph.leaves, strict=True)
        filled = [torch.zeros_like(leaf) if gradient is None else gradient for (gradient,), leaf in pairs]
        return filled, of_parameters

    def _call_guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except (ExpertError, WireError) as error:
            raise RuntimeError(f"{type(error).__qualname__}: {error}") from error

    def _context(self, seed: int, inputs: Sequence[Tensor]) -> MicroBatchContext:
        return MicroBatchContext(0, self._ambient, (seed, inputs[0].shape[0]))

    def _flat_outputs(self, context: MicroBatchContext, *inputs: Tensor) -> tuple[Tensor, ...]:
        seed, rows = context.random
        return tuple(self.outputs.flatten_outputs(self.effects.run_forward(seed, self._call_module, inputs), rows))

    def _call_module(self, inputs: Sequence[Tensor]) -> Any:
        if torch.is_grad_enabled() and self.effects.writes:
            # Autograd forbids in-place writes to a leaf that requires a gradient, so the module gets copies.
            inputs = [x.clone() if i in self.effects.writes else x for i, x in enumerate(inputs)]
        args, kwargs = self.call.pack(inputs)
        return self._module(*args, **kwargs)

    def _rehearse(self, inputs: list[Tensor]) -> Any:
        """Outputs of the dummy run, which changes nothing but the recorded knowledge of side effects."""

        def forward() -> Any:
            with torch.no_grad(), on_device(self.effects.device), self._ambient.casting():
                return self._call_module(inputs)

        return self.effects.rehearse(inputs, forward)
