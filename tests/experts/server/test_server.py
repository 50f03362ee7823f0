"""Start, restore, save, listing in a directory, and shutdown of a server."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.experts.concurrency import wait_until
from tests.experts.expert_cases import X, fussy_backend, rows, weights
from tests.experts.server.test_units import Silent
from torchweft.core.errors import UsageError
from torchweft.experts import ExpertBackend
from torchweft.experts.checkpoint import Checkpoint, CheckpointStore, EncodedCheckpoint, FolderCheckpointStore
from torchweft.experts.client import LocalTransport, RemoteExpert
from torchweft.experts.client.status import shown
from torchweft.experts.discovery import Lease, LocalDirectory, Snapshot
from torchweft.experts.discovery.registration import LeaseHeartbeat
from torchweft.experts.errors import AlreadyDeclaredError, CommitError, DrainingError, UnknownExpertError
from torchweft.experts.replication import ReplicaOptions
from torchweft.experts.serialization import deserialize, serialize
from torchweft.experts.server import Server, ServerOptions
from torchweft.experts.wire import Call, Header, Kind, Limits
from torchweft.experts.wire.service import StepReceipt

sgd = partial(torch.optim.SGD, lr=0.1)
PATIENCE = 10.0


def train_steps(server: Server, steps: int) -> None:
    with LocalTransport(server.handler()) as transport:
        remote = RemoteExpert("fussy", transport)
        for step in range(steps):
            remote(rows(3, step)).square().sum().backward()


def test_server_restores_its_checkpoint(store: FolderCheckpointStore) -> None:
    first = fussy_backend()
    with Server([first], checkpoints=store) as server:
        train_steps(server, 3)
        assert server.statistics().keeping["fussy"].durable == 0
    assert store.steps("fussy")[0] == 3  # saved at shutdown
    second = fussy_backend()
    with Server([second], checkpoints=store) as server:
        assert server.statistics().keeping["fussy"].restored == 3
        assert weights(second) == weights(first)


class InMemory:
    """Minimal storage of checkpoints, which is also its own lock."""

    def __init__(self) -> None:
        self.newest: dict[str, EncodedCheckpoint] = {}

    def lock(self, uid: str, *, shared: bool = False) -> "InMemory":
        return self

    def hold(self) -> None: ...

    def release(self) -> None: ...

    def encode(self, uid: str, state: Any, step: int, extra: Any = None) -> EncodedCheckpoint:
        return EncodedCheckpoint(uid, step, serialize([state, extra]))

    def write(self, encoded: EncodedCheckpoint) -> None:
        self.newest[encoded.uid] = encoded

    def load_newest(self, uid: str) -> Checkpoint | None:
        encoded = self.newest.get(uid)
        return None if encoded is None else Checkpoint(uid, encoded.step, *deserialize(encoded.data), "memory")

    def load(self, uid: str, step: int) -> Checkpoint:
        found = self.load_newest(uid)
        assert found is not None and found.step == step
        return found

    def has(self, uid: str, step: int) -> bool:
        return uid in self.newest and self.newest[uid].step == step


def test_storage_other_than_a_folder_restores_an_expert(store: FolderCheckpointStore) -> None:
    storage, first, second = InMemory(), fussy_backend(), fussy_backend()
    assert isinstance(storage, CheckpointStore) and isinstance(store, CheckpointStore)
    for backend in (first, second):
        with Server([backend], checkpoints=storage) as server:
            train_steps(server, 2)
    assert second.steps == 4 == storage.newest["fussy"].step


def test_initial_weights_survive_a_restart(tmp_path: Path) -> None:
    first, second = expert_named("layer"), expert_named("layer")
    assert weights(first) != weights(second)
    for backend in (first, second):
        with Server([backend], checkpoints=FolderCheckpointStore(tmp_path)):
            pass
    assert weights(first) == weights(second)


def test_server_saves_stepped_experts_periodically(store: FolderCheckpointStore, tmp_path: Path) -> None:
    with Server([fussy_backend()], checkpoints=store, options=ServerOptions(checkpoint_seconds=0.05)) as server:
        train_steps(server, 2)
        wait_until(lambda: server.statistics().keeping["fussy"].durable == 2)
        saved = sorted(tmp_path.rglob("*.safetensors"))  # names contain a number that each save increases
        server._background.periodic["checkpoints"].act()
        assert sorted(tmp_path.rglob("*.safetensors")) == saved
        assert server.checkpoint() == 0


def test_full_disk_is_reported_and_stops_nothing(store: FolderCheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with Server([fussy_backend()], checkpoints=store, options=ServerOptions(checkpoint_seconds=0.05)) as server:
        full = OSError("no space left")
        monkeypatch.setattr(store._disk, "write", lambda *_: (_ for _ in ()).throw(full))
        train_steps(server, 1)
        wait_until(lambda: "no space left" in server.statistics().failures.get("checkpoints", ""))
        train_steps(server, 1)
        monkeypatch.undo()
        wait_until(lambda: server.statistics().keeping["fussy"].durable == 2)


def test_server_is_listed_until_it_drains() -> None:
    renewals = list[Lease]()

    class Counting(LocalDirectory):
        def renew(self, lease: Lease) -> None:
            super().renew(lease)
            renewals.append(lease)

    directory = Counting()
    with Server([fussy_backend()], directory=directory, options=ServerOptions(lease_seconds=0.5)) as server:
        assert directory.get().addresses("fussy") == (server.address,)
        wait_until(lambda: len(renewals) >= 4)  # for longer than the lease
        wait_until(lambda: server.statistics().listed == ("fussy",) and "fussy" in directory.get())
        server.drain()
        assert "fussy" not in directory.get()


def test_expert_of_another_server_is_refused() -> None:
    directory, options = LocalDirectory(), ServerOptions(lease_seconds=0.2)
    directory.declare("fussy", "dead:1", 0.2)  # the server waits until this lease ends
    with Server([fussy_backend()], directory=directory, options=options) as first:
        assert directory.get().addresses("fussy") == (first.address,)
        refused = Server([fussy_backend()], directory=directory, options=options)
        with pytest.raises(UsageError, match=rf"(?s)set replicas= at every server.*'fussy' at {first.address}"):
            refused.start()
        with Server(directory=directory, options=options) as second:
            with pytest.raises(UsageError, match="clients might move between different weights"):
                second.add(fussy_backend())
            assert second.experts == []
        assert directory.get().addresses("fussy") == (first.address,)
    directory.close()


def test_simultaneous_declarations_are_both_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = LocalDirectory()
    first, second = (LeaseHeartbeat(directory, lambda: ("fussy",), address, 60.0) for address in ("a:1", "b:1"))
    first.turn()
    seen = [Snapshot()]
    get = directory.get
    monkeypatch.setattr(directory, "get", lambda prefix="": seen.pop() if seen else get(prefix))
    with pytest.raises(AlreadyDeclaredError, match="'fussy' at a:1"):
        second.turn()
    assert directory.get().addresses("fussy") == ("a:1",) and second.listed == ()
    directory.close()


def test_experts_are_added_and_removed_while_serving(directory: LocalDirectory, tmp_path: Path) -> None:
    with (
        Server(directory=directory, checkpoints=FolderCheckpointStore(tmp_path)) as server,
        LocalTransport(server.handler()) as transport,
    ):
        assert server.experts == [] and not len(directory.get())
        server.add(fussy_backend())
        assert "fussy" in directory.get()
        train_steps(server, 1)
        assert server.remove("fussy")
        assert "fussy" not in directory.get()
        call = Call(Header(kind=Kind.FORWARD, call_id=0, uid="fussy"), [rows(1, 0)])
        assert isinstance(transport.submit(call, PATIENCE).exception(PATIENCE), UnknownExpertError)
        server.add(fussy_backend())
        assert server.statistics().experts["fussy"].steps == 1


def expert_named(name: str) -> ExpertBackend:
    return ExpertBackend(name, nn.Linear(4, 4, dtype=torch.float64), sgd, args_schema=(X,))


def test_uncallable_expert_is_misuse() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor, kind: object) -> torch.Tensor:
            return x

    with pytest.raises(UsageError, match=r"args\[1\] is torch.float32"):
        Server([ExpertBackend("odd", Odd(), args_schema=(X, torch.float32))])
    long = "\u00e9" * 513
    with pytest.raises(UsageError, match="has a name of 1026 bytes, but a call can name at most 1024"):
        Server([expert_named(long)])
    with pytest.raises(UsageError, match="4 bytes, but a call can name at most 3 "):
        Server([expert_named("long")], options=ServerOptions(limits=Limits(name_bytes=3)))
    with pytest.raises(UsageError, match="served already"):
        Server([expert_named("x"), expert_named("x")])
    with Server([expert_named(long[1:])]) as server, LocalTransport(server.handler()) as transport:
        assert RemoteExpert(long[1:], transport)(rows(1, 0)).shape == (1, 4)
        for name, words in ((long, "1026 bytes"), (long[1:], "served already")):
            with pytest.raises(UsageError, match=words):
                server.add(expert_named(name))


def test_line_break_in_a_name_keeps_the_status_table() -> None:
    server = Server([expert_named("two\nlines")], directory=LocalDirectory(), replicas=ReplicaOptions())
    lines = shown(server.status()).splitlines()
    assert lines[2].startswith(r"two\nlines  ") and lines[3].startswith(r"two\nlines: has no owner")
    assert len(lines) == 4


def test_server_starts_once() -> None:
    server = Server([fussy_backend()])
    with pytest.raises(UsageError, match="no address"):
        _ = server.address
    with server:
        with pytest.raises(UsageError, match="once"):
            server.start()
        with pytest.raises(UsageError, match="listen"):
            Server([fussy_backend()], address=server.address).start()
    with pytest.raises(UsageError, match="once"):
        server.start()
    assert server.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("replicas", [None, ReplicaOptions(first_seconds=0.1)], ids=["plain", "replicas"])
def test_silent_directory_does_not_delay_the_shutdown(replicas: ReplicaOptions | None) -> None:
    directory = Silent()
    options = ServerOptions(lease_seconds=0.03)
    server = Server([fussy_backend()], directory=directory, options=options, replicas=replicas)
    server.start()
    try:
        directory.away = True
        assert directory.asked.wait(PATIENCE)  # the lease thread hangs in it
        assert server.shutdown() and not directory.gate.is_set()
    finally:
        directory.gate.set()


def test_local_calls_are_refused_while_draining() -> None:
    with Server([fussy_backend()]) as server, LocalTransport(server.handler()) as transport:
        server.drain("for a test")
        call = Call(Header(kind=Kind.FORWARD, call_id=0, uid="fussy"), [rows(1, 0)])
        error = transport.submit(call, PATIENCE).exception(PATIENCE)
        assert isinstance(error, DrainingError) and "for a test" in str(error)
        assert server.statistics().draining == "for a test"


def test_commit_of_an_earlier_incarnation_is_refused() -> None:
    """A commit that was already applied is acknowledged."""

    def commit(transport: LocalTransport, name: str, incarnation: int) -> BaseException | None:
        data = StepReceipt(None, incarnation).to_bytes()
        header = Header(kind=Kind.COMMIT, call_id=0, uid="fussy", client="c", key=name, mini_batch=name, data=data)
        return transport.submit(Call(header), PATIENCE).exception(PATIENCE)

    with Server([fussy_backend()]) as server, LocalTransport(server.handler()) as transport:
        mine = server.statistics().incarnation
        for name in ("m", "n"):
            header = Header(kind=Kind.BACKWARD, call_id=0, uid="fussy", client="c", mini_batch=name)
            transport.submit(Call(header, [rows(1, 0), rows(1, 0)]), PATIENCE).result(PATIENCE)
        assert isinstance(commit(transport, "m", mine + 1), CommitError)
        assert commit(transport, "n", mine) is None
        assert commit(transport, "n", mine + 1) is None  # applied already: repetitions can have an earlier incarnation
        assert server.statistics().experts["fussy"].steps == 1
