"""Model of the replication protocol: its real classes, with a simulated clock, directory, network and disk.

    server 0, 1, 2      ReplicationManager, Replica, Leadership, Fence; an expert is the list of its steps
    events              time passes; a server is paused, cut off or restarted; it renews its lease and attends to the
                        expert; a client asks for a step; a state is sent, lost, repeated or late; a checkpoint is
                        begun, or reaches the shared disk; an administrator returns the expert to an older checkpoint

After every event: at most one server can step, a token belongs to one server and names one history, and a server that
can step has every step that was acknowledged as durable. ``python -m tests.experts.replication_model 10000`` runs that
many histories.
"""

import sys
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.experts.concurrency import FakeClock
from torchweft.core.errors import WeftError
from torchweft.experts.checkpoint import Checkpoint
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.errors import (
    DirectoryError,
    DirectoryUnavailableError,
    LeaseLostError,
    NotOwnerError,
    UnreachableError,
)
from torchweft.experts.expert import ExpertBackend
from torchweft.experts.replication import Replica, ReplicaOptions, ReplicationManager
from torchweft.experts.replication.replica import StateVersion, newer
from torchweft.experts.wire import LIMITS

UID, TTL = "f", 5.0
SERVERS = st.integers(0, 2)


class ListedSteps(ExpertBackend):
    """An expert whose state is the list of the steps that were applied to it."""

    def __init__(self) -> None:
        self.name, self.content = UID, list[int]()
        self.idempotency = SimpleNamespace(snapshot=lambda: lambda: None, load_state_dict=lambda state: None)  # type: ignore[assignment]
        updates = SimpleNamespace(require_permit=lambda check: setattr(self, "permit", check))
        self.executor = SimpleNamespace(lock=threading.RLock(), updates=updates, stepper=SimpleNamespace(revision=0))  # type: ignore[assignment]
        self.permit: Any = None

    @property
    def steps(self) -> int:
        return len(self.content)

    def check_weights(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"content": list(self.content), "backward_batches": 0}

    def load_state_dict(self, state: dict[str, Any], *, lossy: bool = False) -> list[str]:
        self.content = list(state["content"])
        return []


class Disk:
    """The checkpoints of a folder that all servers share."""

    def __init__(self) -> None:
        self.written: list[Checkpoint] = []

    def load_newest(self, uid: str) -> Checkpoint | None:
        return self.written[-1] if self.written else None

    def unused(self, *_: object, **__: object) -> Any:
        raise NotImplementedError

    lock = encode = write = has = load = unused


class Reachable(LocalDirectory):
    """The directory as one server sees it."""

    def __init__(self, shared: LocalDirectory) -> None:
        self.shared, self.is_cut = shared, False

    def _through(self, act: Any, *arguments: Any) -> Any:
        if self.is_cut:
            raise DirectoryUnavailableError("cut off")
        return act(*arguments)

    def declare(self, uids: Any, address: str, ttl: float) -> Any:
        return self._through(self.shared.declare, uids, address, ttl)

    def renew(self, lease: Any) -> None:
        self._through(self.shared.renew, lease)

    def claim(self, uid: str, lease: Any) -> Any:
        return self._through(self.shared.claim, uid, lease)

    def release(self, ownership: Any) -> None:
        self._through(self.shared.release, ownership)

    def get(self, prefix: str = "") -> Any:
        return self._through(self.shared.get, prefix)


class Node(ReplicationManager):
    """One server."""

    def __init__(self, number: int, model: "Replication") -> None:
        self.directory = Reachable(model.directory)
        super().__init__(ReplicaOptions(), self.directory, LIMITS)
        self.model, self._address, self.until_time = model, f"10.0.0.{number}:1", float("-inf")
        self.lease: Any = None
        self._heartbeat = SimpleNamespace(until=self.lasts_until)  # type: ignore[assignment]
        self.snapshot: Any = None
        self.saving: Checkpoint | None = None
        self.backend = ListedSteps()
        self.replica = Replica(self.backend, self.until, store=model.disk)  # type: ignore[arg-type]
        found = model.disk.load_newest(UID)
        if found is not None:  # as a server that starts
            self.backend.load_state_dict(found.state)
            self.replica.state.confirm(found.extra["token"])

    def lasts_until(self, lease: Any) -> float:
        return self.until_time if self.lease is not None and lease.number == self.lease.number else float("-inf")

    def renew(self) -> None:
        now = self.model.clock.now
        try:
            if self.lease is None:
                self.lease = self.directory.declare([UID], self._address, TTL)
            else:
                self.directory.renew(self.lease)
            self.until_time = now + 0.9 * TTL
        except LeaseLostError:
            self.lease, self.until_time = None, float("-inf")
        except DirectoryUnavailableError:
            pass

    def attend(self) -> None:
        with suppress(DirectoryUnavailableError):  # the last snapshot is still used
            self.snapshot = self.directory.get()
        if self.snapshot is None:
            return
        try:
            self._attend_replica(self.replica, self.snapshot, self.lease)
        except WeftError as error:
            self.replica.record_failure(error)

    def _stream_from(self, address: str) -> Any:
        return SimpleNamespace(fetch_newest=lambda replica, token, seconds: self.fetch(address, replica, token))

    def fetch(self, address: str, replica: Replica, token: int) -> bool:
        (other,) = [node for node in self.model.nodes if node._address == address]
        if other in self.model.paused or self.directory.is_cut or other.directory.is_cut:
            raise UnreachableError("no answer")
        if not (newer(other.replica.version, replica.version, token) and other.replica.state.is_loaded):
            return False
        encoded = other.replica.state.encode()
        assert encoded is not None
        return replica.load(*encoded, taking_over=True)


