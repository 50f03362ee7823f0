"""A recurrent network as one operator, which `torch.compile` and `torch.export` do not look into.

    compiled graph     ... -> weft.recurrent(form, tensors, references, wanted, start) -> ends, token -> ...
                       ... <- weft.recurrent_backward(token, tensors, references, wanted, gradients) <- ...

Inside, the ordinary network runs: its plans are made at run time, from real tensors.

The *token* stands for what autograd kept of the sequence. It is a tensor over a piece of memory that owns these values:
when nothing refers to that memory any more, nor the graph that was to call backward, they go with it.
"""

import itertools
import threading
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from weft.core.boundary import keeps_graph, quiet_hooks
from weft.core.errors import BackwardTwiceError
from weft.core.segment import differentiable
from weft.recurrent import forms

_C = cast(Any, torch._C)
_numbers = itertools.count(1)
_sequences: "weakref.WeakValueDictionary[int, _Memory]" = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class _Sequence:
    """What was run: its ends in autograd's graph, and the tensors that want a gradient."""

    ends: list[Tensor]
    asked: list[Tensor]


class _Memory(bytearray):
    """The memory of a token. What it owns lives as long as it."""

    sequence: _Sequence


def _token(sequence: _Sequence) -> Tensor:
    number = next(_numbers)
    memory = _Memory(number.to_bytes(8, "little"))
    memory.sequence = sequence
    _sequences[number] = memory
    return torch.frombuffer(memory, dtype=torch.int64)


