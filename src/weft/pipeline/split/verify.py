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

from weft.core.autograd import StepsInBackward, quiet_hooks
from weft.core.errors import SplitError, listed
from weft.core.pytree import flatten, structure_paths, unflatten
from weft.pipeline.split.isolation import copies, undisturbed
from weft.pipeline.split.program import Owned, Program, tensor_of
from weft.pipeline.split.record import ForwardRecorder

_SEED = 20


def verify(recorder: ForwardRecorder, program: Program, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise SplitError if the program computes other values than the model, naming the first one that differs; or if
    each run of the model changes state of the code between blocks, naming that state."""
    leaves, structure = flatten((tuple(args), kwargs))
    owned = partial(tensor_of, recorder.model)

    def plain(given: list[Any]) -> Any:
        before = recorder.state_in_words()
        result = recorder.plain(*unflatten(structure, given))
        # A change alone is allowed, because a first run can fill a cache. A counter changes in the next run, too.
        if recorder.settle(recorder.state_in_words() != before or None):
            before = recorder.state_in_words()
            with torch.no_grad():
                recorder.plain(*unflatten(structure, copies(leaves)))
            _forbid_changes(recorder, before)
        return result

    wanted = _run(recorder, plain, leaves)
    seen = _run(recorder, partial(recorder.replay, program, owned=owned), leaves)
    pairs = ((name, difference(one, seen.get(name))) for name, one in wanted.items())
    fault = next((f"{name} differs, {fault}, and no value before it" for name, fault in pairs if fault), None)
    if fault := recorder.settle(fault):
        where = recorder.settle(_first(recorder, program, leaves, structure, owned))
        raise SplitError(
            f"{type(recorder.model).__name__} does not compute what its recorded program does; {where or fault}. What "
            "the code between blocks goes by must be an argument, a tensor, a flag or number of the module or its "
            "config; move into a submodule what goes by anything else. verify=False switches this comparison off"
        )


def _forbid_changes(recorder: ForwardRecorder, before: Mapping[str, Hashable]) -> None:
    """Raise SplitError that names each attribute and global whose value differs from `before`."""
    now = recorder.state_in_words()
    if changed := [name for name, value in now.items() if value != before.get(name, value)]:
        lines = [recorder.state.line_of(name.rpartition(".")[2]) for name in changed]
        headline = (
            f"every forward of {type(recorder.model).__name__} changes these in the code between blocks, which a "
            "recorded program would not. Count in a buffer, in place (self.steps += 1 where steps is a tensor buffer); "
            "return a tensor instead of keeping it in an attribute; or do it in a submodule, or outside of forward():"
        )
        pairs = zip(changed, lines, strict=True)
        raise SplitError(listed(headline, [f"{name} ({line})" if line else name for name, line in pairs]))


def _run(recorder: ForwardRecorder, call: Callable[[list[Any]], Any], leaves: Sequence[Any]) -> dict[str, Any]:
    """By name: the leaves of the result, the buffers after it, and the gradients of inputs and parameters for fixed
    ones of the result."""
    given = copies(leaves)
    model = recorder.model
    trains = any(isinstance(each, StepsInBackward) for each in model.modules())  # a backward would, elsewhere
    tracked = torch.is_grad_enabled() and not recorder.mixed and not trains
    # First out of inference mode, so that the copies of buffers can be written to.
    with torch.inference_mode(False), undisturbed(model, recorder.devices), torch.set_grad_enabled(tracked):
        result, structure = flatten(call(given))
        found: dict[str, Any] = dict(zip(structure_paths(structure, "output"), result, strict=True))
        found |= {f"buffer {name}": each.clone() for name, each in model.named_buffers()}
        wanted = {f"the gradient of input {k}": x for k, x in enumerate(given) if isinstance(x, Tensor)}
        wanted |= {f"the gradient of {name}": each for name, each in model.named_parameters()}
        wanted = {name: each for name, each in wanted.items() if each.requires_grad}
        roots = [x for x in result if isinstance(x, Tensor) and x.requires_grad]
        if tracked and not recorder.watched and roots and wanted:
            random = torch.Generator().manual_seed(_SEED)
            seeds = [torch.randn(x.shape, generator=random, dtype=torch.float64).to(x) for x in roots]
            with quiet_hooks(wanted.values()):
                gradients = torch.autograd.grad(roots, list(wanted.values()), seeds, allow_unused=True)
            found |= dict(zip(wanted, gradients, strict=True))
    return {name: x.detach() if isinstance(x, Tensor) else x for name, x in found.items()}


def _first(
    recorder: ForwardRecorder, program: Program, leaves: Sequence[Any], structure: Any, owned: Owned
) -> str | None:
    """Where forward() and the program part, in words: the forward is recorded again, with all its values."""
    args, kwargs = unflatten(structure, copies(leaves))
    steps = program.recording.steps
    again = recorder.record(args, kwargs, keep=True)
    for before, now in zip(steps, again.steps, strict=False):
        if (before.name, before.where) != (now.name, now.where):
            return f"it went another way: to {now} now, and to {before} when it was recorded"
    found: str | None = None
    with undisturbed(recorder.model, recorder.devices), torch.no_grad():
        values = program.given(copies(leaves), owned, steps)
        for step, now in zip(steps, again.steps, strict=False):  # to the end, as other ranks may run along
            recorder.perform(step, step.leaves, values)
            for value, other in zip(step.makes, now.makes, strict=False):
                if value is None or other is None or found:
                    continue
                if (fault := difference(other.kept, values[value])) is not None:
                    found = f"the first value that differs, {fault}, is that of {step}"
    return found


def difference(wanted: Any, seen: Any) -> str | None:
    """In words how far apart two leaves are, if it is more than rounding."""
    if not isinstance(wanted, Tensor) or not isinstance(seen, Tensor):
        return None if type(wanted) is type(seen) else f"by {seen!r} for {wanted!r}"
    if wanted.shape != seen.shape or wanted.dtype != seen.dtype:
        return f"by {seen.dtype} {tuple(seen.shape)} for {wanted.dtype} {tuple(wanted.shape)}"
    if wanted.is_meta or not wanted.numel() or torch.equal(wanted, seen):
        return None
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return f"at {int((wanted != seen).sum())} of {wanted.numel()} places"
    one, other = wanted.to(torch.complex128), seen.to(wanted.device, torch.complex128)
    apart = torch.where(one.isnan() & other.isnan() | (one == other), 0, (one - other).abs()).max().item()
    scale = one[one.isfinite()].abs().max().item() if bool(one.isfinite().any()) else 0.0
    within = apart <= torch.finfo(wanted.dtype).eps ** 0.5 * max(scale, 1e-3)
    return None if within else f"by {apart:.1e} (its largest is {scale:.1e})"
