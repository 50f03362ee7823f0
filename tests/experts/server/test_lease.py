"""Renewal of leases in time, and owners that stop before their lease ends."""

import threading
import time
from types import SimpleNamespace

import pytest

from tests.experts.concurrency import wait_until
from tests.experts.expert_cases import fussy_backend
from tests.experts.server.replica_cases import expert, make
from torchweft.experts.client.status import shown
from torchweft.experts.discovery import Lease, LocalDirectory
from torchweft.experts.discovery.registration import LeaseHeartbeat
from torchweft.experts.errors import DirectoryUnavailableError
from torchweft.experts.server import Server, ServerOptions
from torchweft.experts.server.background import PeriodicTask


def test_renewal_does_not_wait_for_a_read_of_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    directory, gate, renewals = LocalDirectory(), threading.Event(), list[Lease]()
    renew = directory.renew
    monkeypatch.setattr(directory, "renew", lambda lease: (renewals.append(lease), renew(lease)))
    with Server([fussy_backend()], directory=directory, options=ServerOptions(lease_seconds=0.6)):
        with monkeypatch.context() as patch:
            patch.setattr(directory, "get", lambda prefix="": gate.wait(60.0))
            before = len(renewals)
            wait_until(lambda: len(renewals) >= before + 4)
        gate.set()


def test_failed_renewal_is_retried_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals are measured from the start of a turn."""
    now, pauses = [0.0], list[float]()

    class RecordedWaits(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            return len(pauses) > 5  # ends the loop

    def act() -> None:
        if len(pauses) in (1, 2):
            raise DirectoryUnavailableError("away")
        now[0] += 0.125

    monkeypatch.setattr("torchweft.experts.server.background.time", SimpleNamespace(monotonic=lambda: now[0]))
    task = PeriodicTask("lease", 0.5, 0.05, act)
    task._stop = RecordedWaits()
    task._run_turns()
    assert pauses == pytest.approx([0.5, 0.05, 0.05, 0.375, 0.375, 0.375])  # a tenth of the interval after a failure
    assert task.last_failure is None


def test_owner_stops_before_its_lease_ends(directory: LocalDirectory) -> None:
    """The statistics report late renewals."""
    heartbeat = LeaseHeartbeat(directory, lambda: ["a"], "here:1", 60.0)
    assert heartbeat.statistics() is None
    start = time.monotonic()
    heartbeat.turn()
    lease = heartbeat.lease
    assert lease is not None
    assert heartbeat.until(lease) < start + 0.95 * 60.0
    assert heartbeat.statistics().latest == 0.0  # type: ignore[union-attr]
    heartbeat._due = time.monotonic() - 7.0  # it should have been renewed 7 s ago
    heartbeat.turn()
    seen = heartbeat.statistics()
    assert seen is not None and 7.0 <= seen.late == seen.latest < 8.0 and 50.0 < seen.left <= 54.0
    heartbeat.turn()
    assert heartbeat.statistics().late == 0.0 and heartbeat.statistics().latest >= 7.0  # type: ignore[union-attr]


def test_status_shows_the_lease() -> None:
    with make(LocalDirectory(), expert()) as server:
        line = next(line for line in shown(server.status()).splitlines() if line.startswith("lease: "))
        assert "s left, last renewed 0.0" in line
