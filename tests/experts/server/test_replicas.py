"""Several servers with one expert: the owner steps it, and the others follow and can take over."""

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.experts.concurrency import wait_until
from tests.experts.expert_cases import adam, rows, weights
from tests.experts.server.replica_cases import (
    CLOSELY,
    PATIENCE,
    Away,
    Cut,
    backend_of,
    calling,
    die,
    expert,
    make,
    role,
    same_steps,
    step,
)
from torchweft.core.errors import UsageError
from torchweft.experts.checkpoint import FolderCheckpointStore
from torchweft.experts.client import NEVER, Connections, LocalTransport, RemoteExpert
from torchweft.experts.client.status import shown
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.errors import CommitError, NotOwnerError
from torchweft.experts.replication import ReplicaOptions
from torchweft.experts.server import Access, Grant, Role, Server
from torchweft.experts.server.config import build
from torchweft.experts.wire import Call, Header, Kind
from torchweft.experts.wire.service import StepReceipt


def backward(key: str, token: int = 0, seed: int = 0) -> Call:
    data = StepReceipt(None, 0, token).to_bytes() if token else b""
    header = Header(kind=Kind.BACKWARD, call_id=0, uid="fussy", client="c", key=key, data=data)
    return Call(header, [rows(2, seed), rows(2, seed + 1)])


def test_follower_copies_its_owner_and_never_steps(directory: LocalDirectory) -> None:
    with make(directory) as owner, make(directory, expert()) as follower, Connections(directory) as connections:
        assert (role(owner), role(follower)) == ("owner", "follower")
        remote = RemoteExpert("fussy", connections)
        for seed in range(5):
            step(remote, seed)
        wait_until(lambda: same_steps(owner, follower))
        assert backend_of(owner).steps == 5 and weights(backend_of(owner)) == weights(backend_of(follower))
        with LocalTransport(follower.handler()) as transport:
            for call in (backward("k"), Call(Header(kind=Kind.FORWARD, call_id=0, uid="fussy"), [rows(1, 0)])):
                error = transport.submit(call, PATIENCE).exception(PATIENCE)
                assert isinstance(error, NotOwnerError) and error.details["address"] == owner.address
        wait_until(lambda: owner.statistics().replicas["fussy"].followers == {follower.address: 0})  # at its next poll
        assert owner.statistics().replicas["fussy"].token > 0
        assert follower.statistics().replicas["fussy"].behind == 0
        assert f"follows {owner.address}" in shown(follower.status()) and "owner" in shown(owner.status())


def test_patterns_select_replicas(caplog: pytest.LogCaptureFixture) -> None:
    """A pattern that matches no expert is logged."""
    directory = LocalDirectory()
    with make(directory, expert(), expert("other"), replicas=ReplicaOptions(["oth*", "fnn.*"])) as server:
        assert list(server.statistics().replicas) == ["other"] and list(directory.get().owners) == ["other"]
        messages = [record.getMessage() for record in caplog.records if record.name == "torchweft.experts.server"]
    assert messages == ["replicas: pattern 'fnn.*' matches none of the experts here, such as 'fussy'"]
    for wrong in (["ffn.*", ""], "ffn"):
        with pytest.raises(UsageError, match=r"experts is .*, wanted a list of patterns"):
            ReplicaOptions(wrong)
    with pytest.raises(UsageError, match="directory="):
        Server([expert()], replicas=CLOSELY)


@pytest.mark.parametrize("replicas", [None, ReplicaOptions(["other"])])
def test_replica_of_an_unreplicated_expert_is_refused(replicas: ReplicaOptions | None) -> None:
    directory = LocalDirectory()
    with Server([expert()], directory=directory, replicas=replicas) as alone:
        words = rf"the server at {alone.address} lists expert 'fussy' without replicas="
        with pytest.raises(UsageError, match=words):
            make(directory).start()
        snapshot = directory.get()
        assert snapshot.addresses("fussy") == (alone.address,) and snapshot.owner("fussy") is None
    with make(directory) as second:  # after the first server has ended
        assert role(second) == "owner"


def test_follower_takes_over_and_steps_no_key_twice(directory: LocalDirectory) -> None:
    with make(directory) as first, make(directory, expert()) as second, Connections(directory) as connections:
        with LocalTransport(first.handler()) as transport:
            answer = transport.submit(backward("once"), PATIENCE).result(PATIENCE).tensors()
        remote = RemoteExpert("fussy", connections, timeout=PATIENCE)
        for seed in range(2):
            step(remote, seed)
        wait_until(lambda: same_steps(first, second))
        before, token = weights(backend_of(second)), first.statistics().replicas["fussy"].token
        die(first)
        assert weights(backend_of(second)) == before
        step(remote, 3)  # the client finds the new owner by itself
        assert role(second) == "owner" and second.statistics().replicas["fussy"].token > token
        with LocalTransport(second.handler()) as transport:
            again = transport.submit(backward("once"), PATIENCE).result(PATIENCE).tensors()
        assert torch.equal(answer[0], again[0]) and remote.steps == 4 == backend_of(second).steps


