"""Who may still read a stashed tensor: the living layers that declare a pop of its key.

A layer in a bare `nn.Sequential` does not know how many others will read the tensor that it just read.
Declarations tell most of it: every living reader of the key must have had its turn. They cannot tell
whether the *same* layer stands at two places of the model, so this is learned: a reader is NEW until a
whole stash (from one stash of the key to the next) has shown how often it reads.

    NEW ──one read in a whole stash──> ONCE ──second read of one stash──> AGAIN
     └────────────────several reads of one stash──────────────────────────^

Only if all living readers are ONCE and have read is a tensor free before the next stash of its key.
"""

import threading
import weakref
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TypeAlias

from torch import nn

from weft.pipeline.skip.namespace import Key


class Habit(Enum):
    """How often a layer reads one stash."""

    NEW = "not known yet"
    ONCE = "once"
    AGAIN = "several times, or not foreseeable"


Reads: TypeAlias = dict[weakref.ref[nn.Module], int]

_lock = threading.Lock()
_readers: dict[Key, weakref.WeakKeyDictionary[nn.Module, Habit]] = {}


def enroll(layer: nn.Module, keys: Iterable[Key]) -> None:
    """From now on `layer` reads exactly these keys (it may have read others before)."""
    with _lock:
        for habits in _readers.values():
            habits.pop(layer, None)
        for key in keys:
            _readers.setdefault(key, weakref.WeakKeyDictionary())[layer] = Habit.NEW
        for key in [key for key, habits in _readers.items() if not habits]:
            del _readers[key]


def all_done(key: Key, reads: Reads) -> bool:
    """True if no living layer is known or suspected to read this stash again."""
    with _lock:
        habits = _readers.get(key)
        return habits is None or all(
            habit is Habit.ONCE and weakref.ref(layer) in reads for layer, habit in habits.items()
        )


def learn(key: Key, reads: Mapping[weakref.ref[nn.Module], int]) -> None:
    """A stash is over, and this is how often each layer has read it."""
    with _lock:
        habits = _readers.get(key)
        if habits is None:
            return
        for ref, count in reads.items():
            layer = ref()
            if layer is None or layer not in habits:
                continue
            if count > 1:
                habits[layer] = Habit.AGAIN
            elif habits[layer] is Habit.NEW:
                habits[layer] = Habit.ONCE


def distrust(key: Key) -> None:
    """A tensor was freed too early: keep this key's tensors until the next stash from now on."""
    with _lock:
        habits = _readers.get(key)
        for layer in list(habits or ()):
            _readers[key][layer] = Habit.AGAIN
