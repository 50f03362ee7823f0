"""Behaviour of every directory, in process and in a real etcd. Leases in etcd last longer, in whole seconds."""

import os
import random
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.experts.concurrency import in_threads, wait_until
from tests.experts.etcd_cases import Member, cluster
from tests.processes import forked
from torchweft.core.errors import UsageError
from torchweft.experts.discovery import Directory, Lease, LocalDirectory, Snapshot
from torchweft.experts.discovery.etcd import EtcdDirectory, RefusedByEtcdError
from torchweft.experts.discovery.fencing import epoch_of, later
from torchweft.experts.errors import DirectoryUnavailableError, ExpertOwnedError, LeaseLostError

FOREVER = 1000.0
SOON = 0.1  # limit in seconds for a watch to see a change, in the best of several tries
STRETCH = 2.0


@dataclass
class Case:
    directory: Directory
    advance: Callable[[float], None]


def local_case() -> Case:
    now = [0.0]

    def advance(seconds: float) -> None:
        now[0] += seconds

    return Case(LocalDirectory(clock=lambda: now[0]), advance)


class Stretched(EtcdDirectory):
    """Directory whose leases last longer than requested."""

    def declare(self, uids: str | Sequence[str], address: str, ttl: float) -> Lease:
        return super().declare(uids, address, STRETCH * ttl)


@pytest.fixture(scope="module")
def member(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Member]:
    with cluster(tmp_path_factory.mktemp("etcd")) as members:
        yield members[0]


def new_directory(member: Member, kind: type[EtcdDirectory] = EtcdDirectory, **more: Any) -> EtcdDirectory:
    return kind(member.endpoint, namespace=uuid.uuid4().hex, **more)


