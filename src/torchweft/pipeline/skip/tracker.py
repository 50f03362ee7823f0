"""Storage of skip tensors between their stash and their pops, and their addresses.

A skippable layer does not know about stages. It passes its stashes to the current tracker of its thread, and gets its
pops from the same tracker. The plain `SkipTracker` is a dictionary and serves a bare `nn.Sequential`. A pipeline
installs its own tracker while it runs a stage, and routes the tensors between stages.

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

from torch import Tensor, nn

from torchweft.core.errors import SkipError

_serials = count()


@total_ordering
@dataclass(frozen=True, slots=True, repr=False)
class Namespace:
    """A namespace for skip names, so that equal names do not collide, e.g. those of two copies of a block.

    Two namespaces are equal only if one is a copy of the other: by `copy`, `copy.deepcopy` or pickling, also across
    processes. They are ordered by creation. ``None``, the default namespace, comes before all others.

    Example:
        >>> inner = weft.Namespace()
        >>> inner == weft.Namespace()
        False
    """

    serial: int = field(init=False, default_factory=lambda: next(_serials))
    # The serial alone would collide with that of a namespace that was pickled in another process.
    unique: int = field(init=False, default_factory=lambda: uuid.uuid4().int)

    def __lt__(self, other: object) -> bool:
        if isinstance(other, Namespace):
            return (self.serial, self.unique) < (other.serial, other.unique)
        return False if other is None else NotImplemented

    def __repr__(self) -> str:
        return f"Namespace#{self.serial}"


Key: TypeAlias = tuple[Namespace | None, str]


def describe(key: Key) -> str:
    ns, name = key
    return repr(name) if ns is None else f"{name!r} in {ns!r}"


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Kept:
    """One stashed value. It is compared by identity, so that the end of its layer does not remove a later value."""

    value: Tensor | None
    stasher: weakref.ref[nn.Module] | None = None


class SkipTracker:
    """Keeps skip tensors of the layers that run in one thread, outside of a pipeline, until the next stash of their
    key, or until the layer or the tracker is freed. A layer that runs again in backward reads the latest stash of the
    key. Subclasses can route tensors elsewhere by overriding `save` and `load`."""

    def __init__(self) -> None:
        self._kept: dict[Key, _Kept] = {}
        # Reentrant: a layer can be freed in any thread and at any moment, also while this thread holds the lock.
        self._lock = threading.RLock()

    def save(self, ns: Namespace | None, name: str, value: Tensor | None) -> None:
        with self._lock:
            self._kept[ns, name] = _Kept(value)

    def load(self, ns: Namespace | None, name: str) -> Tensor | None:
        """The value under this key, which stays there. Raises SkipError if the key has no value."""
        kept = self._kept.get((ns, name))
        if kept is None:
            raise SkipError(
                f"{describe((ns, name))} was popped but never stashed: a layer that stashes it must run before, "
                "in the same thread and namespace. (In a Pipe, a layer that pops cannot be inside of "
                "torch.utils.checkpoint: use the Pipe's checkpoint=, or call it inside the layer's forward)"
            )
        # Not freed at a pop, because the tracker cannot know which pop is the last.
        return kept.value

    def stashed_by(self, layer: nn.Module, keys: Iterable[Key]) -> None:
        # Freed with the layer, because a model that is dropped must not leave its skips in the thread.
        for key in keys:
            kept = self._kept.get(key)
            if kept is not None:
                forget = partial(self._forget, weakref.ref(self), key, weakref.ref(kept))
                kept.stasher = weakref.ref(layer, forget)

    @staticmethod
    def _forget(tracker: "weakref.ref[SkipTracker]", key: Key, kept: weakref.ref[_Kept], _: object) -> None:
        # The layer that stashed is freed, and its model with it, so no layer will read the tensor.
        alive, value = tracker(), kept()
        if alive is None or value is None:
            return
        with alive._lock:
            # Another layer can have stashed under this key since then.
            if alive._kept.get(key) is value:
                del alive._kept[key]


class _TrackerOfThread(threading.local):
    def __init__(self) -> None:
        self.tracker = SkipTracker()


_current = _TrackerOfThread()


def current_skip_tracker() -> SkipTracker:
    """The tracker of this thread: a plain one, unless `use_skip_tracker` replaced it."""
    return _current.tracker


@contextmanager
def use_skip_tracker(tracker: SkipTracker) -> Generator[SkipTracker]:
    """Make `tracker` the current one of this thread. The previous one is restored at the end, also after an error."""
    previous, _current.tracker = _current.tracker, tracker
    try:
        yield tracker
    finally:
        _current.tracker = previous
