"""Directory that is unavailable for a minute while clients call: an etcd that is stopped, or killed and restarted.

    clients ── calls ──> two servers ── leases ──x  etcd (unavailable)    calls use the last snapshot
                         own, follow                etcd (available)      experts are listed and owned again

Steps of an expert with replicas wait while its owner's lease has lapsed, because another server could own it. All other
calls are answered as usual.
"""

import signal
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from benchmarks.experts.survive_common import WIDTH, Verdict, rows, until
from tests.experts.etcd_cases import WHERE, Member, cluster, wait_for_port
from torchweft.experts import ExpertBackend, FeedForward, TensorSpec
from torchweft.experts.client import Connections, RemoteExpert
from torchweft.experts.discovery.etcd import EtcdDirectory
from torchweft.experts.discovery.fencing import number_of
from torchweft.experts.replication import ReplicaOptions
from torchweft.experts.server import Server, ServerOptions

SHARED = "shared"
_LIMIT = 30.0
"""Seconds within which the initial state must be restored."""
_CALL = 30.0


def _stop(member: Member, seconds: float) -> None:
    member.process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        member.process.send_signal(signal.SIGCONT)


def _kill_and_restart(member: Member, seconds: float) -> None:
    member.kill()
    time.sleep(seconds)
    member.start()


OUTAGES: dict[str, Callable[[Member, float], None]] = {"stopped": _stop, "killed and restarted": _kill_and_restart}


def away(seconds: float) -> list[Verdict]:
    """One verdict for each kind of outage. Empty without etcd."""
    return [] if WHERE is None else [_away(how, seconds) for how in OUTAGES]


@dataclass
class _Caller:
    """Calls one expert in a loop. ``longest`` is the longest that one call took."""

    remote: RemoteExpert
    steps: bool
    done: int = 0
    longest: float = 0.0
    faults: list[BaseException] = field(default_factory=list[BaseException])

    def run(self, stop: threading.Event) -> None:
        """Call until `stop` is set."""
        x = rows(1)
        while not stop.wait(0.02):
            start = time.monotonic()
            try:
                with torch.set_grad_enabled(self.steps):
                    y = self.remote(x)
                    if self.steps:
                        y.sum().backward()
                self.done += 1
            except BaseException as error:
                self.faults.append(error)
            self.longest = max(self.longest, time.monotonic() - start)


def _away(how: str, seconds: float) -> Verdict:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (member,) = stack.enter_context(cluster(folder))
        wait_for_port(member.endpoint)
        servers = [_server(stack, name, member.endpoint) for name in ("a", "b")]
        directory = stack.enter_context(EtcdDirectory(member.endpoint))
        connections = stack.enter_context(Connections(directory))
        remote = partial(RemoteExpert, where=connections)
        plain = [_Caller(remote(f"plain.{name}", timeout=_CALL), True) for name in ("a", "b")]
        plain.append(_Caller(remote(SHARED, timeout=_CALL), False))
        with_replicas = _Caller(remote(SHARED, timeout=seconds + 2 * _LIMIT), True)
        callers = [*plain, with_replicas]
        listed = directory.get()
        owner = listed.owner(SHARED)
        with _calling(callers):
            until(lambda: all(caller.done > 3 for caller in callers))
            before = [caller.done for caller in plain]
            OUTAGES[how](member, seconds)
            continued = all(caller.done > count for caller, count in zip(plain, before, strict=True))
            start, done = time.monotonic(), [caller.done for caller in callers]
            restored = until(lambda: _is_restored(directory, servers, listed.experts), _LIMIT)
            restored = restored and until(lambda: all(c.done > n for c, n in zip(callers, done, strict=True)), _LIMIT)
            took = time.monotonic() - start
            time.sleep(2.0)  # so that late failures are counted
        faults = [error for caller in callers for error in caller.faults]
        now = directory.get().owner(SHARED) if restored else None
        kept = now is not None and with_replicas.remote.describe().steps == with_replicas.done
    same = owner is not None and now is not None and now.address == owner.address
    longest = max(caller.longest for caller in plain)
    return Verdict(
        f"an etcd that is {how}",
        f"{seconds:g} s",
        "no failed call, no lost step; then listed and owned as before",
        f"{sum(caller.done for caller in callers)} calls, {len(faults)} failed{_first_fault(faults)}; the longest "
        f"{longest:.1f} s, of a step with replicas {with_replicas.longest:.1f} s; {'no' if kept else 'a'} step lost; "
        + (f"restored after {took:.1f} s, {'the same' if same else 'another'} owner" * restored or "not restored"),
        restored and continued and kept and not faults,
    )


def _server(stack: ExitStack, name: str, endpoint: str) -> Server:
    directory = stack.enter_context(EtcdDirectory(endpoint))
    args = (TensorSpec((None, WIDTH), torch.float32),)
    experts = [
        ExpertBackend(uid, FeedForward(WIDTH, WIDTH), torch.optim.Adam, args_schema=args)
        for uid in (f"plain.{name}", SHARED)
    ]
    replicas = ReplicaOptions([SHARED], follow_seconds=0.1, follow_steps=1)
    return stack.enter_context(
        Server(experts, directory=directory, replicas=replicas, options=ServerOptions(lease_seconds=2.0))
    )


@contextmanager
def _calling(callers: list[_Caller]) -> Generator[None]:
    stop = threading.Event()
    threads = [threading.Thread(target=caller.run, args=(stop,)) for caller in callers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _is_restored(directory: EtcdDirectory, servers: list[Server], listed: object) -> bool:
    try:
        now = directory.get()
    except ConnectionError:
        return False
    owner = now.owner(SHARED)
    roles = {server.address: server.statistics().replicas[SHARED] for server in servers}
    return (
        now.experts == listed
        and owner is not None
        and roles[owner.address].role == "owner"
        and (roles[owner.address].token == number_of(owner.token) and roles[owner.address].lasts)
    )


def _first_fault(faults: list[BaseException]) -> str:
    return f" ({faults[0]!r} first)" if faults else ""
