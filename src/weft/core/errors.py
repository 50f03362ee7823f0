"""Errors that weft raises on purpose at every capability; `weft.errors` has all of them.

Each class also derives from the built-in that PyTorch would have raised at that place, so existing ``except`` clauses
keep working. A message says where, what was seen, what was wanted, and what to do. Errors of the user's own layers are
never wrapped: they keep their type and traceback, and get a note (PEP 678) that names stage, micro-batch and layer.
"""

import os
from collections.abc import Sequence
from types import TracebackType


class WeftError(Exception):
    """Base of all errors that weft raises on purpose."""


class UsageError(WeftError, ValueError):
    """Arguments that do not make sense, alone or together."""


class SpecError(WeftError, TypeError):
    """A value does not look as its spec says."""


class BatchError(WeftError, ValueError):
    """A mini-batch cannot be cut into, or joined from, micro-batches."""


class ScheduleError(WeftError, ValueError):
    """A schedule is malformed, incomplete, or would deadlock."""


class PartitionError(WeftError, ValueError):
    """Layers cannot be spread over the stages as asked."""


class DeviceError(WeftError, RuntimeError):
    """A parameter or buffer is not on the device where its stage runs."""


class InPlaceError(WeftError, RuntimeError):
    """A stage wrote into a tensor that others still need."""


class DoubleBackwardError(WeftError, RuntimeError):
    """The gradient of a gradient was asked for across a cut."""


class BackwardTwiceError(WeftError, RuntimeError):
    """Backward ran a second time over a step whose intermediates were freed."""


class RandomnessError(WeftError, RuntimeError):
    """A recomputation did not draw the random numbers of its forward."""


class ModuleChangedError(WeftError, RuntimeError):
    """A layer changed between its forward and its recomputation."""


class SplitError(WeftError, ValueError):
    """A model's forward() cannot be cut there. (No TypeError: operators take one for "not implemented".)"""


class GuardError(WeftError, RuntimeError):
    """The code between blocks would go another way than when it was recorded."""


class SkipError(WeftError, RuntimeError):
    """A layer broke its own skip declaration while running."""


class SkipWiringError(WeftError, TypeError):
    """The skips of a model do not fit together."""


class RankFailedError(WeftError, RuntimeError):
    """Another rank of the pipeline raised; the message has its error and traceback."""


class RankLostError(WeftError, ConnectionError):
    """The process of another rank of the pipeline ended, or does not answer."""


class WeightsError(WeftError, RuntimeError):
    """The tensors of a file or checkpoint do not fit the model or the optimizer."""


TWICE = (
    "backward ran a second time over a step whose intermediates were freed by the first; "
    "call the first backward with retain_graph=True to keep them"
)
"""What a `BackwardTwiceError` says."""


_EACH = "\n  - "


def listed(headline: str, faults: Sequence[str]) -> str:
    """One message out of many faults: the headline, then one line per fault."""
    return _EACH.join([headline, *faults])


def unlisted(message: str) -> list[str]:
    """The faults that a message lists; itself if it is no list."""
    first, *faults = message.split(_EACH)
    return faults or [first]


def escaped(text: object, most: int | None = None, *, lines: bool = False) -> str:
    """Text from elsewhere, for a terminal or a log: what is not printable is escaped, such as ``\\x1b``.

    ``most``: characters at most, cut after escaping. ``lines``: line feeds stay.
    """
    found = "".join(
        each if each.isprintable() or (lines and each == "\n") else each.encode("unicode_escape").decode("ascii")
        for each in str(text)
    )
    return found if most is None or len(found) <= most else f"{found[: most - 3]}..."


_CALLS = ("_wrapped_call_impl", "_call_impl")  # how PyTorch calls a module's forward


def shorten_traceback(error: BaseException) -> None:
    """Leave the frames of the user's code, and the first of weft's; all of them where WEFT_FULL_TRACEBACK is 1.

    What weft itself failed at, other than by an error that it raises on purpose, stays whole.
    """
    if os.environ.get("WEFT_FULL_TRACEBACK", "0") not in ("", "0"):
        return
    entries: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    places = [str(each.tb_frame.f_globals.get("__name__", "")) for each in entries]
    ours = [k for k, place in enumerate(places) if place.startswith("weft.")]
    if not ours or (ours[-1] == len(entries) - 1 and not isinstance(error, WeftError)):
        return
    after: TracebackType | None = None
    for k, each in reversed(list(enumerate(entries))):
        if k > ours[-1]:
            hidden = each.tb_frame.f_code.co_name in _CALLS or places[k].startswith("torch.autograd.")
        else:  # PyTorch's frames between those of weft are its doing
            hidden = k > ours[0] and places[k].startswith(("weft.", "torch.", "contextlib"))
        if not hidden:
            each.tb_next = after
            after = each
    error.__traceback__ = after


_NO_MEMORY = (
    "weft: recomputation takes less memory, for the price of a second forward: give the Pipe checkpoint='except_last' "
    "or 'always', or a list with such a mode for this stage; or cut the mini-batch into more chunks, or give the "
    "device fewer layers (balance=)"
)
_ADVICE = {
    "out of memory": _NO_MEMORY,  # of an accelerator
    "not enough memory: you tried to allocate": _NO_MEMORY,  # of the CPU
    "cannot register a hook on a tensor that doesn't require gradient": (
        "weft: the first forward of a micro-batch that will be recomputed runs without a graph; write "
        "`if y.requires_grad: y.register_hook(...)`, or use checkpoint='never' for this stage"
    ),
    "CUDA error": (
        "weft: a GPU reports an error late, maybe not at the stage that caused it; run again with the environment "
        "variable CUDA_LAUNCH_BLOCKING=1 to see the place"
    ),
    "a leaf Variable that requires grad": (
        "weft: what a stage gets is a leaf that others may hold; use the out-of-place form of the stage's first "
        "operation (inplace=False), or let it write into a clone"
    ),
    "checkpoint is incompatible with .grad()": (
        "weft: stages ask for gradients by torch.autograd.grad; use use_reentrant=False in torch.utils.checkpoint, or "
        "the checkpoint= of the Pipe instead"
    ),
}
"""By a part of PyTorch's own words for what a layer may do alone but not inside of a segment."""


def advise(error: BaseException) -> None:
    """Add a note to an error of PyTorch's whose words do not tell a layer's author what to do."""
    for words, advice in _ADVICE.items():
        if isinstance(error, RuntimeError) and words in str(error):
            error.add_note(advice)
