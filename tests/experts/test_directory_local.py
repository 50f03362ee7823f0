"""What only the directory of this process promises: no thread, and snapshots that cost nothing twice."""

import threading
import time

import pytest

from weft.experts.discovery import AwayError, LocalDirectory


def test_it_has_no_thread() -> None:
    before = threading.active_count()
    directory = LocalDirectory()
    directory.declare("a", "x:1", 0.01)
    assert threading.active_count() == before
    directory.close()


def test_a_snapshot_is_made_once_for_each_revision_and_lasts_while_the_directory_is_away() -> None:
    directory = LocalDirectory()
    lease, watch = directory.declare("a", "x:1", 60.0), directory.watch()
    first = watch.snapshot()
    directory.renew(lease)
    assert watch.snapshot() is first
    directory.close()
    assert watch.snapshot() is first and watch.away_seconds > 0
    with pytest.raises(AwayError):
        directory.watch()


def test_a_thousand_experts_are_found_in_a_millisecond_or_so() -> None:
    directory = LocalDirectory()
    directory.declare([f"ffn.{i}.{j}" for i in range(32) for j in range(32)], "x:1", 60.0)
    snapshot = directory.get("ffn.")
    start = time.thread_time()
    for i in range(32):
        assert len(snapshot.search(f"ffn.{i}.")) == 32
    assert time.thread_time() - start < 0.1  # the type checks of the tests are in it
    directory.close()