@torch.library.custom_op("weft::recurrent", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def recurrent(
    form: int, tensors: Sequence[Tensor], references: Sequence[Tensor], wanted: Sequence[bool], start: int
) -> list[Tensor]:
    """Run the network. `wanted` says which of `tensors` and `references` want a gradient. The last result is the token.

    Raises UsageError if the network is gone, and whatever the network raises.
    """
    which = forms.known(form)
    leaves = [_leaf(each, want) for each, want in zip(tensors, wanted, strict=False)]
    own = forms.tensors_of(forms.network_of(which.network)).values()
    given = [
        _reference(each, mine, want) for each, mine, want in zip(references, own, wanted[len(tensors) :], strict=True)
    ]
    with _as_outside(), torch.set_grad_enabled(any(wanted)):
        ends = which.run(leaves, given, start, looks=False)
        asked = [each for each, want in zip((*leaves, *given), wanted, strict=True) if want]
        token = _token(_Sequence(ends, asked)) if asked else torch.zeros(1, dtype=torch.int64)
        return [*_separate([each.detach() for each in ends], [*tensors, *references]), token]


@recurrent.register_fake
def _(
    form: int, tensors: Sequence[Tensor], references: Sequence[Tensor], wanted: Sequence[bool], start: int
) -> list[Tensor]:
    with _real_tensors_allowed(tensors):
        ends = forms.known(form).run(tensors, references, start, looks=True)
    token = torch.empty(1, dtype=torch.int64, device="cpu")
    return [*(torch.empty_like(each, memory_format=torch.contiguous_format) for each in ends), token]


@torch.library.custom_op("weft::recurrent_backward", mutates_args=())
def recurrent_backward(
    token: Tensor,
    tensors: Sequence[Tensor],
    references: Sequence[Tensor],
    wanted: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> list[Tensor]:
    """The gradients of what is wanted, out of those of the ends.

    Raises BackwardTwiceError if the values of the sequence are gone.
    """
    memory = _sequences.get(int(token))
    if memory is None:
        raise BackwardTwiceError(
            "the values of a compiled recurrent network's sequence are gone: its token was copied, as offloading saved "
            "tensors does, or the graph was freed; run forward again, or keep the network out of the compiled region"
        )
    sequence = memory.sequence
    pairs = [
        (end, gradient)
        for end, gradient in zip(sequence.ends, gradients, strict=True)
        if gradient is not None and end.requires_grad
    ]
    found: Sequence[Tensor | None] = [None] * len(sequence.asked)
    if pairs:
        with _as_outside(), quiet_hooks(each for each in sequence.asked if each.is_leaf):
            found = torch.autograd.grad(
                [end for end, _ in pairs],
                sequence.asked,
                [gradient for _, gradient in pairs],
                retain_graph=keeps_graph(),
                allow_unused=True,
            )
    zeros = zip(found, sequence.asked, strict=True)
    values = [torch.zeros_like(like) if gradient is None else gradient for gradient, like in zeros]
    return _separate(values, [*tensors, *references, *(each for each in gradients if each is not None)])


@recurrent_backward.register_fake
def _(
    token: Tensor,
    tensors: Sequence[Tensor],
    references: Sequence[Tensor],
    wanted: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> list[Tensor]:
    return [
        torch.empty_like(each, memory_format=torch.contiguous_format)
        for each, want in zip((*tensors, *references), wanted, strict=True)
        if want
    ]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, tensors, references, wanted, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[-1], *tensors, *references)
    ctx.count, ctx.wanted = len(tensors), wanted


def _back(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    token, *saved = ctx.saved_tensors
    tensors, references = saved[: ctx.count], saved[ctx.count :]
    given = [None if each is None else each.contiguous() for each in gradients[:-1]]
    found = iter(recurrent_backward(token, tensors, references, ctx.wanted, given))
    every = [next(found) if want else None for want in ctx.wanted]
    return None, every[: ctx.count], every[ctx.count :], None, None


recurrent.register_autograd(_back, setup_context=_keep)


def _leaf(tensor: Tensor, wanted: bool) -> Tensor:
    return tensor.detach().requires_grad_(wanted and differentiable(tensor))


def _reference(given: Tensor, own: Tensor, wanted: bool) -> Tensor:
    """The network's own tensor where the given one is it, so that the network's plans serve; else the given one."""
    same = given is own or (
        (given.data_ptr(), given.shape, given.stride(), given.dtype)
        == (own.data_ptr(), own.shape, own.stride(), own.dtype)
    )
    best = own if same else given
    # One that wants more is as good: a new tensor at every call would be a new plan at every call.
    return best if best.is_leaf and best.requires_grad >= wanted else _leaf(best, wanted)


def _separate(values: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """The values, contiguous, and none in memory of another or of `others`: so an operator's results must be."""
    taken = {each.untyped_storage()._cdata for each in others}
    found: list[Tensor] = []
    for value in values:
        value = value.contiguous()
        if value.untyped_storage()._cdata in taken:
            value = value.clone(memory_format=torch.contiguous_format)
        taken.add(value.untyped_storage()._cdata)
        found.append(value)
    return found


@contextmanager
def _as_outside() -> Generator[None]:
    """Everything as usual: inside an operator PyTorch has turned off autograd, and under tracing also `torch.func`."""
    include, exclude = _usual
    if torch.is_inference_mode_enabled():
        include = include.remove(_C.DispatchKey.ADInplaceOrView)
    with _C._ForceDispatchKeyGuard(include, exclude):
        yield


def _of_a_new_thread() -> tuple[Any, Any]:
    """The dispatch keys that are on and off in a thread where nobody has changed them yet."""
    found: list[Any] = []

    def look() -> None:
        found.extend((_C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()))

    thread = threading.Thread(target=look, name="weft-dispatch-keys")
    thread.start()
    thread.join()
    return found[0], found[1]


_usual = _of_a_new_thread()


@contextmanager
def _real_tensors_allowed(tensors: Sequence[Tensor]) -> Generator[None]:
    """A cell may close over real tensors; fake ones are made of them."""
    mode = next((each.fake_mode for each in cast("Sequence[Any]", tensors) if hasattr(each, "fake_mode")), None)
    before = None if mode is None else mode.allow_non_fake_inputs
    if mode is not None:
        mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        if mode is not None:
            mode.allow_non_fake_inputs = before
