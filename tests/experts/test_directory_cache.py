"""A mirror follows the directory, and serves on while it is away."""

import threading
import time

import pytest

from weft.experts.discovery import AwayError, DirectoryCache, Event, LocalDirectory, Snapshot, Watch


class Flaky(LocalDirectory):
    """A directory that can be away."""

    away = False
    tries = 0

    def get(self, prefix: str = "") -> Snapshot:
        self.tries += 1
        if self.away:
            raise AwayError("away")
        return super().get(prefix)

    def _expire(self) -> None:
        if self.away:
            raise AwayError("away")
        super()._expire()


def test_a_mirror_is_always_what_the_directory_holds() -> None:
    directory = LocalDirectory()
    with DirectoryCache(directory, "a") as mirror:
        assert len(mirror.snapshot()) == 0
        lease = directory.declare(["a1", "b1"], "x:1", 60.0)
        assert mirror.snapshot().addresses("a1") == ("x:1",)
        ownership = directory.claim("a1", lease)
        assert mirror.snapshot().owner("a1") == ownership
        directory.withdraw(lease)
        seen, held = mirror.snapshot(), directory.get("a")
        assert (seen.experts, seen.owners) == (held.experts, held.owners) == ({}, {})
        assert mirror.away_seconds == 0
    directory.close()


def test_a_mirror_serves_while_the_directory_is_away_and_catches_up_after() -> None:
    now = [0.0]
    directory = Flaky(clock=lambda: now[0])
    directory.declare("a", "x:1", 1000.0)
    mirror = DirectoryCache(directory, retry=0.5, clock=lambda: now[0])
    directory.away = True
    tries = directory.tries
    for _ in range(60):
        now[0] += 1 / 8
        assert mirror.snapshot().addresses("a") == ("x:1",)
    assert 10 <= directory.tries - tries <= 16  # every half second, however often it is asked
    assert mirror.away_seconds > 7
    directory.away = False
    directory.declare("b", "y:1", 1000.0)
    now[0] += 1
    assert mirror.snapshot().uids == ("a", "b") and mirror.away_seconds == 0
    mirror.close()
    directory.close()


def test_events_that_were_read_before_the_directory_went_are_not_lost() -> None:
    directory = Flaky()
    mirror = DirectoryCache(directory)
    directory.declare(["a", "b"], "x:1", 60.0)
    watch: Watch = mirror._watch
    first, calls = watch.next, [0]

    def failing(timeout: float | None = None) -> Event | None:
        calls[0] += 1
        directory.away = calls[0] > 1
        return first(timeout)

    watch.next = failing
    assert mirror.snapshot().uids == ("a",)
    directory.away = False
    mirror._next_try = 0.0
    assert mirror.snapshot().uids == ("a", "b")
    mirror.close()
    directory.close()


def test_a_mirror_that_missed_events_takes_a_new_snapshot() -> None:
    directory = LocalDirectory(history=4)
    mirror = DirectoryCache(directory)
    for number in range(50):
        directory.declare(f"e{number}", "x:1", 60.0)
    assert len(mirror.snapshot()) == 50
    directory.declare("last", "x:1", 60.0)
    assert "last" in mirror.snapshot()
    mirror.close()
    directory.close()


def test_a_closed_mirror_or_directory_leaves_the_last_snapshot() -> None:
    directory = LocalDirectory()
    directory.declare("a", "x:1", 60.0)
    mirror, other = DirectoryCache(directory), DirectoryCache(directory)
    mirror.close()
    directory.close()
    assert mirror.snapshot().uids == other.snapshot().uids == ("a",)
    with pytest.raises(AwayError):
        DirectoryCache(directory)
    other.close()


def test_a_directory_that_takes_long_to_be_away_delays_nobody_longer_than_a_moment() -> None:
    gate = threading.Event()

    class Slow(Flaky):
        def get(self, prefix: str = "") -> Snapshot:
            if self.away:
                gate.wait(20.0)
            return super().get(prefix)

    directory = Slow()
    directory.declare("a", "x:1", 60.0)
    mirror = DirectoryCache(directory, retry=0.0, max_wait=0.05)
    try:
        directory.away = True
        start = time.monotonic()
        for _ in range(20):
            assert mirror.snapshot().addresses("a") == ("x:1",)
        assert time.monotonic() - start < 15.0 and mirror.away_seconds > 0  # one try, which one of the 20 waited for
        directory.away = False
        directory.declare("b", "y:1", 60.0)
        gate.set()
        end = time.monotonic() + 10.0
        while "b" not in mirror.snapshot() and time.monotonic() < end:
            time.sleep(0.01)
        assert "b" in mirror.snapshot() and mirror.away_seconds == 0
    finally:
        gate.set()
        mirror.close()
        directory.close()


def test_a_watch_that_begins_after_the_end_is_closed() -> None:
    gate, begun = threading.Event(), threading.Event()
    watches: list[Watch] = []

    class Slow(Flaky):
        def watch(self, prefix: str = "", after: int | None = None) -> Watch:
            found = super().watch(prefix, after)
            if watches:
                begun.set()
                gate.wait(20.0)
            watches.append(found)
            return found

    directory = Slow()
    mirror = DirectoryCache(directory, retry=0.0, max_wait=0.05)
    directory.away = True
    mirror.snapshot()
    directory.away = False
    mirror.snapshot()
    assert begun.wait(10.0)
    threading.Timer(0.05, gate.set).start()
    mirror.close()
    end = time.monotonic() + 10.0
    while len(watches) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(AwayError):  # closed, or about to be
        while time.monotonic() < end:
            watches[-1].next(timeout=0.01)
    directory.close()


def test_the_end_does_not_wait_for_a_directory_that_does_not_answer() -> None:
    gate = threading.Event()

    class Silent(Flaky):
        def get(self, prefix: str = "") -> Snapshot:
            if self.away:
                assert gate.wait(60.0)
            return super().get(prefix)

    directory = Silent()
    mirror = DirectoryCache(directory, retry=0.0, max_wait=0.05)
    directory.away = True
    mirror.snapshot()
    mirror.close()
    trying = [each for each in threading.enumerate() if each.name == "weft-directory-cache"]
    assert trying and not gate.is_set()
    gate.set()
    for each in trying:
        each.join(10.0)
        assert not each.is_alive()
    directory.close()


def test_what_is_no_absence_reaches_a_caller() -> None:
    class Broken(Flaky):
        def get(self, prefix: str = "") -> Snapshot:
            if self.away:
                raise ZeroDivisionError
            return super().get(prefix)

    directory = Broken()
    with DirectoryCache(directory, retry=0.0, max_wait=5.0) as mirror:
        directory.away = True
        with pytest.raises(ZeroDivisionError):
            mirror.snapshot()
    directory.close()
