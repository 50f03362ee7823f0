"""Compare a new program with the model itself, in values and gradients.

The calls that forward() makes are compared in every step. The work that the stages then do is compared here, once per
form of a program: on another micro-batch than the one it was recorded on, outputs, buffers and gradients must agree
with those of the model to rounding.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchweft.core.autograd import StepsInBackward, silence_hooks
from torchweft.core.errors import SplitError
from torchweft.core.pytree import flatten, structure_paths, unflatten
from torchweft.pipeline.split.compare import difference
from torchweft.pipeline.split.isolation import copies, undisturbed
from torchweft.pipeline.split.program import (
    Program,
)
from torchweft.pipeline.split.record import ForwardRecorder
from torchweft.pipeline.split.recording import (
    tensor_of,
)

Replay = Callable[[Sequence[Any]], Any]  # a run of the program for the leaves of its arguments


def verify(
    recorder: ForwardRecorder, program: Program, replay: Replay, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Raise SplitError that names the first value which the program computes otherwise than the model."""
    leaves, structure = flatten((tuple(args), kwargs))

    def plain(inputs: list[Any]) -> Any:
        return recorder.plain(*unflatten(structure, inputs))

    expected, actual = _run(recorder, plain, leaves), _run(recorder, replay, leaves)
    pairs = ((name, difference(value, actual.get(name))) for name, value in expected.items())
    fault = next((f"{name} differs, {fault}, and no value before it" for name, fault in pairs if fault), None)
    if fault := recorder.agree_on(fault):
        where = recorder.agree_on(_find_first_difference(recorder, program, leaves, structure))
        raise SplitError(
            f"{type(recorder.model).__name__} and its recorded program compute different values; {where or fault}. The "
            "code between blocks can depend on arguments, tensors, and flags or numbers of the module or its config; "
            "move code that depends on anything else into a submodule. verify=False switches this comparison off"
        )


def _run(recorder: ForwardRecorder, call: Callable[[list[Any]], Any], leaves: Sequence[Any]) -> dict[str, Any]:
    """The values of one run by name: the leaves of the result, the buffers, and gradients of inputs and parameters."""
    inputs, model = copies(leaves), recorder.model
    # A backward through a remote expert would train it on its server.
    trains = any(isinstance(module, StepsInBackward) for module in model.modules())
    tracked = torch.is_grad_enabled() and not recorder.mixed and not trains
    with undisturbed(model, recorder.devices, recorder.modules.open), torch.set_grad_enabled(tracked):
        result, structure = flatten(call(inputs))
        values: dict[str, Any] = dict(zip(structure_paths(structure, "output"), result, strict=True))
        values |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
        sources = {f"the gradient of input {k}": x for k, x in enumerate(inputs) if isinstance(x, Tensor)}
        sources |= {f"the gradient of {name}": parameter for name, parameter in model.named_parameters()}
        sources = {name: tensor for name, tensor in sources.items() if tensor.requires_grad}
        roots = [x for x in result if isinstance(x, Tensor) and x.requires_grad]
        # A watched run has another graph than the model, so its gradients could differ although both are right.
        if tracked and not recorder.watched and roots and sources:
            # Random seeds, because gradients of a sum would hide a wrong factor or a permutation.
            random = torch.Generator().manual_seed(20)
            seeds = [torch.randn(x.shape, generator=random, dtype=torch.float64).to(x) for x in roots]
            with silence_hooks(sources.values()):
                gradients = torch.autograd.grad(roots, list(sources.values()), seeds, allow_unused=True)
            values |= dict(zip(sources, gradients, strict=True))
    return {name: x.detach() if isinstance(x, Tensor) else x for name, x in values.items()}


def _find_first_difference(
    recorder: ForwardRecorder, program: Program, leaves: Sequence[Any], structure: Any
) -> str | None:
    """The first step at which forward() and the program differ, in words. Records the forward again with all values."""
    args, kwargs = unflatten(structure, copies(leaves))
    steps = program.recording.steps
    again = recorder.record(args, kwargs, keep=True)
    for before, now in zip(steps, again.steps, strict=False):
        if (before.name, before.where) != (now.name, now.where):
            return f"forward() took another branch: to {now} now, and to {before} when it was recorded"
    first: str | None = None
    with undisturbed(recorder.model, recorder.devices, recorder.modules.open), torch.no_grad():
        values = program.given(copies(leaves), partial(tensor_of, recorder.model), steps)
        # To the end, also after a difference, because other ranks can take part in every step.
        for step, now in zip(steps, again.steps, strict=False):
            recorder.perform(step, step.leaves, values)
            for value, other in zip(step.makes, now.makes, strict=False):
                if value is None or other is None or first:
                    continue
                if (fault := difference(other.kept, values[value])) is not None:
                    first = f"the first value that differs, {fault}, is the result of {step}"
    return first
