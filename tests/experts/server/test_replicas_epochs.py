"""Replicas with a directory that loses its data or is replaced, so that fencing tokens begin again."""

from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.experts.concurrency import wait_until
from tests.experts.expert_cases import fussy_backend, weights
from tests.experts.server.replica_cases import (
    LEASED,
    PATIENCE,
    Cut,
    after,
    backend_of,
    die,
    expert,
    make,
    owning,
    role,
    same_steps,
    step,
)
from torchweft.experts.checkpoint import FolderCheckpointStore
from torchweft.experts.client import Connections, RemoteExpert
from torchweft.experts.discovery import LocalDirectory, Ownership
from torchweft.experts.discovery.fencing import epoch_of, token_of
from torchweft.experts.errors import FencedError, NotOwnerError
from torchweft.experts.replication import Leadership, Replica
from torchweft.experts.replication.replica import StateVersion, newer

MANY = 60  # more revisions than a test makes, so the tokens of an epoch from there on are the largest
NOW, BEFORE = 5, 9  # epochs of the directory
small = st.integers(1, 6)
versions = st.builds(StateVersion, st.builds(token_of, st.sampled_from([NOW, BEFORE]), small), small, small)


@given(st.lists(versions, min_size=1, max_size=4), small)
def test_newest_state_does_not_depend_on_the_order(found: list[StateVersion], now: int) -> None:
    token, newest = token_of(NOW, 6 + now), set[StateVersion]()
    for order in permutations(found):
        best = order[0]
        for version in order[1:]:
            best = version if newer(version, best, token) else best
        newest.add(best)
    assert len(newest) == 1
    of_this_epoch = [version for version in found if epoch_of(version.token) == NOW]
    assert newest == {max(of_this_epoch or found)}


@given(st.integers(0, 9), st.integers(0, 9))
def test_steps_decide_between_two_earlier_epochs(one: int, other: int) -> None:
    first, second = StateVersion(token_of(7, 9 - one), one, 0), StateVersion(token_of(BEFORE, one), other, 0)
    assert newer(first, second, token_of(NOW, 1)) == (one > other)
    assert newer(second, first, token_of(NOW, 1)) == (other > one)


@pytest.mark.parametrize("saved", [1, 2, 3], ids=lambda steps: f"saved{steps}")
@pytest.mark.parametrize("old", [3, 8, 20], ids=lambda token: f"old{token}")  # smaller, between, larger than others
@pytest.mark.parametrize("epoch", [NOW, BEFORE, 0], ids=["now", "before", "unknown"])
@pytest.mark.parametrize("heard", [True, False], ids=["followed", "alone"])
def test_checkpoint_of_another_epoch_replaces_no_steps(
    saved: int, old: int, epoch: int, heard: bool, tmp_path: Path
) -> None:
    store = FolderCheckpointStore(tmp_path)
    owner = owning(token_of(epoch, old), *"abc"[:saved])
    state, records = owner.backend.state_dict(), owner.backend.idempotency.state_dict()
    store.save("fussy", state, saved, {"records": records, "token": token_of(epoch, old)})
    replica = Replica(fussy_backend(), lambda lease: float("inf"), store=store)
    if heard:
        before = token_of(NOW, 5)
        replica.follow(Ownership("fussy", "there:1", before))
        encoded = owning(before, *"ab").state.encode()
        assert encoded is not None and replica.load(*encoded)
    replica.claimed(Ownership("fussy", "here:1", token_of(NOW, 10)), LEASED)
    restored = not heard or (epoch == NOW and old > 5)
    assert replica.restore() == restored and replica.backend.steps == (saved if restored else 2)


@pytest.mark.parametrize("number", [1, 7, 30])
def test_granted_claim_excludes_states_of_earlier_owners(number: int) -> None:
    replica, late = owning(token_of(BEFORE, 7)), owning(token_of(BEFORE, 40), "a")
    encoded = late.state.encode()
    assert encoded is not None
    replica.claimed(Ownership("fussy", "here:1", token_of(NOW, number)), LEASED)
    with pytest.raises(FencedError, match="another epoch"):
        replica.load(*encoded)
    replica.follow(Ownership("fussy", "there:1", token_of(NOW, number + 1)))
    with pytest.raises(FencedError, match="another epoch"):
        replica.load(*encoded)
    assert replica.quiet(LEASED) > 0 and replica.backend.steps == 0


def test_new_owner_does_not_wait_without_a_restart() -> None:
    replica = owning(token_of(NOW, 3))
    replica.follow(Ownership("fussy", "there:1", token_of(NOW, 5)))
    replica.claimed(Ownership("fussy", "here:1", token_of(NOW, 9)), LEASED)
    assert replica.quiet(LEASED) == 0


