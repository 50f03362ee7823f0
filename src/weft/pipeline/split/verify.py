"""Compare a program with the plain forward, once: the net under all that a recording cannot see.

What forward() goes by without PyTorch's knowledge (a C extension, an environment variable, data of Python) would be
frozen in silence. So every new program is run on another micro-batch than the one it was recorded on, beside the model
itself: outputs, and gradients where there are some, must agree to rounding.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.core.autograd import StepsInBackward, quiet_hooks
from weft.core.errors import BatchError, SplitError, listed
from weft.core.pytree import Structure, flatten, spread, structure_paths, unflatten
from weft.pipeline.microbatch import SplitPlan
from weft.pipeline.split.program import Owned, Program, perform, tensor_of
from weft.pipeline.split.record import ForwardRecorder, copies, undisturbed

ITEMS = "num_items_in_batch"
"""The argument of Hugging Face's models that says by how many tokens a loss is to be divided."""
_SEED = 20


def verify(recorder: ForwardRecorder, program: Program, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What the model returns, by name, and all that was compared beside it. Raises SplitError, which names the first
    value that differs, if the program is not what the model does."""
    leaves, structure = flatten((tuple(args), kwargs))
    owned = partial(tensor_of, recorder.model)
    wanted = _run(recorder, lambda given: recorder.plain(*unflatten(structure, given)), leaves)
    seen = _run(recorder, partial(program.replay, owned=owned), leaves)
    for name, one in wanted.items():
        if (fault := _difference(one, seen.get(name))) is not None:
            where = _first(recorder, program, leaves, structure, owned)
            raise SplitError(
                f"{type(recorder.model).__name__} does not compute what its recorded program does; "
                f"{where or f'{name} differs, {fault}, and no value before it'}. What the code between blocks goes by "
                "must be an argument, a tensor, a flag or number of the module or its config; move into a submodule "
                "what goes by anything else. verify=False switches this comparison off"
            )
    return wanted


def check_order(recorder: ForwardRecorder, plan: SplitPlan, leaves: Sequence[Any], outputs: Any) -> None:
    """Raise BatchError for outputs with several rows for each that came in, if those do not stand side by side as rows
    of tokens do: joined, they would be in another order than the model's. Two rows in both orders tell.

    `leaves` are those of a mini-batch, `outputs` the axes of what is returned.
    """
    training = [(module, module.training) for module in recorder.model.modules()]
    found: list[dict[str, Any]] = []
    axes: Sequence[Any] = ()
    try:
        for module, _ in training:
            module.training = False
        for order in ([0, 1], [1, 0]):
            pairs = zip(leaves, plan.axes, strict=True)
            rows = [x if axis is None else x.index_select(axis, torch.tensor(order).to(x.device)) for x, axis in pairs]
            result, structure = _once(recorder, *unflatten(plan.structure, copies(rows)))
            found.append(result)
            axes = spread(outputs, structure, "output")
    finally:
        for module, mode in training:
            module.training = mode
    faults: list[str] = []
    for (name, one), other, axis in zip(found[0].items(), found[1].values(), axes, strict=True):
        several = isinstance(one, Tensor) and one.dim() and not axis and len(one) > 2 and one.shape == other.shape
        if several and (len(one) % 2 or _difference(one, other.unflatten(0, (2, -1)).flip(0).flatten(0, 1))):
            faults.append(f"{name} has {len(one)} rows for 2")
    if faults:
        headline = (
            "the results of the micro-batches cannot be joined: rows that come of one row do not stand side by side, "
            "as those of its tokens would. Let the model return one row for each that came in, and regroup outside:"
        )
        raise BatchError(listed(headline, faults))


def divides(
    recorder: ForwardRecorder, args: Sequence[Any], kwargs: dict[str, Any], positional: Sequence[str]
) -> bool | None:
    """Whether the model divides its loss by ``num_items_in_batch``: so it does if twice as many halve it. None where
    it is zero anyway. `positional` are the names of positional arguments.

    Raises BatchError where that is true of a part of the loss, or of some numbers in the output.
    """
    leaves, structure = flatten((list(args), kwargs))
    found: list[dict[str, Any]] = []
    for factor in (1, 2):
        given, named = unflatten(structure, copies(leaves))
        where, at = (named, ITEMS) if ITEMS in named else (given, positional.index(ITEMS))
        where[at] = where[at] * factor
        found.append(_once(recorder, given, named)[0])
    ways: dict[str, str] = {}
    for name, one in found[0].items():
        number = isinstance(one, Tensor) and not one.dim() and one.is_floating_point() and not one.is_meta
        if number and one.item():
            is_same, is_half = (_is_near(one, each) for each in (found[1][name], 2 * found[1][name]))
            ways[name] = "does not change" if is_same else "is halved" if is_half else "is halved only partly"
    if len(kinds := set(ways.values())) > 1 or kinds == {"is halved only partly"}:
        headline = (
            f"{ITEMS} was given, so micro-batches' numbers in the output are to be summed, but not all of them are "
            f"divided by it. Leave {ITEMS} out if a mean over rows is right, or labels, and compute the loss outside. "
            "With twice as many items:"
        )
        raise BatchError(listed(headline, [f"{name} {way}" for name, way in ways.items()]))
    return kinds == {"is halved"} if kinds else None


def _once(recorder: ForwardRecorder, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[dict[str, Any], Structure]:
    """What the model returns, by name, without gradients."""
    with undisturbed(recorder.model, recorder.devices), torch.inference_mode(False), torch.no_grad():
        result, structure = flatten(recorder.plain(args, kwargs))
    return dict(zip(structure_paths(structure, "output"), result, strict=True)), structure


def _is_near(one: Tensor, other: Tensor) -> bool:
    eps = torch.finfo(one.dtype).eps
    return torch.allclose(one, other, rtol=min(64 * eps, eps**0.5), atol=0.0, equal_nan=True)


def _run(recorder: ForwardRecorder, call: Callable[[list[Any]], Any], leaves: Sequence[Any]) -> dict[str, Any]:
    """By name: the leaves of the result, the buffers after it, and the gradients of inputs and parameters for fixed
    ones of the result."""
    given = copies(leaves)
    model = recorder.model
    trains = any(isinstance(each, StepsInBackward) for each in model.modules())  # a backward would, elsewhere
    tracked = torch.is_grad_enabled() and not recorder.mixed and not trains
    with undisturbed(model, recorder.devices), torch.inference_mode(False), torch.set_grad_enabled(tracked):
        result, structure = flatten(call(given))
        found: dict[str, Any] = dict(zip(structure_paths(structure, "output"), result, strict=True))
        found |= {f"buffer {name}": each.clone() for name, each in model.named_buffers()}
        wanted = {f"the gradient of input {k}": x for k, x in enumerate(given) if isinstance(x, Tensor)}
        wanted |= {f"the gradient of {name}": each for name, each in model.named_parameters()}
        wanted = {name: each for name, each in wanted.items() if each.requires_grad}
        roots = [x for x in result if isinstance(x, Tensor) and x.requires_grad]
        if tracked and roots and wanted:
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
    with undisturbed(recorder.model, recorder.devices), torch.no_grad():
        values = program.given(copies(leaves), owned, steps)
        for step, now in zip(steps, again.steps, strict=False):
            perform(step, step.leaves, values)
            for value, other in zip(step.makes, now.makes, strict=False):
                if value is None or other is None:
                    continue
                if (fault := _difference(other.kept, values[value])) is not None:
                    return f"the first value that differs, {fault}, is that of {step}"
    return None


def _difference(wanted: Any, seen: Any) -> str | None:
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
