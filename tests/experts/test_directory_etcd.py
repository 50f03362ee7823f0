"""A directory in a real etcd obeys the laws of every directory, and survives the loss of members.

The laws come from `test_directory`. Time is stretched, since etcd's leases last whole seconds.
"""

import os
import shutil
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.experts.etcd_cases import WHERE, Member, cluster, wait_for_port
from tests.experts.test_directory import (
    SOON,
    STEPS,
    Case,
    Model,
    Step,
    apply,
    test_a_declaration_that_makes_no_sense_is_refused,
    test_a_lease_that_is_not_renewed_ends_with_all_that_stands_under_it,
    test_a_server_that_comes_back_before_its_old_lease_ends_stays_listed,
    test_a_server_that_comes_back_replaces_its_own_claim_with_a_larger_token,
    test_a_watch_follows_every_change_and_keeps_the_last_snapshot_when_it_or_the_directory_is_closed,
    test_of_many_who_claim_at_once_one_wins_and_every_token_is_larger_than_the_last,
    test_only_one_owns_an_expert_until_it_lets_go_or_its_lease_ends,
    test_what_is_declared_is_found_by_its_prefix,
    test_withdrawing_is_at_once_and_may_be_repeated,
)
from tests.experts.waiting import until
from tests.forked import forked
from weft.core.errors import UsageError
from weft.experts.discovery import AwayError, Directory, Lease
from weft.experts.discovery.etcd import EtcdDirectory
from weft.experts.discovery.etcd_client import MESSAGES, EtcdTls, RefusedByEtcdError
from weft.experts.discovery.fencing import epoch_of, later

LAWS = (
    test_a_declaration_that_makes_no_sense_is_refused,
    test_a_lease_that_is_not_renewed_ends_with_all_that_stands_under_it,
    test_a_server_that_comes_back_before_its_old_lease_ends_stays_listed,
    test_a_server_that_comes_back_replaces_its_own_claim_with_a_larger_token,
    test_a_watch_follows_every_change_and_keeps_the_last_snapshot_when_it_or_the_directory_is_closed,
    test_of_many_who_claim_at_once_one_wins_and_every_token_is_larger_than_the_last,
    test_only_one_owns_an_expert_until_it_lets_go_or_its_lease_ends,
    test_what_is_declared_is_found_by_its_prefix,
    test_withdrawing_is_at_once_and_may_be_repeated,
)
"""What pytest collects here once more, with the fixtures of this file."""

STRETCH = 2.0


@pytest.fixture(autouse=True)
def needs_etcd(request: pytest.FixtureRequest) -> None:
    """Skip by name, since -rs folds equal reasons."""
    if WHERE is None:
        pytest.skip(f"{request.node.name}: there is no `etcd` on the path (Debian: apt-get install etcd-server)")


class Stretched(EtcdDirectory):
    """Leases last longer than was said."""

    def declare(self, uids: str | Sequence[str], address: str, ttl: float) -> Lease:
        return super().declare(uids, address, STRETCH * ttl)


@pytest.fixture(scope="module")
def member(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Member | None]:
    if WHERE is None:
        yield None  # the tests are skipped one by one, by `needs_etcd`
        return
    with cluster(tmp_path_factory.mktemp("etcd")) as members:
        wait_for_port(members[0].endpoint)
        yield members[0]


def fresh(member: Member, kind: type[EtcdDirectory] = EtcdDirectory, **more: Any) -> EtcdDirectory:
    """A directory that nobody else sees."""
    return kind(member.endpoint, namespace=uuid.uuid4().hex, **more)


@pytest.fixture
def case(member: Member) -> Iterator[Case]:
    with fresh(member, Stretched) as directory:
        yield Case(directory, lambda seconds: time.sleep(STRETCH * seconds))


@pytest.fixture
def real(member: Member) -> Iterator[Directory]:
    with fresh(member) as directory:
        yield directory


WITHOUT_TIME = STEPS.filter(lambda step: step.what != "advance").map(
    lambda step: Step(step.what, step.server, step.uid, 60.0)
)


