"""Errors that several capabilities raise; `weft.errors` has all of them.

Each class also derives from the built-in that PyTorch would have raised at that place, so existing ``except`` clauses
keep working. A message names the place, the value seen, the value wanted, and a remedy. Errors of the user's own layers
are never wrapped, because a wrapper would hide their type from ``except``. They get a note (PEP 678) that names stage,
micro-batch and layer.
"""

import os
from collections.abc import Sequence
from types import TracebackType


class WeftError(Exception):
    """Base class of all errors that torchweft raises."""


class UsageError(WeftError, ValueError):
    """An argument is invalid, alone or together with others."""


class SpecError(WeftError, TypeError):
    """A value does not match its spec."""


class BatchError(WeftError, ValueError):
    """A mini-batch cannot be cut into micro-batches, or joined from them."""


class ScheduleError(WeftError, ValueError):
    """A schedule is malformed, incomplete, or would deadlock."""


class PartitionError(WeftError, ValueError):
    """Layers cannot be distributed over the stages as requested."""


class DeviceError(WeftError, RuntimeError):
    """A parameter or buffer is not on the device where its stage runs."""


class InPlaceError(WeftError, RuntimeError):
    """A stage wrote into a tensor that is still needed elsewhere."""


class DoubleBackwardError(WeftError, RuntimeError):
    """The gradient of a gradient was requested across a cut."""


class BackwardTwiceError(WeftError, RuntimeError):
    """Backward ran a second time over a step that had freed its intermediate results."""


class RandomnessError(WeftError, RuntimeError):
    """A recomputation did not draw the random numbers of its forward."""


class ModuleChangedError(WeftError, RuntimeError):
    """A layer changed between its forward and its recomputation."""


class SplitError(WeftError, ValueError):
    """A model's forward() cannot be cut there."""

    # Not a TypeError, because Python's operators interpret that as "not implemented".


class GuardError(WeftError, RuntimeError):
    """The code between blocks would take another branch than when it was recorded."""


class SkipError(WeftError, RuntimeError):
    """A layer broke its own skip declaration while running."""


class SkipWiringError(WeftError, TypeError):
    """The skips of a model do not match each other."""


class RankFailedError(WeftError, RuntimeError):
    """Another rank of the pipeline raised an error. The message contains its traceback."""


class RankLostError(WeftError, ConnectionError):
    """The process of another rank of the pipeline ended or does not respond."""


class WeightsError(WeftError, RuntimeError):
    """The tensors of a file or checkpoint do not match the model or the optimizer."""


# The message of a `BackwardTwiceError`.
BACKWARD_TWICE = (
    "backward ran a second time over a step whose intermediates were freed by the first; "
    "call the first backward with retain_graph=True to keep them"
)


_EACH = "\n  - "


def join_faults(headline: str, faults: Sequence[str]) -> str:
    """Join faults to one message: the headline, then one line per fault."""
    return _EACH.join([headline, *faults])


def split_faults(message: str) -> list[str]:
    """The faults that a message lists, or the message itself if it is not a list."""
    first, *faults = message.split(_EACH)
    return faults or [first]


def text_of(error: BaseException) -> str:
    """``str(error)``, also for an error whose ``__str__`` raises. Other ranks wait for the text."""
    try:
        return str(error)
    except Exception as failure:
        return f"(its text cannot be shown: __str__ raised {type(failure).__name__})"


def escape(text: object, most: int | None = None, *, lines: bool = False) -> str:
    """Foreign text for a terminal or log, with unprintable characters escaped, e.g. ``\\x1b``.

    ``most``: maximum length after escaping. ``lines``: keep line feeds.
    """
    result = "".join(
        char if char.isprintable() or (lines and char == "\n") else char.encode("unicode_escape").decode("ascii")
        for char in str(text)
    )
    return result if most is None or len(result) <= most else f"{result[: most - 3]}..."


_CALLS = ("_wrapped_call_impl", "_call_impl")  # functions through which PyTorch calls a module's forward


def shorten_traceback(error: BaseException) -> None:
    """Drop all frames but the user's and the first of torchweft, unless TORCHWEFT_FULL_TRACEBACK is 1."""
    if os.environ.get("TORCHWEFT_FULL_TRACEBACK", "0") not in ("", "0"):
        return
    entries: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    places = [str(entry.tb_frame.f_globals.get("__name__", "")) for entry in entries]
    ours = [k for k, place in enumerate(places) if place.startswith("torchweft.")]
    # An unexpected error in torchweft's own code is a bug. Its report needs all frames.
    if not ours or (ours[-1] == len(entries) - 1 and not isinstance(error, WeftError)):
        return
    after: TracebackType | None = None
    for k, entry in reversed(list(enumerate(entries))):
        if k > ours[-1]:
            hidden = entry.tb_frame.f_code.co_name in _CALLS or places[k].startswith("torch.autograd.")
        else:
            # Between two frames of torchweft, PyTorch only passes the call on.
            hidden = k > ours[0] and places[k].startswith(("torchweft.", "torch.", "contextlib"))
        if not hidden:
            entry.tb_next = after
            after = entry
    error.__traceback__ = after


_NO_MEMORY = (
    "torchweft: recomputation takes less memory, but a second forward: give the Pipe checkpoint='except_last' "
    "or 'always', or a list with such a mode for this stage; or cut the mini-batch into more chunks, or give the "
    "device fewer layers (balance=)"
)
# Advice by a part of PyTorch's message, for operations that work in a lone layer but not inside a segment.
_ADVICE = {
    "out of memory": _NO_MEMORY,  # of an accelerator
    "not enough memory: you tried to allocate": _NO_MEMORY,  # of the CPU
    "cannot register a hook on a tensor that doesn't require gradient": (
        "torchweft: the first forward of a micro-batch that will be recomputed runs without a graph; write "
        "`if y.requires_grad: y.register_hook(...)`, or use checkpoint='never' for this stage"
    ),
    "CUDA error": (
        "torchweft: a GPU reports errors with a delay, perhaps not at the stage that caused them; run again with the "
        "environment variable CUDA_LAUNCH_BLOCKING=1 to see the place"
    ),
    "a leaf Variable that requires grad": (
        "torchweft: the input of a stage is a leaf that other stages can hold; use the out-of-place form of the "
        "stage's first operation (inplace=False), or let it write into a clone"
    ),
    "checkpoint is incompatible with .grad()": (
        "torchweft: stages compute gradients by torch.autograd.grad; use use_reentrant=False in "
        "torch.utils.checkpoint, or the checkpoint= of the Pipe instead"
    ),
}


def add_advice(error: BaseException) -> None:
    """Add a remedy to an error of PyTorch that gives none to the author of a layer."""
    for words, advice in _ADVICE.items():
        if isinstance(error, RuntimeError) and words in str(error):
            error.add_note(advice)
