"""Where skip tensors wait between their stash and their pops.

A skippable layer knows nothing of stages: it hands its stashes to the current tracker of its thread and
asks the same tracker for its pops. The plain `SkipTracker` is a dictionary and serves a bare
`nn.Sequential`. A pipeline puts its own tracker in place while it runs a stage, and that one routes the
tensors between stages.

    stash layer ──save──> tracker of the thread ──load──> pop layer (any number of them)
                              ^
                       use_skip_tracker(...)

How long the plain tracker keeps a tensor: see `SkipTracker`.
"""

import threading
import weakref
from collections.abc import Collection, Generator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from weft.core.errors import SkipError, SkipWiringError
from weft.pipeline.skip import readers
from weft.pipeline.skip.namespace import Key, Namespace, describe


class _Kept:
    """One stashed value and who has read it."""

    __slots__ = ("freed", "owner", "reads", "value")

    def __init__(self, value: Tensor | None) -> None:
        self.value = value
        self.freed = False
        self.reads: readers.Reads = {}
        self.owner: weakref.ref[nn.Module] | None = None

    def free(self) -> None:
        self.value, self.freed = None, True


class SkipTracker:
    """Keeps skip tensors of the layers that run in one thread, outside of a pipeline.

    A tensor is freed when every living layer that declares a pop of its key has read it. While some reader
    has not shown yet how often it reads (which is so until the second stash of the key), or if one reads
    several times, the tensor stays until the next stash of the key, or until the layer that stashed it is
    gone.

    Subclasses may route tensors elsewhere: override `save`, `load` and `copy`, and `done` if they free by
    count.
    """

    def __init__(self) -> None:
        self._kept: dict[Key, _Kept] = {}

    def save(self, ns: Namespace | None, name: str, value: Tensor | None) -> None:
        """Keep a value (a tensor or None) under this key; a former one is dropped."""
        key = (ns, name)
        former = self._kept.get(key)
        if former is not None:
            readers.learn(key, former.reads)
        self._kept[key] = _Kept(value)

    def load(self, ns: Namespace | None, name: str) -> Tensor | None:
        """The value under this key. Raises SkipError if there is none."""
        key = (ns, name)
        kept = self._kept.get(key)
        if kept is None:
            raise SkipError(
                f"{describe(key)} was popped but never stashed: a layer that stashes it must run before, "
                "in the same thread and namespace"
            )
        if kept.freed:
            readers.distrust(key)
            raise SkipError(
                f"{describe(key)} was popped, but its tensor was freed when every layer known to read it "
                "had done so: run the layer that stashes it first; from now on the tensor is kept until then"
            )
        return kept.value

    def copy(self, ns: Namespace | None, name: str, device: torch.device | str) -> None:
        """Send a value to another device. Only a pipeline's tracker can; this one raises SkipWiringError."""
        raise SkipWiringError(
            f"cannot copy {describe((ns, name))} to {device}: only a pipeline's tracker copies skip tensors "
            "between devices; wrap the model in a Pipe, or keep all its layers on one device"
        )

    def done(self, layer: nn.Module, *, stashed: Collection[Key], popped: Collection[Key]) -> None:
        """A layer's forward has ended, having stashed and popped these keys. Frees what nobody will read."""
        for key in stashed:
            kept = self._kept.get(key)
            if kept is not None:
                kept.owner = weakref.ref(layer, partial(_forget, weakref.ref(self), key))
        for key in popped:
            kept = self._kept.get(key)
            if kept is None or kept.freed or key in stashed:
                continue
            ref = weakref.ref(layer)
            kept.reads[ref] = kept.reads.get(ref, 0) + 1
            if readers.all_done(key, kept.reads):
                kept.free()

    def _drop(self, key: Key, owner: weakref.ref[nn.Module]) -> None:
        kept = self._kept.get(key)
        if kept is not None and kept.owner is owner:
            del self._kept[key]


def _forget(tracker: weakref.ref[SkipTracker], key: Key, owner: weakref.ref[nn.Module]) -> None:
    """The layer that stashed is gone, and its model with it: nobody will read the tensor."""
    alive = tracker()
    if alive is not None:
        alive._drop(key, owner)  # pyright: ignore[reportPrivateUsage]


class _TrackerOfThread(threading.local):
    """A thread-local runs its `__init__` once per thread, on first use."""

    def __init__(self) -> None:
        self.tracker = SkipTracker()


_current = _TrackerOfThread()


def current_skip_tracker() -> SkipTracker:
    """The tracker of this thread: a plain one, unless `use_skip_tracker` put another in its place."""
    return _current.tracker


@contextmanager
def use_skip_tracker(tracker: SkipTracker) -> Generator[SkipTracker]:
    """Make `tracker` the current one of this thread; the former one comes back, also on error."""
    former, _current.tracker = _current.tracker, tracker
    try:
        yield tracker
    finally:
        _current.tracker = former
