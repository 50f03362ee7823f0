"""Operations on experts of a living server: set, export, rollback, load and unload."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.experts.concurrency import wait_until
from tests.experts.server.server_cases import backend_of
from torchweft.cli import main, parse, servers
from torchweft.core.errors import UsageError
from torchweft.core.spec import TensorSpec
from torchweft.experts import ExpertBackend
from torchweft.experts.checkpoint import FolderCheckpointStore
from torchweft.experts.client import Connections, GrpcTransport, LocalTransport, RemoteExpert, StepsLostWarning
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.errors import (
    CommitError,
    ForbiddenError,
    MalformedError,
    NotOwnerError,
    RemoteError,
    UnknownExpertError,
)
from torchweft.experts.replication import ReplicaOptions
from torchweft.experts.server import Access, Grant, Role, Server
from torchweft.experts.server.config import ServeConfig, build
from torchweft.experts.wire.service import Operation

X = torch.ones(2, 4)


def expert(name: str = "f", rate: float = 0.1, **options: Any) -> ExpertBackend:
    torch.manual_seed(0)
    make = partial(torch.optim.SGD, lr=rate)
    return ExpertBackend(name, nn.Linear(4, 4), make, args_schema=(TensorSpec((None, 4), torch.float32),), **options)


def weights(backend: ExpertBackend) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in backend.module.state_dict().items()}


def train(remote: RemoteExpert, times: int = 1) -> None:
    for _ in range(times):
        remote(X).sum().backward()


def rate_of(backend: ExpertBackend) -> float:
    assert backend.optimizer is not None
    return backend.optimizer.param_groups[0]["lr"]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Server, RemoteExpert]]:
    server = Server([expert()], checkpoints=tmp_path)
    with server, RemoteExpert("f", server.address) as remote:
        yield server, remote


def test_set_rate_holds_for_the_next_step_and_a_restart(
    served: tuple[Server, RemoteExpert], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, remote = served
    train(remote)
    before = weights(backend_of(server, "f"))
    assert main(["set", server.address, "f", "lr=0.5"]) == 0
    assert "it is at step 1, step 1 is saved" in capsys.readouterr().out
    train(remote)
    after = weights(backend_of(server, "f"))
    assert torch.allclose(before["bias"] - after["bias"], torch.full((4,), 0.5 * len(X)))
    server.shutdown()
    with Server([expert()], checkpoints=tmp_path) as restarted:
        assert rate_of(backend_of(restarted, "f")) == 0.5 and backend_of(restarted, "f").steps == 2
        assert "lr is 0.5, as in its checkpoint, and not 0.1" in restarted.statistics().keeping["f"].notes[0]


def test_change_without_a_step_is_saved_before_the_answer(served: tuple[Server, RemoteExpert], tmp_path: Path) -> None:
    server, remote = served
    train(remote)
    server.checkpoint()
    remote.set(lr=0.25)
    found = FolderCheckpointStore(tmp_path).load_newest("f")
    assert found is not None and (found.step, found.state["optimizer"]["param_groups"][0]["lr"]) == (1, 0.25)
    assert server.checkpoint() == 0, "nothing has changed since"


def test_fault_of_a_setting_is_the_servers_own(served: tuple[Server, RemoteExpert]) -> None:
    server, remote = served
    with pytest.raises(UsageError, match="it has no 'rate'"):
        remote.set(rate=1.0)
    with pytest.raises(UsageError, match="wanted NAME=VALUE"):
        main_error(["set", server.address, "f", "lr=fast"])
    assert rate_of(backend_of(server, "f")) == 0.1


def main_error(words: list[str]) -> None:
    """Run a command as `main` does, and let its error pass."""
    getattr(servers, parse(words).run.partition(":")[2])(parse(words))


def test_exported_weights_are_those_of_one_step(
    served: tuple[Server, RemoteExpert], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, remote = served
    train(remote, 3)
    file, own = tmp_path / "weights.safetensors", weights(backend_of(server, "f"))
    assert main(["export", server.address, "f", str(file)]) == 0
    assert "step 3 is in" in capsys.readouterr().out and [*tmp_path.glob(".weights*")] == []
    for state in (load_file(file), remote.state_dict()):
        assert state.keys() == own.keys() and all(torch.equal(state[name], own[name]) for name in own)
    nn.Linear(4, 4).load_state_dict(remote.state_dict())
    assert nn.Sequential(nn.Linear(4, 4), remote).state_dict().keys() == {"0.weight", "0.bias"}


def test_large_and_tied_weights_are_exported_whole(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 200_000, bias=False)  # several messages
            self.second = nn.Linear(4, 200_000, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return x + (self.first(x) - self.second(x)).mean()

    module = Tied()
    backend = ExpertBackend("t", module, args_schema=(TensorSpec((None, 4), torch.float32),))
    with Server([backend]) as server:
        assert main(["export", server.address, "t", str(tmp_path / "t")]) == 0
    module.load_state_dict(load_file(tmp_path / "t"))


def test_rollback_returns_to_a_kept_step(served: tuple[Server, RemoteExpert], tmp_path: Path) -> None:
    server, remote = served
    train(remote)
    server.checkpoint()
    kept = weights(backend_of(server, "f"))
    train(remote, 2)
    assert main(["rollback", server.address, "f", "--step", "1"]) == 0
    now = weights(backend_of(server, "f"))
    assert all(torch.equal(now[name], kept[name]) for name in kept)
    with pytest.warns(StepsLostWarning, match="from step 3 to step 1"):
        remote(X)
    train(remote)
    assert remote.steps == 2 and remote.steps_lost == 2
    server.shutdown()
    newest = FolderCheckpointStore(tmp_path).load_newest("f")
    assert newest is not None and newest.step == 2


def test_rollback_ends_open_mini_batches(served: tuple[Server, RemoteExpert]) -> None:
    server, remote = served
    train(remote)
    server.checkpoint()
    with RemoteExpert("f", server.address, accumulate=True) as other:
        train(other)
        assert main(["rollback", server.address, "f", "--step", "1"]) == 0
        with pytest.raises(CommitError):
            other.commit()


def test_rollback_heals_weights_that_are_not_finite(served: tuple[Server, RemoteExpert]) -> None:
    server, remote = served
    train(remote)
    server.checkpoint()
    with torch.no_grad():
        backend_of(server, "f").module.weight.fill_(float("nan"))  # type: ignore[operator,union-attr]
    backend_of(server, "f").executor.updates.weights.check("now")
    assert backend_of(server, "f").fault is not None
    assert main(["rollback", server.address, "f", "--step", "1"]) == 0
    train(remote)
    assert backend_of(server, "f").fault is None and backend_of(server, "f").steps == 2


def test_rollback_to_a_step_that_is_not_kept_changes_nothing(served: tuple[Server, RemoteExpert]) -> None:
    server, remote = served
    train(remote)
    with pytest.raises(RemoteError, match=r"no checkpoint of step 7 .* kept are 0"):
        main_error(["rollback", server.address, "f", "--step", "7"])
    with Server([expert()]) as other, pytest.raises(UsageError, match="has no checkpoints to go back to"):
        main_error(["rollback", other.address, "f", "--step", "0"])
    assert backend_of(server, "f").steps == 1


LOADABLE = """
[[experts]]
name = "ffn.{}"
count = 2
kind = "ffn"
arguments = { hidden = 4 }
optimizer = "SGD"
optimizer_arguments = { lr = 0.1 }
"""


def test_expert_of_the_named_file_is_loaded_and_unloaded(tmp_path: Path) -> None:
    file = tmp_path / "more.toml"
    table = {"address": "127.0.0.1:0", "checkpoints": str(tmp_path / "saved"), "loadable": str(file)}
    table["experts"] = [{"name": "first", "kind": "ffn", "arguments": {"hidden": 4}}]  # type: ignore[assignment]
    file.write_text(LOADABLE, "utf-8")
    with build(table) as server:
        assert main(["load", server.address, "ffn.1"]) == 0
        assert server.experts == ["ffn.1", "first"]
        with RemoteExpert("ffn.1", server.address) as remote:
            train(remote)
            with pytest.raises(UsageError, match="is served already"):
                main_error(["load", server.address, "ffn.1"])
            assert main(["unload", server.address, "ffn.1"]) == 0
            with pytest.raises(UnknownExpertError):
                remote(X)
            file.write_text(LOADABLE.replace("count = 2", "count = 3"), "utf-8")  # while the server runs
            assert main(["load", server.address, "ffn.2"]) == 0
            assert main(["load", server.address, "ffn.1"]) == 0
            assert remote.describe().steps == 1, "continues from its checkpoint"
        with pytest.raises(UsageError, match=r"has no expert 'ffn.9', known are ffn.0"):
            main_error(["load", server.address, "ffn.9"])
    with Server([expert()]) as server, pytest.raises(UsageError, match="has no loadable="):
        main_error(["load", server.address, "g"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("experts = 5", "experts is 5"),
        ("[[experts]]\nname = 'f'\nkind = 'fn'", "no kind of expert called 'fn'"),
        ("code = 1\nexperts = []", "has 'code', known are imports, experts"),
        ("[[", "is not TOML"),
    ],
)
def test_check_reports_faults_of_the_loadable_file(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "more.toml"
    file.write_text(text, "utf-8")
    first = {"name": "first", "kind": "ffn", "arguments": {"hidden": 4}}
    config = ServeConfig.parse({"address": "127.0.0.1:0", "loadable": str(file), "experts": [first]})
    with pytest.raises(UsageError, match=told):
        config.check()


OPERATIONS: dict[str, Callable[[str], Operation]] = {
    "set": lambda uid: Operation("set", uid, {"values": {"lr": 9.0}}),
    "export": lambda uid: Operation("export", uid),
    "rollback": lambda uid: Operation("rollback", uid, {"step": 0}),
    "load": lambda uid: Operation("load", "new"),
    "unload": lambda uid: Operation("unload", uid),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_only_an_administrator_of_the_expert_can_operate_it(name: str, tmp_path: Path) -> None:
    grants = [Grant("trainer", "*", Role.TRAIN), Grant("trainer", "other", Role.ADMIN)]
    access = Access(grants, {"secret": "trainer"})
    backend = expert()
    before = weights(backend)
    with Server([backend], access=access, checkpoints=tmp_path, loadable=expert) as server:
        refused = pytest.raises(ForbiddenError, match=f"the operation '{name}'")
        with GrpcTransport(server.address, token="secret") as transport, refused:
            transport.operate(OPERATIONS[name]("f"), 10.0)
        assert server.statistics().refusals[name.upper()] == 1
        assert server.experts == ["f"] and rate_of(backend) == 0.1
        assert all(torch.equal(x, before[key]) for key, x in backend.module.state_dict().items())


@pytest.mark.parametrize(
    "operation",
    [
        Operation("run", "f"),
        Operation("rollback", "f"),
        Operation("rollback", "f", {"step": True}),
        Operation("set", "f", {"values": {"lr": 1.0}, "group": "all"}),
        Operation("export", "f", {"code": "import os"}),
    ],
)
def test_malformed_operations_are_rejected(operation: Operation, served: tuple[Server, RemoteExpert]) -> None:
    with GrpcTransport(served[0].address) as transport, pytest.raises(MalformedError):
        transport.operate(operation, 10.0)


def test_operations_need_grpc() -> None:
    refused = pytest.raises(UsageError, match="administered over gRPC")
    with Server([expert()]) as server, LocalTransport(server.handler()) as transport, refused:
        RemoteExpert("f", transport).set(lr=1.0)


def test_replicas_follow_what_was_set_and_a_rollback(tmp_path: Path) -> None:
    directory, options = LocalDirectory(), ReplicaOptions(follow_seconds=0.05, follow_steps=1)
    backends = [expert(), expert()]
    servers = [Server([one], directory=directory, replicas=options, checkpoints=tmp_path) for one in backends]
    with servers[0], servers[1], Connections(directory) as connections:
        remote = RemoteExpert("f", connections)
        train(remote)
        servers[0].checkpoint()
        train(remote, 2)
        wait_until(lambda: backends[1].steps == 3)
        remote.set(lr=0.75)
        wait_until(lambda: rate_of(backends[1]) == 0.75)
        for operation in (Operation("set", "f", {"values": {"lr": 9.0}}), Operation("rollback", "f", {"step": 1})):
            with GrpcTransport(servers[1].address) as transport, pytest.raises(NotOwnerError):
                transport.operate(operation, 10.0)
        assert main(["rollback", servers[0].address, "f", "--step", "1"]) == 0
        wait_until(lambda: backends[1].steps == 1)
        assert rate_of(backends[1]) == 0.1
        with pytest.warns(StepsLostWarning):
            remote(X)
        servers[0].shutdown()  # the follower takes over, and does not return to the newer steps of the old token
        train(remote)
        assert remote.steps == 2
    directory.close()


def test_replica_does_not_prefer_its_file(tmp_path: Path) -> None:
    directory = LocalDirectory()
    with pytest.raises(UsageError, match="is a replica, so its hyperparameters are those of its owner"):
        Server([expert(prefer_configured=True)], directory=directory, replicas=ReplicaOptions())
    directory.close()