def test_owner_hands_over_its_state_at_shutdown() -> None:
    directory, seldom = LocalDirectory(), ReplicaOptions(follow_seconds=600.0, follow_steps=10**6)
    with (
        make(directory, replicas=seldom) as first,
        make(directory, expert(), replicas=seldom) as second,
        Connections(directory) as connections,
    ):
        remote = RemoteExpert("fussy", connections, timeout=PATIENCE)
        for seed in range(4):
            step(remote, seed)
        assert backend_of(second).steps == 0
        last = backend_of(first)
        assert first.shutdown()
        assert weights(backend_of(second)) == weights(last)
        step(remote, 4)
        assert backend_of(second).steps == 5


@pytest.mark.long
def test_a_rolling_restart_fails_no_call() -> None:
    directory, uids = LocalDirectory(), ["a", "b", "c"]
    places = [("a", "b"), ("b", "c"), ("c", "a")]
    servers = [make(directory, *[expert(uid) for uid in place]) for place in places]
    for server in servers:
        server.start()
    with Connections(directory) as connections, calling(connections, uids) as done:
        for number, place in enumerate(places):
            before = dict(done)
            wait_until(lambda before=before: all(done[uid] > before[uid] + 5 for uid in uids))
            servers[number].shutdown()
            servers[number] = make(directory, *[expert(uid) for uid in place])
            servers[number].start()
        before = dict(done)
        wait_until(lambda before=before: all(done[uid] > before[uid] + 5 for uid in uids))
    steps = {uid: max(backend_of(s, uid).steps for s in servers if uid in s.experts) for uid in uids}
    assert steps == done  # no step was lost or repeated
    for server in servers:
        server.shutdown()


def test_owner_with_lapsed_lease_only_answers_forwards() -> None:
    directory = Away()
    with make(directory) as owner, Connections(directory) as connections:
        remote = RemoteExpert("fussy", connections, retry=NEVER)
        step(remote)
        directory.away = True
        step(remote)  # the lease still lasts
        wait_until(lambda: not owner.statistics().replicas["fussy"].lasts)
        y = remote(rows(2, 0))
        with pytest.raises(NotOwnerError, match="lapsed"):
            y.sum().backward()
        assert backend_of(owner).steps == 2
        directory.away = False
        wait_until(lambda: owner.statistics().replicas["fussy"].lasts)
        step(remote)
        assert backend_of(owner).steps == 3


def test_owner_with_outdated_fence_becomes_follower(directory: LocalDirectory) -> None:
    cut = Cut(directory)
    with (
        make(cut) as old,
        make(directory, expert()) as new,
        Connections(directory) as connections,
        LocalTransport(old.handler()) as transport,
    ):
        transport.submit(backward("a"), PATIENCE).result(PATIENCE)
        wait_until(lambda: same_steps(old, new))
        cut.cut = True
        wait_until(lambda: role(new) == "owner")
        assert role(old) == "owner"  # it cannot see the new owner
        error = transport.submit(backward("b", seed=3), PATIENCE).exception(PATIENCE)
        assert isinstance(error, NotOwnerError) and backend_of(old).steps == 1
        remote = RemoteExpert("fussy", connections)
        step(remote, 5)
        assert remote.steps == 2
        cut.cut = False
        wait_until(lambda: role(old) == "follower" and same_steps(old, new))
        assert weights(backend_of(old)) == weights(backend_of(new))


def test_call_with_a_newer_token_is_refused_alone(directory: LocalDirectory) -> None:
    with make(directory) as server, LocalTransport(server.handler()) as transport:
        token = server.statistics().replicas["fussy"].token
        error = transport.submit(backward("x", token + 1), PATIENCE).exception(PATIENCE)
        assert isinstance(error, NotOwnerError) and "replaced" in str(error)
        transport.submit(backward("y", token), PATIENCE).result(PATIENCE)
        assert backend_of(server).steps == 1 and role(server) == "owner"


def test_open_mini_batch_is_never_committed_in_part(directory: LocalDirectory) -> None:
    with make(directory) as first, make(directory, expert()) as second, Connections(directory) as connections:
        remote = RemoteExpert("fussy", connections, accumulate=True, timeout=PATIENCE)
        step(remote, 0)
        first.shutdown()
        step(remote, 1)
        with pytest.raises(CommitError):
            remote.commit()
        assert backend_of(second).steps == 0