@settings(max_examples=10)
@given(steps=st.lists(WITHOUT_TIME, min_size=5, max_size=30), prefix=st.sampled_from(["", "a"]))
def test_snapshots_are_as_they_should_be_and_events_lead_from_one_to_the_next(
    member: Member, steps: list[Step], prefix: str
) -> None:
    model, leases, tokens = Model(), dict[int, Lease](), list[int]()
    with fresh(member) as directory, directory.watch(prefix) as watch:
        for step in steps:
            apply(step, Case(directory, time.sleep), model, leases, tokens)
            model.check(directory.get())
        now = directory.get(prefix)
        until(lambda: (watch.snapshot().experts, watch.snapshot().owners) == (now.experts, now.owners))


def test_a_change_is_seen_within_100_ms(real: Directory) -> None:
    late = list[float]()
    with real.watch() as watch:
        for i in range(3):
            lease = real.declare(f"e{i}", "x:1", 60.0)
            start = time.monotonic()
            until(lambda: len(watch.snapshot()))
            late.append(time.monotonic() - start)
            real.withdraw(lease)
            until(lambda: not len(watch.snapshot()))
    assert min(late) < SOON  # the best of three: a busy machine only ever adds


def test_leases_are_rounded_up_to_whole_seconds_and_say_so(real: Directory) -> None:
    assert real.declare("a", "x:1", 1.2).ttl == 2.0


def test_more_experts_than_a_transaction_takes_are_declared_under_one_lease(real: Directory) -> None:
    names = [f"e.{i}" for i in range(250)]
    lease = real.declare(names, "x:1", 60.0)
    assert len(real.get("e.")) == 250
    real.withdraw(lease)
    assert len(real.get()) == 0


def test_namespaces_do_not_see_each_other_and_strangers_keys_are_passed_over(member: Member) -> None:
    with fresh(member) as one, fresh(member) as other, other.watch() as watch:
        one.declare("a", "x:1", 60.0)
        assert len(other.get()) == 0
        put = MESSAGES["TxnRequest"]()
        for tail in (b"stranger", b"a\0z9", b"\xff\0a1", b"a\0a\xff"):
            request = put.success.add().request_put
            request.key, request.value = other._keys.range("")[0] + tail, b"?"
        other._txn(put, Lease(0, (), "", 1.0))
        assert len(other.get()) == 0 and len(watch.snapshot()) == 0


def test_closing_a_directory_ends_its_watches_and_leaves_no_thread(member: Member) -> None:
    directory = fresh(member)
    watches = [directory.watch(), directory.watch("a")]
    directory.close()
    until(lambda: not [each for each in threading.enumerate() if each.name.startswith("weft-etcd")])
    assert all(len(each.snapshot()) == 0 for each in watches)
    directory.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_of_the_process_leaves_the_directory_to_its_parent(member: Member) -> None:
    with fresh(member) as directory, directory.watch() as watch:
        directory.declare("a", "here:1", 60.0)
        until(lambda: watch.snapshot().uids == ("a",))

        def child() -> bool:
            with pytest.raises(UsageError, match="was forked from one that uses gRPC"):
                directory.get()
            directory.close()
            return True

        assert forked(child)
        assert directory.get().uids == ("a",)


def test_a_member_that_accepts_and_is_silent_costs_its_share_of_the_timeout(member: Member) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        with EtcdDirectory([where, member.endpoint], namespace=uuid.uuid4().hex, timeout=1.0) as directory:
            start = time.monotonic()
            directory.declare("a", "x:1", 60.0)
            assert time.monotonic() - start < 20.0
            taken: list[float] = []
            for _ in range(10):  # now it knows whom to ask first; the machine may be busy at times
                start = time.monotonic()
                assert directory.get().uids == ("a",)
                taken.append(time.monotonic() - start)
            assert min(taken) < 0.3


def test_a_cluster_goes_on_without_any_one_member_and_watches_miss_nothing(tmp_path: Path) -> None:
    with cluster(tmp_path, members=3) as members:
        for each in members:
            wait_for_port(each.endpoint)
        with EtcdDirectory([each.endpoint for each in members], timeout=10.0) as directory:
            lease = directory.declare("a", "x:1", 60.0)
            mine = directory.claim("a", lease)
            with directory.watch() as watch:
                begin, changed = directory._client.watch, threading.Event()

                def slowly(index: int, requests: Any) -> Any:
                    changed.wait(20)  # what happens meanwhile must be seen as well
                    return begin(index, requests)

                directory._client.watch = slowly
                members[directory._client.order()[0]].kill()
                directory.declare("b", "x:1", 60.0)
                directory.renew(lease)
                newer = directory.claim("a", lease)
                assert newer.token > mine.token
                changed.set()
                until(lambda: watch.snapshot().uids == ("a", "b") and watch.snapshot().owner("a") == newer)