@given(st.integers(1, 99), st.integers(1, 99))
def test_call_of_another_epoch_is_refused_unless_it_is_past(mine: int, theirs: int) -> None:
    leadership = Leadership("fussy", lambda lease: float("inf"))
    leadership.become("owner", Ownership("fussy", "here:1", token_of(BEFORE, mine)), LEASED)
    with pytest.raises(NotOwnerError, match="replaced"):  # it can be a later epoch
        leadership.check(steps=True, carried=token_of(NOW, theirs))
    leadership.become("owner", Ownership("fussy", "here:1", token_of(NOW, theirs)), LEASED)
    leadership.check(steps=True, carried=token_of(BEFORE, mine))
    leadership.check(steps=True, carried=token_of(NOW, theirs))
    with pytest.raises(NotOwnerError, match="replaced"):
        leadership.check(steps=True, carried=token_of(7, mine))
    leadership.become("owner", Ownership("fussy", "here:1", token_of(7, mine)), LEASED)
    for token in (token_of(BEFORE, mine), token_of(NOW, theirs)):
        leadership.check(steps=True, carried=token)


@pytest.mark.long
@pytest.mark.parametrize(("first", "second"), [(MANY, 0), (0, MANY), (0, 0)], ids=["smaller", "larger", "alike"])
def test_training_continues_after_the_directory_lost_its_data(first: int, second: int) -> None:
    directory = Cut(after(first))
    with make(directory) as one, make(directory, expert()) as other, Connections(directory) as connections:
        remote = RemoteExpert("fussy", connections, timeout=PATIENCE)
        for seed in range(3):
            step(remote, seed)
        before = directory.get().owners["fussy"].token
        directory.lose_data(second)
        step(remote, 3)  # this step can still carry the old token
        wait_until(lambda: sorted((role(one), role(other))) == ["follower", "owner"])
        step(remote, 4)
        wait_until(lambda: same_steps(one, other))
        assert remote.steps == 5 and weights(backend_of(one)) == weights(backend_of(other))
        owner = directory.get().owners["fussy"]
        assert epoch_of(owner.token) != epoch_of(before)
        wait_until(lambda: {server.statistics().replicas["fussy"].failure for server in (one, other)} == {""})


def test_two_owners_never_step_after_a_directory_restart() -> None:
    directory, seen = LocalDirectory(), list[bool]()
    here, there = Cut(directory), Cut(directory)
    with make(here) as old, make(there, expert()) as new:
        wait_until(lambda: same_steps(old, new) and role(new) == "follower")
        here.cut = True
        there.lose_data()

        def new_server_leads() -> bool:
            leads = role(new) == "owner"
            seen.append(leads and old.statistics().replicas["fussy"].lasts)  # read last, so it lasted then too
            return leads

        wait_until(new_server_leads)
        assert not any(seen)
        here.inner, here.cut = there.inner, False
        wait_until(lambda: role(old) == "follower" and same_steps(old, new))


@pytest.mark.long
@pytest.mark.parametrize("revisions", [0, MANY], ids=["smaller", "larger"])
@pytest.mark.parametrize("dies", [False, True], ids=["ends", "dies"])
def test_old_checkpoint_does_not_undo_steps_of_a_new_epoch(revisions: int, dies: bool, tmp_path: Path) -> None:
    stores = [FolderCheckpointStore(tmp_path / name) for name in "ab"]

    def pair(directory: LocalDirectory, steps: int) -> list[int]:
        """Steps of both servers when they own the expert in turn, and of the client at the end."""
        first, second = (make(directory, expert(), checkpoints=store) for store in stores)
        first.start()
        with second, Connections(directory) as connections:
            remote = RemoteExpert("fussy", connections, timeout=PATIENCE)
            for seed in range(steps):
                step(remote, seed)
            wait_until(lambda: same_steps(first, second))
            done = backend_of(first).steps
            while directory.get().revision < revisions:
                directory.withdraw(directory.declare("else", "elsewhere:1", 60.0))
            if dies:
                die(first)
            else:
                first.shutdown()
            wait_until(lambda: role(second) == "owner")
            steps_of_both = [done, backend_of(second).steps]
            step(remote)
            return [*steps_of_both, remote.steps]

    assert pair(after(MANY // 2), 1) == [1, 1, 2]  # the second server's checkpoint has a later token
    ours = pair(LocalDirectory(), 4)
    assert ours == [ours[0], ours[0], ours[0] + 1] and ours[0] >= 4


def test_new_owner_waits_a_lease_after_a_directory_restart() -> None:
    """While it waits, the statistics give the reason."""
    directory = Cut(LocalDirectory())
    with make(directory) as server:
        directory.lose_data()
        wait_until(lambda: role(server) == "taking over")
        wait_until(lambda: "begun again" in server.statistics().replicas["fussy"].failure or role(server) == "owner")
        wait_until(lambda: role(server) == "owner")
        assert server.statistics().replicas["fussy"].failure == ""


def test_closed_state_stream_is_not_a_failure(directory: LocalDirectory) -> None:
    with make(directory) as owner, make(directory, expert()) as follower:
        wait_until(lambda: follower.statistics().replicas["fussy"].behind == 0)
        replication = follower._replication
        assert replication is not None
        replication._streams[owner.address].close()
        assert follower.statistics().replicas["fussy"].failure == ""


def test_late_stream_failure_is_ignored_by_an_owner() -> None:
    replica = owning(token_of(NOW, 3))
    replica.failed(OSError("gone"))
    assert replica.failure is None
    replica.follow(None)
    replica.failed(OSError("gone"))
    assert replica.failure is not None
