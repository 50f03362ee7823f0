"""What only the directory of this process promises: bounded memory, and no thread."""

import threading
import time

import pytest

from weft.core.errors import UsageError
from weft.experts.discovery import LocalDirectory, WatchLostError


def test_it_has_no_thread() -> None:
    before = threading.active_count()
    directory = LocalDirectory()
    directory.declare("a", "x:1", 0.01)
    assert threading.active_count() == before
    directory.close()


def test_a_watch_that_is_too_far_behind_is_lost_and_memory_stays_flat() -> None:
    directory = LocalDirectory(history=10)
    slow, start = directory.watch(), directory.get().revision
    for _ in range(100):
        directory.withdraw(directory.declare("a", "x:1", 5.0))
    assert len(directory._events) < 20
    with pytest.raises(WatchLostError, match=r"stopped at revision 0.*get a new snapshot"):
        slow.next(timeout=0.0)
    with pytest.raises(WatchLostError):
        directory.watch(after=start).next(timeout=0.0)
    near = directory.watch(after=directory.get().revision - 10)
    assert [near.next(timeout=0.0) is not None for _ in range(11)] == [True] * 10 + [False]
    directory.close()


def test_a_history_must_hold_something() -> None:
    with pytest.raises(UsageError, match="history is 0"):
        LocalDirectory(history=0)


def test_a_thousand_experts_are_found_in_a_millisecond_or_so() -> None:
    directory = LocalDirectory()
    directory.declare([f"ffn.{i}.{j}" for i in range(32) for j in range(32)], "x:1", 60.0)
    snapshot = directory.get("ffn.")
    start = time.thread_time()
    for i in range(32):
        assert len(snapshot.search(f"ffn.{i}.")) == 32
    assert time.thread_time() - start < 0.1  # the type checks of the tests are in it
    directory.close()
