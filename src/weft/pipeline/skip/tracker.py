"""Where skip tensors wait between their stash and their pops, and how they are addressed.

A skippable layer knows nothing of stages: it hands its stashes to the current tracker of its thread, and asks the same
tracker for its pops. The plain `SkipTracker` is a dictionary and serves a bare `nn.Sequential`. A pipeline puts its own
tracker in place while it runs a stage, and that one routes the tensors between stages.

    stash layer ──save──> tracker of the thread ──load──> pop layer (any number of them)
"""

import threading
import uuid
import weakref
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, total_ordering
from itertools import count
from typing import TypeAlias

import torch
from torch import Tensor, nn

from weft.core.errors import SkipError, SkipWiringError

_serials = count()


@total_ordering
@dataclass(frozen=True, slots=True, repr=False)
class Namespace:
    """A place for skip names where they meet no others, such as those of a second copy of a block.

    Two namespaces are equal only if one is a copy of the other: by `copy`, `copy.deepcopy` or pickling, also across
    processes. They are ordered by creation; ``None``, of everyone who asked for none, comes before all of them.

    Example:
        >>> inner = weft.Namespace()
        >>> inner == weft.Namespace()
        False
    """

    serial: int = field(init=False, default_factory=lambda: next(_serials))
    unique: int = field(init=False, default_factory=lambda: uuid.uuid4().int)

    def __lt__(self, other: object) -> bool:
        if isinstance(other, Namespace):
            return (self.serial, self.unique) < (other.serial, other.unique)
        return False if other is None else NotImplemented

    def __repr__(self) -> str:
        return f"Namespace#{self.serial}"


Key: TypeAlias = tuple[Namespace | None, str]


def describe(key: Key) -> str:
    """A key as it stands in error messages."""
    ns, name = key
    return repr(name) if ns is None else f"{name!r} in {ns!r}"


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Kept:
    """One stashed value. It has an identity, so that the end of its layer takes no later value along."""

    value: Tensor | None
    stasher: weakref.ref[nn.Module] | None = None


class SkipTracker:
    """Keeps skip tensors of the layers that run in one thread, outside of a pipeline.

    A tensor stays until the next stash of its key, or until the layer that stashed it or the tracker is gone. It is not
    freed at a pop, since nobody here can know which pop is the last: a layer may stand at two places of the model, or
    run again in backward under `torch.utils.checkpoint` (it then reads the latest stash of the key). Subclasses may
    route tensors elsewhere: override `save`, `load` and `copy`.
    """

    def __init__(self) -> None:
        self._kept: dict[Key, _Kept] = {}
        self._lock = threading.RLock()  # a layer may end in any thread, also while this one holds the lock

    def save(self, ns: Namespace | None, name: str, value: Tensor | None) -> None:
        """Keep a value (a tensor or None) under this key; a former one is dropped."""
        with self._lock:
            self._kept[ns, name] = _Kept(value)

    def load(self, ns: Namespace | None, name: str) -> Tensor | None:
        """The value under this key, as often as it is asked for. Raises SkipError if there is none."""
        kept = self._kept.get((ns, name))
        if kept is None:
            raise SkipError(
                f"{describe((ns, name))} was popped but never stashed: a layer that stashes it must run before, "
                "in the same thread and namespace. (A layer that pops cannot stand inside torch.utils.checkpoint in "
                "a Pipe: use the Pipe's checkpoint=, or call it inside the layer's forward)"
            )
        return kept.value

    def copy(self, ns: Namespace | None, name: str, device: torch.device | str) -> None:
        """Send a value to another device. For subclasses that can; this one raises SkipWiringError."""
        raise SkipWiringError(
            f"cannot copy {describe((ns, name))} to {device}: this tracker keeps skip tensors where they were "
            "stashed; wrap the model in a Pipe, which brings them to their readers, or keep all layers on one device"
        )

    def stashed_by(self, layer: nn.Module, keys: Iterable[Key]) -> None:
        """The values that are kept under these keys now go when this layer goes."""
        for key in keys:
            kept = self._kept.get(key)
            if kept is not None:
                forget = partial(self._forget, weakref.ref(self), key, weakref.ref(kept))
                kept.stasher = weakref.ref(layer, forget)

    @staticmethod
    def _forget(tracker: "weakref.ref[SkipTracker]", key: Key, kept: weakref.ref[_Kept], _: object) -> None:
        """The layer that stashed is gone, and its model with it: nobody will read the tensor."""
        alive, gone = tracker(), kept()
        if alive is None or gone is None:
            return
        with alive._lock:
            if alive._kept.get(key) is gone:
                del alive._kept[key]


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