@pytest.fixture(params=["local", "etcd"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    case = local_case()
    if request.param == "etcd":
        stretched = new_directory(request.getfixturevalue("member"), Stretched)
        case = Case(stretched, lambda seconds: time.sleep(STRETCH * seconds))
    yield case
    case.directory.close()


@pytest.fixture(params=["local", "etcd"])
def real(request: pytest.FixtureRequest) -> Iterator[Directory]:
    directory = LocalDirectory() if request.param == "local" else new_directory(request.getfixturevalue("member"))
    yield directory
    directory.close()


@pytest.fixture
def etcd(member: Member) -> Iterator[EtcdDirectory]:
    with new_directory(member) as directory:
        yield directory


def test_declared_experts_are_found_by_prefix(case: Case) -> None:
    case.directory.declare(["ffn.0", "ffn.1", "ffn.10", "att.0"], "a:1", 10.0)
    case.directory.declare("ffn.1", "b:1", 10.0)
    snapshot = case.directory.get("ffn.")
    assert snapshot.uids == ("ffn.0", "ffn.1", "ffn.10")
    assert snapshot.addresses("ffn.1") == ("a:1", "b:1")
    assert snapshot.addresses("att.0") == () and "att.0" not in snapshot
    assert snapshot.search("ffn.1") == ["ffn.1", "ffn.10"]
    assert len(case.directory.get()) == 4


@pytest.mark.long
def test_unrenewed_lease_ends_with_its_entries(case: Case) -> None:
    lease = case.directory.declare(["a", "b"], "x:1", 1.0)
    case.directory.claim("a", lease)
    case.advance(0.6)
    case.directory.renew(lease)
    case.advance(0.6)
    assert len(case.directory.get()) == 2
    case.advance(0.6)
    assert len(case.directory.get()) == 0 and case.directory.get().owner("a") is None
    with pytest.raises(LeaseLostError, match=r"of x:1 ended.*Declare again"):
        case.directory.renew(lease)
    with pytest.raises(LeaseLostError):
        case.directory.claim("a", lease)


def test_withdrawal_is_immediate_and_repeatable(case: Case) -> None:
    lease = case.directory.declare("a", "x:1", FOREVER)
    other = case.directory.declare("a", "y:1", FOREVER)
    for _ in range(2):
        case.directory.withdraw(lease)
        assert case.directory.get().addresses("a") == ("y:1",)
    with pytest.raises(LeaseLostError):
        case.directory.renew(lease)
    case.directory.renew(other)


@pytest.mark.long
def test_restarted_server_stays_listed(case: Case) -> None:
    case.directory.declare("a", "x:1", 1.0)
    again = case.directory.declare("a", "x:1", FOREVER)
    case.advance(1.5)
    assert case.directory.get().addresses("a") == ("x:1",)
    case.directory.withdraw(again)
    assert len(case.directory.get()) == 0


@pytest.mark.long
def test_an_expert_has_one_owner_at_a_time(case: Case) -> None:
    first = case.directory.declare("a", "x:1", 1.0)
    second = case.directory.declare("a", "y:1", FOREVER)
    mine = case.directory.claim("a", first)
    assert case.directory.get().owner("a") == mine
    with pytest.raises(ExpertOwnedError, match="owned by x:1, and y:1 cannot claim it") as caught:
        case.directory.claim("a", second)
    assert caught.value.address == "x:1"
    case.advance(1.5)
    other = case.directory.claim("a", second)
    assert other.token > mine.token
    case.directory.release(mine)  # no effect, because the expert has another owner
    assert case.directory.get().owner("a") == other
    case.directory.release(other)
    case.directory.release(other)
    assert case.directory.get().owner("a") is None


@pytest.mark.long
def test_restarted_owner_gets_a_larger_token(case: Case) -> None:
    old = case.directory.claim("a", case.directory.declare("a", "x:1", 1.0))
    new = case.directory.claim("a", case.directory.declare("a", "x:1", FOREVER))
    assert new.token > old.token
    case.directory.release(old)
    case.advance(1.5)  # the end of the old lease removes nothing
    assert case.directory.get().owner("a") == new


def test_watch_follows_changes_until_closed(real: Directory) -> None:
    watch, other = real.watch("a"), real.watch()
    assert len(watch.snapshot()) == 0
    lease = real.declare(["a1", "b1"], "x:1", FOREVER)
    wait_until(lambda: watch.snapshot().addresses("a1") == ("x:1",))
    ownership = real.claim("a1", lease)
    wait_until(lambda: watch.snapshot().owner("a1") == ownership)
    assert watch.snapshot().uids == ("a1",) and watch.away_seconds == 0
    real.withdraw(lease)
    wait_until(lambda: not watch.snapshot().experts and not watch.snapshot().owners and not len(other.snapshot()))
    real.declare("a2", "x:1", FOREVER)
    wait_until(lambda: watch.snapshot().uids == other.snapshot().uids == ("a2",))
    watch.close()
    watch.close()
    real.close()
    assert watch.snapshot().uids == other.snapshot().uids == ("a2",)
    for call in (real.get, real.watch, lambda: real.declare("a", "x:1", 1.0)):
        with pytest.raises(DirectoryUnavailableError):
            call()
    real.close()


@dataclass(frozen=True)
class Step:
    what: str
    server: int
    uid: str
    seconds: float


STEPS = st.builds(
    Step,
    st.sampled_from(["declare", "declare", "renew", "withdraw", "claim", "release", "advance", "advance"]),
    st.integers(0, 2),
    st.sampled_from(["a0", "a1", "b0"]),
    st.sampled_from([0.5, 1.0, 2.5]),
)


@dataclass
class Model:
    now: float = 0.0

    def __post_init__(self) -> None:
        self.ends: dict[int, float] = {}  # by lease number
        self.listed: dict[tuple[str, str], int] = {}
        self.owners: dict[str, tuple[str, int, int]] = {}  # address, token, lease

    def end(self, number: int) -> None:
        self.ends.pop(number, None)
        self.listed = {key: lease for key, lease in self.listed.items() if lease != number}
        self.owners = {uid: owner for uid, owner in self.owners.items() if owner[2] != number}

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for number in [number for number, ends in self.ends.items() if ends <= self.now]:
            self.end(number)

    def check(self, snapshot: Snapshot) -> None:
        assert {(uid, place) for uid, places in snapshot.experts.items() for place in places} == set(self.listed)
        seen = {uid: (owner.address, owner.token) for uid, owner in snapshot.owners.items()}
        assert seen == {uid: owner[:2] for uid, owner in self.owners.items()}


def apply(step: Step, case: Case, model: Model, leases: dict[int, Lease], tokens: list[int]) -> None:
    """Apply one step to the directory and to the model."""
    directory, lease = case.directory, leases.get(step.server)
    if step.what == "advance":
        case.advance(step.seconds)
        model.advance(step.seconds)
    elif step.what == "declare":
        lease = directory.declare([step.uid, "a0"], f"s{step.server}", step.seconds)
        leases[step.server] = lease
        model.ends[lease.number] = model.now + step.seconds
        model.listed |= dict.fromkeys([(uid, lease.address) for uid in lease.uids], lease.number)
    elif lease is None:
        return
    elif step.what == "withdraw":
        directory.withdraw(lease)
        model.end(lease.number)
    elif step.what == "release":
        ownership = directory.get().owner(step.uid)
        if ownership is not None:
            directory.release(ownership)
            del model.owners[step.uid]
    elif lease.number not in model.ends:
        with pytest.raises(LeaseLostError):
            directory.renew(lease)
    elif step.what == "renew":
        directory.renew(lease)
        model.ends[lease.number] = model.now + lease.ttl
    elif step.uid not in lease.uids:
        with pytest.raises(UsageError, match="declare it first"):
            directory.claim(step.uid, lease)
    elif model.owners.get(step.uid, (lease.address,))[0] != lease.address:
        with pytest.raises(ExpertOwnedError):
            directory.claim(step.uid, lease)
    else:
        token = directory.claim(step.uid, lease).token
        assert not tokens or token > max(tokens)
        tokens.append(token)
        model.owners[step.uid] = (lease.address, token, lease.number)


@settings(max_examples=150)
@given(st.lists(STEPS, max_size=30), st.sampled_from(["", "a"]))
def test_snapshots_match_the_model(steps: list[Step], prefix: str) -> None:
    case, model, leases, tokens = local_case(), Model(), dict[int, Lease](), list[int]()
    with case.directory.watch(prefix) as watch:
        for step in steps:
            apply(step, case, model, leases, tokens)
            model.check(case.directory.get())
            now, seen = case.directory.get(prefix), watch.snapshot()
            assert (seen.experts, seen.owners) == (now.experts, now.owners)


def test_one_of_many_concurrent_claims_wins(real: Directory) -> None:
    leases = [real.declare("a", f"s{i}", FOREVER) for i in range(8)]
    barrier, tokens, lost = threading.Barrier(8), list[int](), list[str]()

    def fight(lease: Lease) -> None:
        draw = random.Random(lease.number)
        barrier.wait(60)
        for _ in range(50):
            try:
                mine = real.claim("a", lease)
            except ExpertOwnedError as error:
                lost.append(error.address)
                continue
            tokens.append(mine.token)  # only the owner gets here, so appends never overlap
            if draw.random() < 0.3:
                time.sleep(0)
            real.release(mine)

    in_threads(fight, leases)
    assert len(tokens) + len(lost) == 400
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize(
    ("uids", "address", "ttl", "told"),
    [
        ([], "x:1", 1.0, "list of experts is empty"),
        (["a", ""], "x:1", 1.0, "name is empty"),
        ("", "x:1", 1.0, "name is empty"),
        ("a\0b", "x:1", 1.0, "contains the character 0"),
        ("a", "", 0.0, r"address is empty(.|\n)*ttl is 0.0"),
        ("a", "x:1", float("nan"), "ttl is nan"),
        ("a", "x:1", float("inf"), "ttl is inf"),
    ],
)
def test_invalid_declaration_is_rejected(
    case: Case, uids: str | list[str], address: str, ttl: float, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        case.directory.declare(uids, address, ttl)
    assert len(case.directory.get()) == 0


def test_snapshot_is_cached_for_each_revision() -> None:
    directory, threads = LocalDirectory(), threading.active_count()
    lease, watch = directory.declare("a", "x:1", 60.0), directory.watch()
    first = watch.snapshot()
    directory.renew(lease)
    assert watch.snapshot() is first and threading.active_count() == threads
    directory.close()
    assert watch.snapshot() is first and watch.away_seconds > 0


def test_search_among_a_thousand_experts_is_fast(directory: LocalDirectory) -> None:
    directory.declare([f"ffn.{i}.{j}" for i in range(32) for j in range(32)], "x:1", 60.0)
    snapshot = directory.get("ffn.")
    start = time.thread_time()
    for i in range(32):
        assert len(snapshot.search(f"ffn.{i}.")) == 32
    assert time.thread_time() - start < 0.1  # includes the run-time type checks of the tests
    directory.close()


WITHOUT_TIME = STEPS.filter(lambda step: step.what != "advance").map(
    lambda step: Step(step.what, step.server, step.uid, 60.0)
)


@settings(max_examples=10)
@given(steps=st.lists(WITHOUT_TIME, min_size=5, max_size=30), prefix=st.sampled_from(["", "a"]))
def test_watch_events_lead_to_the_same_snapshot(member: Member, steps: list[Step], prefix: str) -> None:
    model, leases, tokens = Model(), dict[int, Lease](), list[int]()
    with new_directory(member) as directory, directory.watch(prefix) as watch:
        for step in steps:
            apply(step, Case(directory, time.sleep), model, leases, tokens)
            model.check(directory.get())
        now = directory.get(prefix)
        wait_until(lambda: (watch.snapshot().experts, watch.snapshot().owners) == (now.experts, now.owners))


def test_a_change_is_seen_within_100_ms(etcd: EtcdDirectory) -> None:
    late = list[float]()
    with etcd.watch() as watch:
        for i in range(3):
            lease = etcd.declare(f"e{i}", "x:1", 60.0)
            start = time.monotonic()
            wait_until(lambda: len(watch.snapshot()))
            late.append(time.monotonic() - start)
            etcd.withdraw(lease)
            wait_until(lambda: not len(watch.snapshot()))
    assert min(late) < SOON  # the minimum, because load on the machine can only add


def test_many_experts_share_one_etcd_lease(etcd: EtcdDirectory) -> None:
    lease = etcd.declare([f"e.{i}" for i in range(250)], "x:1", 59.2)
    assert lease.ttl == 60.0 and len(etcd.get("e.")) == 250
    etcd.withdraw(lease)
    assert len(etcd.get()) == 0
    with pytest.raises(RefusedByEtcdError, match="INVALID_ARGUMENT"):  # a rejected call is not retried
        etcd._client.call("Txn", success=[{"request_put": {"key": str(i).encode()}} for i in range(200)])


def test_namespaces_are_separate_and_foreign_keys_ignored(member: Member) -> None:
    with new_directory(member) as one, new_directory(member) as other, other.watch() as watch:
        one.declare("a", "x:1", 60.0)
        assert len(other.get()) == 0
        keys = [other._keys.key_range("")[0] + tail for tail in (b"stranger", b"a\0z9", b"\xff\0a1", b"a\0a\xff")]
        other._client.call("Txn", success=[{"request_put": {"key": key, "value": b"?"}} for key in keys])
        assert len(other.get()) == 0 and len(watch.snapshot()) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_leaves_the_directory_to_its_parent(member: Member) -> None:
    with new_directory(member) as directory, directory.watch() as watch:
        directory.declare("a", "here:1", 60.0)
        wait_until(lambda: watch.snapshot().uids == ("a",))

        def child() -> bool:
            with pytest.raises(UsageError, match="was forked from one that uses gRPC"):
                directory.get()
            directory.close()
            return True

        assert forked(child)
        assert directory.get().uids == ("a",)


def test_silent_member_costs_its_share_of_the_timeout(member: Member) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        with EtcdDirectory([where, member.endpoint], namespace=uuid.uuid4().hex, timeout=1.0) as directory:
            start = time.monotonic()
            directory.declare("a", "x:1", 60.0)
            assert time.monotonic() - start < 20.0
            taken: list[float] = []
            for _ in range(10):  # the responsive member comes first now (repeated because of load)
                start = time.monotonic()
                assert directory.get().uids == ("a",)
                taken.append(time.monotonic() - start)
            assert min(taken) < 0.3


@pytest.mark.long
def test_cluster_survives_the_loss_of_any_member(tmp_path: Path) -> None:
    with (
        cluster(tmp_path, members=3) as members,
        EtcdDirectory([member.endpoint for member in members], timeout=10.0) as directory,
        directory.watch() as watch,
    ):
        lease = directory.declare("a", "x:1", 60.0)
        mine = directory.claim("a", lease)
        wait_until(lambda: watch.snapshot().owner("a") == mine)
        begin, changed = directory._client.watch, threading.Event()

        def slowly(index: int, requests: Any) -> Any:
            changed.wait(20)  # changes during this wait must be seen too
            return begin(index, requests)

        directory._client.watch = slowly
        members[directory._client.member_order()[0]].kill()
        directory.declare("b", "x:1", 60.0)
        directory.renew(lease)
        newer = directory.claim("a", lease)
        assert newer.token > mine.token
        changed.set()
        wait_until(lambda: watch.snapshot().uids == ("a", "b") and watch.snapshot().owner("a") == newer)


def test_watch_survives_an_etcd_outage(tmp_path: Path) -> None:
    with cluster(tmp_path) as (member,), EtcdDirectory(member.endpoint, timeout=2.0) as directory:
        lease = directory.declare("a", "x:1", 60.0)
        with directory.watch() as watch:
            member.kill()
            wait_until(lambda: watch.away_seconds)
            with pytest.raises(DirectoryUnavailableError):
                directory.renew(lease)
            assert watch.snapshot().uids == ("a",) and watch.away_seconds > 0
            member.start()
            wait_until(lambda: not watch.away_seconds)
            directory.renew(lease)
            directory.declare("b", "x:1", 60.0)
            wait_until(lambda: watch.snapshot().uids == ("a", "b"))


@pytest.mark.parametrize(("before", "since"), [(20, 0), (0, 20)], ids=["smaller", "larger"])
def test_emptied_etcd_has_another_epoch(before: int, since: int, tmp_path: Path) -> None:
    def pass_by(directory: EtcdDirectory, count: int) -> None:
        for _ in range(count):
            directory.withdraw(directory.declare("else", "elsewhere:1", 60.0))

    with cluster(tmp_path) as (member,), EtcdDirectory(member.endpoint) as directory, directory.watch() as watch:
        pass_by(directory, before)
        old = directory.claim("a", directory.declare("a", "x:1", 60.0))
        wait_until(lambda: watch.snapshot().owner("a") == old)
        member.kill()
        shutil.rmtree(tmp_path / "m0")
        member.start()
        with EtcdDirectory(member.endpoint) as other:
            pass_by(other, since)
            lease = other.declare("b", "y:1", 60.0)
            new = other.claim("b", lease)
            assert epoch_of(new.token) != epoch_of(old.token)
            wait_until(lambda: watch.snapshot().uids == ("b",) and watch.snapshot().owner("b") == new)
            again = directory.claim("b", Lease(lease.number, ("b",), "y:1", 60.0))
            assert later(again.token, new.token)
            assert directory.get().owner("b") == again
