"""Counts of the last minute: differences between a status and samples that are some seconds apart."""

from typing import Any

import pytest

from tests.experts.status_page.panel_cases import layer, status, train
from torchweft.experts.server import Server
from torchweft.experts.status_page.recent import EXPERT_COLUMNS, PERIOD, WINDOW, RecentCounters


def at(seconds: float, answered: int, **pool: Any) -> dict[str, Any]:
    """Status of a server of this age with an expert `a` that answered so many tasks, each in half a second."""
    result = status(seconds=seconds)
    forward = next(iter(result["experts"]["a"]["pools"].values()))
    forward.update(answered=answered, answer_seconds=0.5 * answered, **pool)
    result["experts"]["a"]["forward_batches"] = answered
    return result


def row(recent: RecentCounters, now: dict[str, Any]) -> dict[str, Any]:
    [cells] = recent.since(now)["rows"]
    return dict(zip([name for name, _ in EXPERT_COLUMNS], cells, strict=True))


def test_young_server_counts_from_its_start() -> None:
    recent = RecentCounters()
    assert recent.since(at(0.0, 0))["seconds"] == 0.0
    assert row(recent, at(0.0, 0))["forwards"] is None and row(recent, at(0.0, 0))["latency"] is None
    shown = row(recent, at(20.0, 40))
    assert (shown["forwards"], shown["latency"], shown["steps"], shown["saved"]) == (2.0, 500.0, 0, None)


@pytest.mark.long
def test_counts_cover_the_last_minute() -> None:
    """The window is at most one period longer. A slowdown after ten minutes shows within a minute."""
    recent, seconds = RecentCounters(), 0.0
    while seconds < 600:
        recent.note(at(seconds, int(100 * seconds)))
        seconds += PERIOD
        window = recent.since(at(seconds, int(100 * seconds)))["seconds"]
        assert window == pytest.approx(min(seconds, window)) and window <= WINDOW + PERIOD
        assert window >= min(seconds, WINDOW)
    fast = at(seconds, 60_000)
    recent.note(fast)
    slow = at(seconds + WINDOW, 60_006)
    next(iter(slow["experts"]["a"]["pools"].values()))["answer_seconds"] = 30_000 + 6 * 10.0
    recent.note(slow)
    assert row(recent, slow)["latency"] == 10_000 and row(recent, slow)["forwards"] == 0.1


def test_quiet_minute_shows_no_latency_and_no_old_failures() -> None:
    recent = RecentCounters()
    before = at(10.0, 5, failed={"module": 3}, refused={"overload": 2})
    assert (row(recent, before)["failed"], row(recent, before)["refused"]) == (3, 2)
    recent.note(before)
    after = {**before, "seconds": 80.0}
    shown = row(recent, after)
    assert (shown["failed"], shown["refused"], shown["latency"], shown["forwards"]) == (0, 0, None, 0.0)


def test_refused_gradient_counts_once() -> None:
    status_now = at(10.0, 5, failed={"gradient": 3, "module": 1}, expired=2)
    status_now["experts"]["a"]["refused_gradients"] = {"gradient": 3}
    shown = row(RecentCounters(), status_now)
    assert (shown["refused"], shown["failed"]) == (3, 3)


def test_expert_of_an_old_name_counts_from_zero() -> None:
    recent = RecentCounters()
    recent.note(at(10.0, 1000))
    assert recent.since(at(20.0, 7))["experts"]["a"]["answered"] == 7


def test_expert_that_came_late_or_left_is_counted() -> None:
    recent = RecentCounters()
    recent.note(status(["gone"], seconds=10.0))
    counts = recent.since(at(20.0, 7))
    assert set(counts["experts"]) == {"a"} and counts["experts"]["a"]["answered"] == 7


def test_latency_is_the_time_of_real_tasks() -> None:
    recent = RecentCounters()
    with Server([layer("a")]) as server:
        train(server, "a", 3)
        status_now = server.status()
    shown = row(recent, status_now)
    assert 0.0 < shown["latency"] < 60_000 and shown["backwards"] > 0.0
    counts = recent.since(status_now)
    assert counts["experts"]["a"]["answered"] == 6 and counts["devices"]["cpu"]["batches"] >= 5
