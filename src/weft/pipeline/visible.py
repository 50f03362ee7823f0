"""The same micro-batches and stages with the whole graph left visible to autograd.

Nothing is cut out, so gradients of gradients work (``executor="graph"``), and nothing is paid for cuts where none is
needed (see `weft.pipeline.layout`). It is serial, and a schedule means nothing to it: autograd decides the order
of backward. Random numbers and results are those of the other executors.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

from torch import Tensor
from torch.utils import checkpoint as checkpointing

from weft.core.ambient import Ambient, Phase, phase
from weft.core.boundary import current_task, forbid_double, keeps_graph
from weft.core.errors import TWICE, BackwardTwiceError, advise
from weft.core.rng import Dice, Silence
from weft.core.segment import Function, Keep, Visit
from weft.core.transforms import forbid_batched
from weft.core.tree import Structure, flatten, unflatten
from weft.pipeline.cargo import Cargo, Outcome
from weft.pipeline.plan import Plan
from weft.pipeline.step import Order

_checkpoint = cast("Callable[..., tuple[Any, ...]]", checkpointing.checkpoint)

Keeps = Callable[[int, int], Keep]


def run_visible(order: Order, ambient: Ambient, *, enter: bool = True) -> Any:
    """The output, or where the loss is inside the loss, of a mini-batch, with its graph.

    Without `enter` it runs in the surroundings that it is called in.
    """

    def forward(dice: Dice) -> list[Any]:
        with _inside(ambient) if enter else nullcontext():
            return _micro_batches(order.plan, order.cargo, order.keeps, ambient, dice)

    return order.outcome.visible(order.trusted(forward))


def run_silent(plan: Plan, cargo: Cargo, outcome: Outcome, ambient: Ambient, silence: Silence) -> tuple[Any] | None:
    """As `run_visible` with all graphs kept, for a step of which nothing is to be known; None if it drew numbers."""
    results = _micro_batches(plan, cargo, keep_graph, ambient, silence)
    return None if silence.broken() else (outcome.visible(results),)


def keep_graph(segment: int, micro_batch: int) -> Keep:
    """Nothing is recomputed."""
    return "graph"


@contextmanager
def _inside(ambient: Ambient) -> Generator[None]:
    with ambient.here(), ambient.casting():
        yield


def _micro_batches(plan: Plan, cargo: Cargo, keeps: Keeps, ambient: Ambient, context: Dice | Silence) -> list[Any]:
    count = cargo.micro_batches
    visits = [Visit(i, ambient, context, micro_batches=count) for i in range(count)]
    return [_micro_batch(plan, keeps, visit, parts) for visit, parts in zip(visits, cargo.pieces(), strict=True)]


def _micro_batch(plan: Plan, keeps: Keeps, visit: Visit, parts: Sequence[Any]) -> Any:
    """One micro-batch through all stages; what crosses from one to another keeps its graph."""
    values: dict[int, Any] = {inlet.route: part for inlet, part in zip(plan.gate.inlets, parts, strict=True)}
    for stage, function in enumerate(plan.functions):
        inputs = [values[route] for route in plan.wiring.inputs[stage]]
        try:
            outputs = _call(keeps, function, visit, stage, inputs)
        except BaseException as error:
            advise(error)
            error.add_note(f"weft: in forward of micro-batch {visit.micro_batch}")
            raise
        values.update(zip(plan.wiring.outputs[stage], outputs, strict=True))
    return values[plan.gate.result]


def _call(keeps: Keeps, function: Function, visit: Visit, segment: int, inputs: list[Any]) -> tuple[Any, ...]:
    """One segment, with its graph or only its inputs kept."""
    if keeps(segment, visit.micro_batch) != "inputs":
        return function(visit, *inputs)
    leaves, structure = flatten(inputs)
    repeated = _Repeated(function, visit, structure)
    outputs = _checkpoint(repeated, *leaves, use_reentrant=False, preserve_rng_state=False)
    if repeated.failed:
        raise repeated.failed.pop()
    return outputs


class _Repeated:
    """The function over leaves, told that its first call will be repeated, and that the later ones repeat it.

    Each call gets lists and dicts of its own: a layer may change them. An error of the first call is put into
    ``failed``. Raised through `torch.utils.checkpoint`, it would leave hooks in place for all graphs of the thread
    until nobody holds the error any more (PyTorch 2.11), or become another one if it is a ``StopIteration``.
    """

    def __init__(self, function: Callable[..., Any], visit: Visit, structure: Structure) -> None:
        self.failed: list[BaseException] = []
        self._function, self._visit, self._structure = function, visit, structure
        self._called = False

    def __call__(self, *leaves: Any) -> Any:
        if self._called:
            return self._run("recomputing", leaves)
        self._called = True
        try:
            return self._run("checkpointing", leaves)
        except BaseException as error:
            self.failed.append(error)
            return ()

    def _run(self, what: Phase, leaves: Sequence[Any]) -> Any:
        with phase(what), self._visit.ambient.process_flags():
            return self._function(self._visit, *unflatten(self._structure, leaves))


def guarded(result: Any) -> tuple[Any, list[Tensor]]:
    """The result, and its tensors; their backward keeps to the rules of a step that was cut out.

    Else the same program would be refused or not, by what was measured to be faster.
    """
    outputs = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
    freed_by: list[int] = []

    def before_backward(gradients: Sequence[Tensor | None]) -> None:
        forbid_batched(gradients)
        forbid_double()
        task = current_task()
        if freed_by and task not in freed_by:
            raise BackwardTwiceError(TWICE)
        if not keeps_graph():
            freed_by.append(task)

    for node in {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}:
        node.register_prehook(before_backward)
    return result, outputs
