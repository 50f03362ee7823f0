"""Units of a server: periodic tasks, the heartbeat in the directory, and the saved state of an expert."""

import threading
from pathlib import Path

import pytest
import torch

from tests.experts.concurrency import wait_until
from tests.experts.expert_cases import fussy_backend, rows, weights, work
from tests.experts.server.replica_cases import Away
from torchweft.experts.checkpoint import FolderCheckpointStore
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.discovery.registration import LeaseHeartbeat
from torchweft.experts.errors import DirectoryUnavailableError
from torchweft.experts.server import HostedExpert
from torchweft.experts.server.background import PeriodicTask
from torchweft.experts.wire.service import read_receipt


def test_periodic_task_continues_after_failures(caplog: pytest.LogCaptureFixture) -> None:
    """Only the first of consecutive failures is logged, and `stop` ends the task at once."""
    turns: list[int] = []
    done = threading.Event()

    def act() -> None:
        turns.append(1)
        if len(turns) in (2, 3):
            raise OSError(f"turn {len(turns)}: no space")
        if len(turns) == 5:
            done.set()

    task = PeriodicTask("checkpoints", 0.01, 0.01, act)
    task.start()
    assert done.wait(60) and task.stop(5.0) and task.stop(5.0)
    assert task.last_failure is None
    assert [record.getMessage() for record in caplog.records] == [
        "checkpoints: turn 2: no space; tried again every 0.01 s",
        "checkpoints: works again",
    ]


def test_second_stop_of_a_task_does_not_wait() -> None:
    entered, gate = threading.Event(), threading.Event()

    def act() -> None:
        entered.set()
        assert gate.wait(60.0)

    task = PeriodicTask("test", 0.001, 0.001, act)
    task.start()
    assert entered.wait(60.0)
    assert not task.stop(0.01) and not task.stop(1000.0)
    gate.set()
    wait_until(lambda: task.stop(1000.0))
    assert PeriodicTask("never started", 60.0, 60.0, act).stop(1.0)


def test_heartbeat_declares_again_after_a_lost_lease() -> None:
    now = [0.0]
    directory = Away(clock=lambda: now[0])
    heartbeat = LeaseHeartbeat(directory, lambda: ["a", "b"], "here:1", 5.0)
    for _ in range(3):
        heartbeat.turn()
        now[0] += 4.0
        assert directory.get().uids == ("a", "b")
    now[0] += 10.0
    assert directory.get().uids == ()
    directory.away = True
    with pytest.raises(DirectoryUnavailableError):
        heartbeat.turn()
    directory.away = False
    heartbeat.turn()
    assert directory.get().uids == ("a", "b") == heartbeat.listed
    for away in (False, True):
        directory.away = away
        heartbeat.withdraw()
    directory.away = False
    assert directory.get().uids == () == heartbeat.listed
    heartbeat.turn()
    assert directory.get().uids == ()


def test_heartbeat_follows_the_experts_without_a_gap() -> None:
    directory, uids = LocalDirectory(), ["a"]
    heartbeat = LeaseHeartbeat(directory, lambda: list(uids), "here:1", 5.0)
    heartbeat.turn()
    seen, change = list[tuple[str, ...]](), directory._change

    def changed() -> None:
        change()
        seen.append(tuple(uid for uid, _ in sorted(directory._entries)))

    directory._change = changed
    for now in (["a", "b"], ["b"], []):
        uids[:] = now
        heartbeat.turn()
        assert directory.get().uids == tuple(now)
    assert all("b" in listed for listed in seen[1:-1])  # without a gap


class Silent(LocalDirectory):
    """Directory that blocks every call until ``gate`` is set, while it is ``away``."""

    def __init__(self) -> None:
        super().__init__()
        self.away, self.gate, self.asked = False, threading.Event(), threading.Event()

    def _expire(self) -> None:
        if self.away:
            self.asked.set()
            assert self.gate.wait(60.0)
        super()._expire()


def test_late_declaration_is_withdrawn() -> None:
    directory = Silent()
    heartbeat = LeaseHeartbeat(directory, lambda: ["a"], "here:1", 60.0)
    directory.away = True
    turn = threading.Thread(target=heartbeat.turn)
    turn.start()
    assert directory.asked.wait(60.0)
    heartbeat.withdraw(patience=0.01)
    directory.gate.set()
    turn.join(60.0)
    wait_until(lambda: directory.get().uids == () == heartbeat.listed)
    heartbeat.turn()
    assert directory.get().uids == ()


def test_checkpoint_has_weights_and_keys_of_one_step(tmp_path: Path) -> None:
    first = fussy_backend()
    served = HostedExpert(first, FolderCheckpointStore(tmp_path), 5)
    served.restore()
    assert read_receipt(served.receipt()).durable == 0 and not served.save()
    answer = first.backward_pool.submit_task(rows(2, 0), rows(2, 1), client="c", key="k")
    work(first)
    assert read_receipt(served.receipt()).durable == 0
    assert served.save() and read_receipt(served.receipt()).durable == 1
    served.close()
    forgetful = HostedExpert(fussy_backend(), None, 5)
    forgetful.restore()
    assert not forgetful.save() and read_receipt(forgetful.receipt()).durable is None
    second = fussy_backend()
    again = HostedExpert(second, FolderCheckpointStore(tmp_path), 6)
    again.restore()
    again.close()
    assert weights(second) == weights(first) and again.restored == again.durable == 1
    repeated = second.backward_pool.submit_task(rows(2, 0), rows(2, 1), client="c", key="k")
    assert torch.equal(repeated.result(0)[0], answer.result(0)[0]) and second.steps == 1
