"""``executor="graph"``: the same micro-batches and stages, with the whole graph left visible to autograd.

Nothing is cut out, so gradients of gradients work. It is serial, and a schedule means nothing to it: autograd
decides the order of backward. Random numbers and results are those of the other executors.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from torch.utils import checkpoint as checkpointing

from weft.core.ambient import Ambient, phase
from weft.core.segment import Visit
from weft.pipeline.step import Order

_checkpoint = cast("Callable[..., tuple[Any, ...]]", checkpointing.checkpoint)


def run_visible(order: Order, ambient: Ambient) -> Any:
    """The output, or where the loss is inside the loss, of a mini-batch, with its graph."""
    while True:
        dice = order.dice()
        for norm in order.deferred:
            norm.begin()
        try:
            with ambient.here(), ambient.casting():
                pieces = enumerate(order.cargo.pieces())
                results = [_micro_batch(order, Visit(i, ambient, dice), parts) for i, parts in pieces]
        except BaseException:
            for norm in order.deferred:
                norm.abandon()
            raise
        if dice.settle():
            break
    for norm in order.deferred:
        norm.commit()
    return order.outcome.visible(results)


def _micro_batch(order: Order, visit: Visit, parts: Sequence[Any]) -> Any:
    """One micro-batch through all stages; what crosses from one to another keeps its graph."""
    plan, index = order.plan, visit.micro_batch
    values: dict[int, Any] = {inlet.route: part for inlet, part in zip(plan.gate.inlets, parts, strict=True)}
    for stage, function in enumerate(plan.functions):
        inputs = [values[route] for route in plan.wiring.inputs[stage]]
        if order.keeps(stage, index) == "inputs":
            call = partial(_checkpoint, _twice(function, visit), use_reentrant=False, preserve_rng_state=False)
            outputs = call(*inputs)
        else:
            outputs = function(visit, *inputs)
        values.update(zip(plan.wiring.outputs[stage], outputs, strict=True))
    return values[plan.gate.result]


def _twice(function: Callable[..., Any], visit: Visit) -> Callable[..., Any]:
    """The function, told that its first call will be repeated, and that the later ones repeat it."""
    calls: list[bool] = []

    def call(*inputs: Any) -> Any:
        with phase("recomputing" if calls else "checkpointing"), visit.ambient.process_flags():
            calls.append(True)
            return function(visit, *inputs)

    return call
