"""Compare a recorded program with the model itself, to detect state that no recording can see.

State that forward() reads outside of Python objects (a C extension, an environment variable, a file) would be frozen
into the program without notice. So every new program runs on another micro-batch than the one it was recorded on, and
the model runs on the same one. Outputs, buffers and gradients must agree to rounding. The steps 10, 100, 1,000, ... of
a program compare again, so that a later change of such state is found late instead of never.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchweft.core.autograd import StepsInBackward, silence_hooks
from torchweft.core.errors import SplitError, join_faults
from torchweft.core.pytree import flatten, structure_paths, unflatten
from torchweft.pipeline.split.isolation import copies, undisturbed
from torchweft.pipeline.split.program import Owned, Program, tensor_of
from torchweft.pipeline.split.record import ForwardRecorder


def verify(recorder: ForwardRecorder, program: Program, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise SplitError if the program computes other values than the model, or if each run of the model changes state
    of the code between blocks. The error names the first value that differs, or that state."""
    leaves, structure = flatten((tuple(args), kwargs))
    owned = partial(tensor_of, recorder.model)

    def plain(inputs: list[Any]) -> Any:
        before = recorder.state_in_words()
        result = recorder.plain(*unflatten(structure, inputs))
        # One change is allowed, because a first run can fill a cache. A counter also changes in the next run.
        if recorder.agree_on(recorder.state_in_words() != before or None):
            before = recorder.state_in_words()
            with torch.no_grad():
                recorder.plain(*unflatten(structure, copies(leaves)))
            _reject_changes(recorder, before)
        return result

    expected = _run(recorder, plain, leaves)
    actual = _run(recorder, partial(recorder.replay, program, owned=owned), leaves)
    pairs = ((name, difference(value, actual.get(name))) for name, value in expected.items())
    fault = next((f"{name} differs, {fault}, and no value before it" for name, fault in pairs if fault), None)
    if fault := recorder.agree_on(fault):
        where = recorder.agree_on(_find_first_difference(recorder, program, leaves, structure, owned))
        raise SplitError(
            f"{type(recorder.model).__name__} and its recorded program compute different values; {where or fault}. The "
            "code between blocks can depend on arguments, tensors, and flags or numbers of the module or its config; "
            "move code that depends on anything else into a submodule. verify=False switches this comparison off"
        )


def _reject_changes(recorder: ForwardRecorder, before: Mapping[str, Hashable]) -> None:
    """Raise SplitError that names each attribute and global whose value differs from `before`."""
    now = recorder.state_in_words()
    if changed := [name for name, value in now.items() if value != before.get(name, value)]:
        lines = [recorder.state.line_of(name.rpartition(".")[2]) for name in changed]
        faults = [f"{name} ({line})" if line else name for name, line in zip(changed, lines, strict=True)]
        headline = (
            f"every forward of {type(recorder.model).__name__} changes these in the code between blocks, but a "
            "recorded program would not. Count in a buffer, in place (self.steps += 1 where steps is a tensor buffer), "
            "return a tensor instead of keeping it in an attribute, or do it in a submodule or outside of forward():"
        )
        raise SplitError(join_faults(headline, faults))


def _run(recorder: ForwardRecorder, call: Callable[[list[Any]], Any], leaves: Sequence[Any]) -> dict[str, Any]:
    """The values of one run by name: the leaves of the result, the buffers, and gradients of inputs and parameters."""
    inputs, model = copies(leaves), recorder.model
    # A backward through a remote expert would train it on its server.
    trains = any(isinstance(module, StepsInBackward) for module in model.modules())
    tracked = torch.is_grad_enabled() and not recorder.mixed and not trains
    with undisturbed(model, recorder.devices), torch.set_grad_enabled(tracked):
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
    recorder: ForwardRecorder, program: Program, leaves: Sequence[Any], structure: Any, owned: Owned
) -> str | None:
    """The first step at which forward() and the program differ, in words. Records the forward again with all values."""
    args, kwargs = unflatten(structure, copies(leaves))
    steps = program.recording.steps
    again = recorder.record(args, kwargs, keep=True)
    for before, now in zip(steps, again.steps, strict=False):
        if (before.name, before.where) != (now.name, now.where):
            return f"forward() took another branch: to {now} now, and to {before} when it was recorded"
    first: str | None = None
    with undisturbed(recorder.model, recorder.devices), torch.no_grad():
        values = program.given(copies(leaves), owned, steps)
        # To the end, also after a difference, because other ranks can take part in every step.
        for step, now in zip(steps, again.steps, strict=False):
            recorder.perform(step, step.leaves, values)
            for value, other in zip(step.makes, now.makes, strict=False):
                if value is None or other is None or first:
                    continue
                if (fault := difference(other.kept, values[value])) is not None:
                    first = f"the first value that differs, {fault}, is the result of {step}"
    return first


def difference(expected: Any, actual: Any) -> str | None:
    """The difference of two leaves in words. None if it is not more than rounding."""
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        return None if type(expected) is type(actual) else f"by {actual!r} for {expected!r}"
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return f"by {actual.dtype} {tuple(actual.shape)} for {expected.dtype} {tuple(expected.shape)}"
    # Equal first, which is the usual case. The rest takes a copy in complex128.
    if expected.is_meta or not expected.numel() or torch.equal(expected, actual):
        return None
    if not (expected.is_floating_point() or expected.is_complex()):
        return f"at {int((expected != actual).sum())} of {expected.numel()} places"
    one, other = expected.to(torch.complex128), actual.to(expected.device, torch.complex128)
    apart = torch.where(one.isnan() & other.isnan() | (one == other), 0, (one - other).abs()).max().item()
    scale = one[one.isfinite()].abs().max().item() if bool(one.isfinite().any()) else 0.0
    # Half of the digits must agree: the program can use other kernels, whose order of sums differs.
    within = apart <= torch.finfo(expected.dtype).eps ** 0.5 * max(scale, 1e-3)
    return None if within else f"by {apart:.1e} (its largest is {scale:.1e})"
