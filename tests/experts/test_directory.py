"""What every directory does, whoever implements it. An implementation is added to `IMPLEMENTATIONS`."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.experts.waiting import until
from weft.core.errors import UsageError
from weft.experts.discovery import (
    AwayError,
    Directory,
    Lease,
    LeaseLostError,
    LocalDirectory,
    OwnedError,
    Snapshot,
)

FOREVER = 1000.0
SOON = 0.1  # seconds: within these a change is to be seen, in the best of several tries


@dataclass
class Case:
    """A fresh directory, and how its time goes on."""

    directory: Directory
    advance: Callable[[float], None]


def local_with_a_clock_of_its_own() -> Case:
    now = [0.0]

    def advance(seconds: float) -> None:
        now[0] += seconds

    return Case(LocalDirectory(clock=lambda: now[0]), advance)


def local_with_the_real_clock() -> Case:
    return Case(LocalDirectory(), time.sleep)


IMPLEMENTATIONS = {"local": local_with_a_clock_of_its_own}
REAL_TIME = {"local": local_with_the_real_clock}


@pytest.fixture(params=IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    made: Case = request.param()
    yield made
    made.directory.close()


@pytest.fixture(params=REAL_TIME.values(), ids=REAL_TIME)
def real(request: pytest.FixtureRequest) -> Iterator[Directory]:
    directory = request.param().directory
    yield directory
    directory.close()


def test_what_is_declared_is_found_by_its_prefix(case: Case) -> None:
    case.directory.declare(["ffn.0", "ffn.1", "ffn.10", "att.0"], "a:1", 10.0)
    case.directory.declare("ffn.1", "b:1", 10.0)
    snapshot = case.directory.get("ffn.")
    assert snapshot.uids == ("ffn.0", "ffn.1", "ffn.10")
    assert snapshot.addresses("ffn.1") == ("a:1", "b:1")
    assert snapshot.addresses("att.0") == () and "att.0" not in snapshot
    assert snapshot.search("ffn.1") == ["ffn.1", "ffn.10"]
    assert len(case.directory.get()) == 4


@pytest.mark.long
def test_a_lease_that_is_not_renewed_ends_with_all_that_stands_under_it(case: Case) -> None:
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


def test_withdrawing_is_at_once_and_may_be_repeated(case: Case) -> None:
    lease = case.directory.declare("a", "x:1", FOREVER)
    other = case.directory.declare("a", "y:1", FOREVER)
    for _ in range(2):
        case.directory.withdraw(lease)
        assert case.directory.get().addresses("a") == ("y:1",)
    with pytest.raises(LeaseLostError):
        case.directory.renew(lease)
    case.directory.renew(other)


@pytest.mark.long
def test_a_server_that_comes_back_before_its_old_lease_ends_stays_listed(case: Case) -> None:
    case.directory.declare("a", "x:1", 1.0)
    again = case.directory.declare("a", "x:1", FOREVER)
    case.advance(1.5)
    assert case.directory.get().addresses("a") == ("x:1",)
    case.directory.withdraw(again)
    assert len(case.directory.get()) == 0


@pytest.mark.long
def test_only_one_owns_an_expert_until_it_lets_go_or_its_lease_ends(case: Case) -> None:
    first = case.directory.declare("a", "x:1", 1.0)
    second = case.directory.declare("a", "y:1", FOREVER)
    mine = case.directory.claim("a", first)
    assert case.directory.get().owner("a") == mine
    with pytest.raises(OwnedError, match="owned by x:1, and y:1 cannot claim it") as caught:
        case.directory.claim("a", second)
    assert caught.value.address == "x:1"
    case.advance(1.5)
    other = case.directory.claim("a", second)
    assert other.token > mine.token
    case.directory.release(mine)  # too late: it is another's by now
    assert case.directory.get().owner("a") == other
    case.directory.release(other)
    case.directory.release(other)
    assert case.directory.get().owner("a") is None


@pytest.mark.long
def test_a_server_that_comes_back_replaces_its_own_claim_with_a_larger_token(case: Case) -> None:
    old = case.directory.claim("a", case.directory.declare("a", "x:1", 1.0))
    new = case.directory.claim("a", case.directory.declare("a", "x:1", FOREVER))
    assert new.token > old.token
    case.directory.release(old)
    case.advance(1.5)  # the old lease ends, and takes nothing with it
    assert case.directory.get().owner("a") == new


def test_a_watch_follows_every_change_and_keeps_the_last_snapshot_when_it_or_the_directory_is_closed(
    real: Directory,
) -> None:
    watch, other = real.watch("a"), real.watch()
    assert len(watch.snapshot()) == 0
    lease = real.declare(["a1", "b1"], "x:1", FOREVER)
    until(lambda: watch.snapshot().addresses("a1") == ("x:1",))
    ownership = real.claim("a1", lease)
    until(lambda: watch.snapshot().owner("a1") == ownership)
    assert watch.snapshot().uids == ("a1",) and watch.away_seconds == 0
    real.withdraw(lease)
    until(lambda: not watch.snapshot().experts and not watch.snapshot().owners and not len(other.snapshot()))
    real.declare("a2", "x:1", FOREVER)
    until(lambda: watch.snapshot().uids == other.snapshot().uids == ("a2",))
    watch.close()
    watch.close()
    real.close()
    assert watch.snapshot().uids == other.snapshot().uids == ("a2",)
    for call in (real.get, real.watch, lambda: real.declare("a", "x:1", 1.0)):
        with pytest.raises(AwayError):
            call()
    real.close()


@dataclass(frozen=True)
class Step:
    """One thing that happens: `what`, to a server, an expert, or the time."""

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
    """What a directory should hold, told in the plainest way."""

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
        assert {(uid, at) for uid, found in snapshot.experts.items() for at in found} == set(self.listed)
        seen = {uid: (owner.address, owner.token) for uid, owner in snapshot.owners.items()}
        assert seen == {uid: owner[:2] for uid, owner in self.owners.items()}


def apply(step: Step, case: Case, model: Model, leases: dict[int, Lease], tokens: list[int]) -> None:
    """One step in the directory and in the model."""
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
        with pytest.raises(OwnedError):
            directory.claim(step.uid, lease)
    else:
        token = directory.claim(step.uid, lease).token
        assert not tokens or token > max(tokens)
        tokens.append(token)
        model.owners[step.uid] = (lease.address, token, lease.number)


@pytest.mark.parametrize("make", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@settings(max_examples=150)
@given(st.lists(STEPS, max_size=30), st.sampled_from(["", "a"]))
def test_snapshots_are_as_they_should_be(make: Callable[[], Case], steps: list[Step], prefix: str) -> None:
    case, model = make(), Model()
    leases: dict[int, Lease] = {}
    tokens: list[int] = []
    try:
        with case.directory.watch(prefix) as watch:
            for step in steps:
                apply(step, case, model, leases, tokens)
                model.check(case.directory.get())
                now, seen = case.directory.get(prefix), watch.snapshot()
                assert (seen.experts, seen.owners) == (now.experts, now.owners)
    finally:
        case.directory.close()


def test_of_many_who_claim_at_once_one_wins_and_every_token_is_larger_than_the_last(real: Directory) -> None:
    leases = [real.declare("a", f"s{i}", FOREVER) for i in range(8)]
    barrier, tokens, lost = threading.Barrier(8), list[int](), list[str]()

    def fight(lease: Lease) -> None:
        draw = random.Random(lease.number)
        barrier.wait(5)
        for _ in range(50):
            try:
                mine = real.claim("a", lease)
            except OwnedError as error:
                lost.append(error.address)
                continue
            tokens.append(mine.token)  # only the owner gets here, so these come one after the other
            if draw.random() < 0.3:
                time.sleep(0)
            real.release(mine)

    threads = [threading.Thread(target=fight, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(tokens) + len(lost) == 400
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize(
    ("uids", "address", "ttl", "told"),
    [
        ([], "x:1", 1.0, "there is no expert"),
        (["a", ""], "x:1", 1.0, "name is empty"),
        ("", "x:1", 1.0, "name is empty"),
        ("a", "", 0.0, r"address is empty(.|\n)*ttl is 0.0"),
        ("a", "x:1", float("nan"), "ttl is nan"),
        ("a", "x:1", float("inf"), "ttl is inf"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused(
    case: Case, uids: str | list[str], address: str, ttl: float, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        case.directory.declare(uids, address, ttl)
    assert len(case.directory.get()) == 0