def test_new_owner_loads_a_newer_checkpoint(tmp_path: Path) -> None:
    directory, seldom = LocalDirectory(), ReplicaOptions(follow_seconds=600.0, follow_steps=10**6)
    with (
        make(directory, replicas=seldom, checkpoints=FolderCheckpointStore(tmp_path)) as first,
        make(directory, expert(), replicas=seldom, checkpoints=FolderCheckpointStore(tmp_path)) as second,
    ):
        with LocalTransport(first.handler()) as transport:
            for turn in range(3):
                transport.submit(backward(str(turn), seed=turn), PATIENCE).result(PATIENCE)
        first.checkpoint()
        saved = weights(backend_of(first))
        assert backend_of(second).steps == 0 and not second.checkpoint()
        die(first)
        wait_until(lambda: role(second) == "owner")
        assert weights(backend_of(second)) == saved


def test_owner_starts_from_a_hand_made_checkpoint(tmp_path: Path) -> None:
    store, initial = FolderCheckpointStore(tmp_path), expert()
    store.save("fussy", initial.state_dict(), 0)
    with make(LocalDirectory(), expert(), checkpoints=store) as server:
        wait_until(lambda: role(server) == "owner")
        assert weights(backend_of(server)) == weights(initial)
        assert server.statistics().replicas["fussy"].failure == ""


def test_restarted_owner_takes_the_followers_state(directory: LocalDirectory) -> None:
    with make(directory) as first, make(directory, expert()) as second:
        with LocalTransport(first.handler()) as transport:
            transport.submit(backward("a"), PATIENCE).result(PATIENCE)
        wait_until(lambda: same_steps(first, second))
        die(first)
        with make(directory, expert(), address=first.address) as again:  # before its old lease ends
            wait_until(lambda: "owner" in (role(again), role(second)) and same_steps(again, second))
            assert backend_of(again).steps == 1


def test_state_of_another_kind_never_makes_an_owner(directory: LocalDirectory) -> None:
    quick = ReplicaOptions(follow_seconds=0.05, follow_steps=1, first_seconds=0.3)
    with make(directory) as first, make(directory, expert(optimizer=None), replicas=quick) as other:
        wait_until(lambda: "UsageError" in other.statistics().replicas["fussy"].failure)
        die(first)
        wait_until(lambda: first.address not in directory.get().addresses("fussy"))
        replication, turns = other._replication, list[int]()
        turn = replication._attend_all
        replication._attend_all = lambda: (turns.append(1), turn())  # type: ignore[method-assign]
        wait_until(lambda: len(turns) > 2)
        assert role(other) == "follower" and "fussy" not in directory.get().owners


def test_state_beyond_the_limit_is_refused(directory: LocalDirectory) -> None:
    small = ReplicaOptions(state_bytes=100, first_seconds=0.3)
    with make(directory), make(directory, expert(), replicas=small) as follower:
        wait_until(lambda: "state_bytes" in follower.statistics().replicas["fussy"].failure)


def test_a_state_requires_the_admin_role(directory: LocalDirectory) -> None:
    access = Access([Grant("peer", "*", Role.ADMIN), Grant("thief", "*", Role.TRAIN)], {"s": "peer", "t": "thief"})
    with make(directory, access=access) as owner:
        for token, fine in (("t", False), ("s", True)):
            mine = ReplicaOptions(follow_seconds=0.05, follow_steps=1, first_seconds=1.0, token=token)
            with make(directory, expert(optimizer=adam), replicas=mine) as follower:
                replica = partial(lambda follower: follower.statistics().replicas["fussy"], follower)
                wait_until(lambda replica=replica: replica().received > 0 or "ForbiddenError" in replica().failure)
                assert (replica().received > 0) is fine and ("ForbiddenError" in replica().failure) is not fine
        assert owner.audit.counts()["STATE"] > 0


def test_a_server_with_replicas_keeps_its_experts_while_it_runs() -> None:
    server = make(LocalDirectory(), expert("a"))
    server.add(expert("b"))
    with server:
        for change in (lambda: server.add(expert("c")), lambda: server.remove("b")):
            with pytest.raises(UsageError, match="keeps its experts while it runs"):
                change()
        assert role(server, "a") == role(server, "b") == "owner" and server.experts == ["a", "b"]


def test_configuration_selects_replicas() -> None:
    expert_table = {"name": "ffn.0", "kind": "ffn", "arguments": {"hidden": 4}}
    table = {"experts": ["ffn.*"], "follow_seconds": 1, "token": "s"}
    config = {"address": "127.0.0.1:0", "directory": "local", "experts": [expert_table]}
    with build({**config, "replicas": table}) as server:
        assert role(server, "ffn.0") == "owner"
    with pytest.raises(UsageError, match=r"(?s)'autority'.*'follow'|'follow'.*'autority'"):
        build({**config, "replicas": {"follow": 1, "token": 3, "tls": {"autority": "x"}}})
