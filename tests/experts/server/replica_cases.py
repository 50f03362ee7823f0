"""Servers that share experts, single replicas, a client that calls in a loop, and directories that fail."""

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
    """Directory that does not answer while ``away``, although its leases continue to expire."""

    away = False

    def _expire(self) -> None:
        if self.away:
            raise DirectoryUnavailableError("away")
        super()._expire()


def _forward_to_inner(name: str) -> Any:
    return lambda self, *values: getattr(self._reachable(), name)(*values)


class Cut(LocalDirectory):
    """One server's view of a directory, which can be cut off separately. The directory can also lose its data."""

    def __init__(self, inner: LocalDirectory) -> None:
        super().__init__()
        self.inner = inner
        self.cut = False

    def lose_data(self, revisions: int = 0) -> None:
        """Replace the directory by an empty one after so many ``revisions``."""
        leases, self.inner = self.inner._last_lease, after(revisions)
        self.inner._last_lease += leases  # lease numbers are not reused

    def _reachable(self) -> LocalDirectory:
        if self.cut:
            raise DirectoryUnavailableError("cut off")
        return self.inner

    declare, renew, withdraw = map(_forward_to_inner, ("declare", "renew", "withdraw"))
    get, claim, release = map(_forward_to_inner, ("get", "claim", "release"))


def after(revisions: int) -> LocalDirectory:
    """Empty directory with a revision of at least ``revisions``."""
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
    """Replica without a server that owns its expert with ``token`` and has made a step for each key."""
    replica, mine = Replica(fussy_backend(), lambda lease: float("inf")), Ownership("fussy", "here:1", token)
    replica.claimed(mine, LEASED)
    replica.lead(mine, LEASED)
    for key in keys:
        future = replica.backend.backward_pool.submit_task(rows(2, 0), rows(2, 1), client="c", key=key)
        work(replica.backend)
        future.result(0)
    return replica


def die(server: Server) -> None:
    """Stop a server as SIGKILL does: it neither renews its lease nor answers, and withdraws nothing."""
    server._replication.stop()
    server._background.stop_periodic("lease", 1.0)
    server._state.end()
    server._background.close(1.0)


class HungTransport(GrpcTransport):
    """Transport to a server that hangs once ``hangs`` is set: calls are sent and never answered."""

    hangs = False

    def submit(self, call: Call, timeout: float) -> "Future[Received]":
        return Future() if self.hangs else super().submit(call, timeout)


def hang(server: Server, connections: Connections) -> None:
    """Stop a server as SIGSTOP does: no renewals, and no answers to these connections (with `HungTransport`)."""
    transport = connections.transport_to(server.address)
    assert isinstance(transport, HungTransport)
    transport.hangs = True
    server._replication.stop()
    server._background.stop_periodic("lease", 1.0)


@contextmanager
def calling(connections: Connections, uids: Sequence[str]) -> Generator[dict[str, int]]:
    """Train these experts in a loop until the end of the context, which fails if a call failed."""
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
    assert [future.exception() for future in running] == [None] * len(uids)