class Replication(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        package = "torchweft.experts.replication"
        self.clock = FakeClock().install(self.patch, f"{package}.replica", f"{package}.manager")
        self.directory, self.disk = LocalDirectory(clock=self.clock.monotonic), Disk()
        self.nodes = [Node(number, self) for number in range(3)]
        self.paused = list[Node]()
        self.flying = list[tuple[int, StateVersion, bytes]]()  # states on their way, with their receiver
        self.steps = 0
        self.owners: dict[int, str] = {}  # by token
        self.histories: dict[tuple[int, int], int] = {}  # the step that was applied, by token and number
        self.durable = list[int]()

    def teardown(self) -> None:
        self.patch.undo()

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 6.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(which=SERVERS)
    def pause_or_wake(self, which: int) -> None:
        node = self.nodes[which]
        (self.paused.remove if node in self.paused else self.paused.append)(node)

    @rule(which=SERVERS)
    def cut_or_mend(self, which: int) -> None:
        directory = self.nodes[which].directory
        directory.is_cut = not directory.is_cut

    @rule(which=SERVERS)
    def restart(self, which: int) -> None:
        if self.nodes[which] in self.paused:
            self.paused.remove(self.nodes[which])
        self.nodes[which] = Node(which, self)

    @rule(which=SERVERS, renews=st.booleans())
    def work(self, which: int, renews: bool) -> None:
        if (node := self.nodes[which]) not in self.paused:
            if renews:
                node.renew()
            node.attend()

    @rule()
    def all_work(self) -> None:
        for which in range(3):
            self.work(which, renews=True)

    @rule(which=SERVERS)
    def step(self, which: int) -> None:
        node = self.nodes[which]
        try:
            node.replica.leadership.check(steps=True)
            node.backend.permit()
        except NotOwnerError:
            return
        self.steps += 1
        node.backend.content.append(self.steps)
        token = node.replica.leadership.token
        assert self.owners.setdefault(token, node._address) == node._address, "two owners apply under one fence"
        place = token, node.backend.steps
        assert self.histories.setdefault(place, self.steps) == self.steps, "one token has two histories"

    @rule(which=SERVERS, to=SERVERS)
    def send(self, which: int, to: int) -> None:
        node = self.nodes[which]
        if which != to and node not in self.paused and node.replica.leadership.role == "owner":
            encoded = node.replica.state.encode()
            assert encoded is not None
            self.flying.append((to, encoded[0], bytes(encoded[1])))

    @rule()
    def follow(self) -> None:
        for which in range(3):
            for to in range(3):
                before = len(self.flying)
                self.send(which, to)
                if len(self.flying) > before:
                    self.deliver(before, repeated=False, lost=False)

    @rule(place=st.integers(0, 5), repeated=st.booleans(), lost=st.booleans())
    def deliver(self, place: int, repeated: bool, lost: bool) -> None:
        if place < len(self.flying):
            to, version, data = self.flying[place]
            if not repeated:
                del self.flying[place]
            if not lost and self.nodes[to] not in self.paused:
                with suppress(WeftError):
                    self.nodes[to].replica.load(version, data)

    @rule(which=SERVERS)
    def begin_save(self, which: int) -> None:
        node = self.nodes[which]
        if node not in self.paused and node.replica.leadership.may_step:
            extra = {"token": node.replica.version.token, "records": None}
            node.saving = Checkpoint(UID, node.backend.steps, node.backend.state_dict(), extra, "")

    @rule(which=SERVERS)
    def finish_save(self, which: int) -> None:
        node = self.nodes[which]
        if node not in self.paused and node.replica.leadership.may_step and node.saving is not None:
            self.disk.written.append(node.saving)
            self.durable, node.saving = node.saving.state["content"], None

    @rule(which=SERVERS, place=st.integers(0, 3))
    def roll_back(self, which: int, place: int) -> None:
        node = self.nodes[which]
        if node in self.paused or place >= len(self.disk.written):
            return
        state = self.disk.written[place].state
        try:
            ownership = node.claim_again(node.replica)
        except (NotOwnerError, DirectoryError):
            return
        node.replica.replace_state(ownership, lambda: node.backend.load_state_dict(state))
        node.saving = None
        self.durable = list(state["content"])  # later steps were given up

    @invariant()
    def one_server_can_step(self) -> None:
        able = [node for node in self.nodes if node.replica.leadership.may_step]
        assert len(able) <= 1, "two servers can step"
        for node in able:
            assert node.backend.content[: len(self.durable)] == self.durable, "a durable step is lost"


def check_histories(count: int, length: int = 50) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        Replication,
        settings=settings(
            max_examples=count, stateful_step_count=length, deadline=None, suppress_health_check=checks, database=None
        ),
    )


if __name__ == "__main__":
    check_histories(int(sys.argv[1]))