def test_a_watch_serves_while_etcd_is_away_and_catches_up_after(tmp_path: Path) -> None:
    with cluster(tmp_path) as (member,):
        wait_for_port(member.endpoint)
        with EtcdDirectory(member.endpoint, timeout=2.0) as directory:
            lease = directory.declare("a", "x:1", 60.0)
            with directory.watch() as watch:
                member.kill()
                until(lambda: watch.away_seconds)
                with pytest.raises(AwayError):
                    directory.renew(lease)
                assert watch.snapshot().uids == ("a",) and watch.away_seconds > 0
                member.start()
                wait_for_port(member.endpoint)
                until(lambda: not watch.away_seconds)
                directory.renew(lease)
                directory.declare("b", "x:1", 60.0)
                until(lambda: watch.snapshot().uids == ("a", "b"))


@pytest.mark.parametrize(("before", "since"), [(20, 0), (0, 20)], ids=["smaller", "larger"])
def test_an_etcd_that_was_emptied_has_another_epoch_and_watches_see_what_it_holds_now(
    before: int, since: int, tmp_path: Path
) -> None:
    def pass_by(directory: EtcdDirectory, count: int) -> None:
        for _ in range(count):
            directory.withdraw(directory.declare("else", "elsewhere:1", 60.0))

    with cluster(tmp_path) as (member,):
        wait_for_port(member.endpoint)
        with EtcdDirectory(member.endpoint) as directory, directory.watch() as watch:
            pass_by(directory, before)
            old = directory.claim("a", directory.declare("a", "x:1", 60.0))
            until(lambda: watch.snapshot().owner("a") == old)
            member.kill()
            shutil.rmtree(tmp_path / "m0")
            member.start()
            wait_for_port(member.endpoint)
            with EtcdDirectory(member.endpoint) as other:
                pass_by(other, since)
                lease = other.declare("b", "y:1", 60.0)
                new = other.claim("b", lease)
                assert epoch_of(new.token) != epoch_of(old.token)
                until(lambda: watch.snapshot().uids == ("b",) and watch.snapshot().owner("b") == new)
                again = directory.claim("b", Lease(lease.number, ("b",), "y:1", 60.0))
                assert later(again.token, new.token)
                assert directory.get().owner("b") == again


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and what it signed for etcd and for a client."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no `openssl` on the path, which makes the certificates of this test")
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=30)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=authority")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n")
    for name in ("etcd", "client"):
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")
    return folder


def test_etcd_is_reached_with_certificates_and_only_with_the_right_ones(certificates: Path, tmp_path: Path) -> None:
    at = {name: str(certificates / name) for name in ("ca.pem", "etcd.pem", "etcd.key", "client.pem", "client.key")}
    options = ["--cert-file", at["etcd.pem"], "--key-file", at["etcd.key"], "--trusted-ca-file", at["ca.pem"]]
    with cluster(tmp_path, client=[*options, "--client-cert-auth"], scheme="https") as (member,):
        wait_for_port(member.endpoint)
        right = EtcdTls(at["ca.pem"], at["client.key"], at["client.pem"])
        with EtcdDirectory(member.endpoint, tls=right) as directory, directory.watch() as watch:
            directory.declare("a", "x:1", 60.0)
            until(lambda: watch.snapshot().addresses("a") == ("x:1",))
        for wrong in (EtcdTls(at["ca.pem"]), EtcdTls(), None):
            with EtcdDirectory(member.endpoint, tls=wrong, timeout=1.0) as directory, pytest.raises(AwayError):
                directory.get()
    with pytest.raises(UsageError, match="give both"):
        EtcdTls(key=at["client.key"])


def test_what_etcd_refuses_is_not_asked_again(member: Member) -> None:
    with fresh(member) as directory, pytest.raises(RefusedByEtcdError, match="INVALID_ARGUMENT"):
        request = MESSAGES["TxnRequest"]()
        for i in range(200):
            request.success.add().request_put.key = str(i).encode()
        directory._txn(request, Lease(0, (), "", 1.0))


def test_a_name_that_would_not_come_back_whole_is_refused(real: Directory) -> None:
    with pytest.raises(UsageError, match="holds the character 0"):
        real.declare("a\0b", "x:1", 1.0)
