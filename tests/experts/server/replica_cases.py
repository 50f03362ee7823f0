"""Servers with the same experts, single replicas, a client that calls in a loop, and a directory that can be away."""

import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tests.experts.expert_cases import fussy_backend, rows, work
from tests.experts.server.server_cases import backend_of
from torchweft.experts import ExpertBackend
from torchweft.experts.client import Connections, GrpcTransport, RemoteExpert
from torchweft.experts.discovery import Directory, Lease, LocalDirectory, Ownership
from torchweft.experts.errors import DirectoryUnavailableError
from torchweft.experts.replication import Replica, ReplicaOptions
from torchweft.experts.server import Server, ServerOptions
from torchweft.experts.wire import Call, Received

PATIENCE = 15.0
LEASE = 1.0
LEASED = Lease(1, ("fussy",), "here:1", 5.0)
CLOSELY = ReplicaOptions(follow_seconds=0.05, follow_steps=1)


class Away(LocalDirectory):
    """A directory that does not answer while ``away``, and whose leases end meanwhile."""

    away = False

    def _expire(self) -> None:
        if self.away:
            raise DirectoryUnavailableError("away")
        super()._expire()


def _asked_of_inner(name: str) -> Any:
    return lambda self, *values: getattr(self._there(), name)(*values)


class Cut(LocalDirectory):
    """What one server sees of a directory: it can be cut off from it, and from it alone; and it can begin anew."""

    def __init__(self, inner: LocalDirectory) -> None:
        super().__init__()
        self.inner = inner
        self.cut = False

    def begin_anew(self, revisions: int = 0) -> None:
        """It has lost all that it knew; ``revisions`` have passed since."""
        leases, self.inner = self.inner._last_lease, after(revisions)
        self.inner._last_lease += leases  # numbers of leases do not come again

    def _there(self) -> LocalDirectory:
        if self.cut:
            raise DirectoryUnavailableError("cut off")
        return self.inner

    declare, renew, withdraw = map(_asked_of_inner, ("declare", "renew", "withdraw"))
    get, claim, release = map(_asked_of_inner, ("get", "claim", "release"))


def after(revisions: int) -> LocalDirectory:
    """A directory in which something else has happened before."""
    directory = LocalDirectory()
    while directory.get().revision < revisions:
        directory.withdraw(directory.declare("else", "elsewhere:1", 60.0))
    return directory


def expert(name: str = "fussy", **options: Any) -> ExpertBackend:
    backend = fussy_backend(**options)
    if name != "fussy":
        backend = ExpertBackend(
            name, backend.module, backend.optimizer, args_schema=(backend.executor.module.call.specs[0],)
        )
    return backend


def make(directory: Directory, *backends: ExpertBackend, replicas: ReplicaOptions = CLOSELY, **more: Any) -> Server:
    options = more.pop("options", ServerOptions(lease_seconds=LEASE))
    return Server(backends or [expert()], directory=directory, replicas=replicas, options=options, **more)


def role(server: Server, uid: str = "fussy") -> str:
    return server.statistics().replicas[uid].role


def step(remote: RemoteExpert, seed: int = 0) -> None:
    remote(rows(2, seed)).square().sum().backward()


def same_steps(one: Server, other: Server, uid: str = "fussy") -> bool:
    return backend_of(one, uid).steps == backend_of(other, uid).steps


def owning(token: int, *keys: str) -> Replica:
    """A replica without a server that owns its expert with this token, a step further for each of these keys."""
    replica, mine = Replica(fussy_backend(), lambda lease: float("inf")), Ownership("fussy", "here:1", token)
    replica.claimed(mine, LEASED)
    replica.lead(mine, LEASED)
    for key in keys:
        future = replica.backend.backward_pool.submit_task(rows(2, 0), rows(2, 1), client="c", key=key)
        work(replica.backend)
        future.result(0)
    return replica


def die(server: Server) -> None:
    """As SIGKILL: it renews no more, answers no more, and tells nobody."""
    server._replication.stop()
    server._background.stop_periodic("lease", 1.0)
    server._state.end()
    server._background.close(1.0)


class HungTransport(GrpcTransport):
    """To a server that hangs from when this is said: calls are sent, and never answered."""

    hangs = False

    def submit(self, call: Call, timeout: float) -> "Future[Received]":
        return Future() if self.hangs else super().submit(call, timeout)


def hang(server: Server, connections: Connections) -> None:
    """As SIGSTOP: it renews no more, and answers no call of these connections, whose transports are `HungTransport`."""
    transport = connections.transport_to(server.address)
    assert isinstance(transport, HungTransport)
    transport.hangs = True
    server._replication.stop()
    server._background.stop_periodic("lease", 1.0)


@contextmanager
def calling(connections: Connections, uids: Sequence[str]) -> Generator[dict[str, int]]:
    """A client that trains these experts in a loop; it fails at the end if any call did."""
    done, stop = dict.fromkeys(uids, 0), threading.Event()

    def run(uid: str) -> None:
        remote = RemoteExpert(uid, connections, timeout=PATIENCE)
        while not stop.is_set():
            step(remote, done[uid] % 7)
            done[uid] += 1

    with ThreadPoolExecutor(len(uids)) as pool:
        running = [pool.submit(run, uid) for uid in uids]
        try:
            yield done
        finally:
            stop.set()
    assert [each.exception() for each in running] == [None] * len(uids)
