"""Server and client over gRPC: as a layer of a model, under load, and when one of them dies."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.experts.concurrency import in_threads, wait_until
from tests.experts.expert_cases import WIDTH, Fussy, X, close, fussy_backend, rows, seeded
from tests.processes import ROOT, SOURCE
from torchweft import Pipe
from torchweft.core.errors import UsageError
from torchweft.experts import ExpertBackend
from torchweft.experts.checkpoint import FolderCheckpointStore
from torchweft.experts.client import NEVER, Connections, GrpcTransport, RemoteExpert, commit, create_remote_experts
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.errors import CommitError, ExpertFailedError, LostError, StepsLostWarning, UnreachableError
from torchweft.experts.mixture import RemoteMixtureOfExperts
from torchweft.experts.server import Server, ServerOptions
from torchweft.experts.wire import Call, Header, Kind

sgd = partial(torch.optim.SGD, lr=0.1)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server([fussy_backend(optimizer=sgd)]) as server:
        yield server


def surround(middle: nn.Module) -> nn.Sequential:
    first, last = (seeded(lambda: nn.Linear(WIDTH, WIDTH, dtype=torch.float64), seed) for seed in (1, 2))
    return nn.Sequential(first, middle, last)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for name, p in model.named_parameters() if p.grad is not None and not name.endswith("anchor")]


class Calling(nn.Module):
    """Module that calls other experts and counts its own calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.others: list[nn.Module] = []
        self.own_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.own_calls += bool(self.others)
        for other in self.others:
            x = other(x)
        return self.linear(x)


@pytest.mark.parametrize("backward", [False, True])
def test_error_of_a_nested_expert_is_the_module_s(server: Server, backward: bool) -> None:
    module = Calling()
    with (
        Server([ExpertBackend("outer", module, sgd, args_schema=(X,))]) as outer,
        RemoteExpert("outer", outer.address, timeout=3.0) as remote,
        Server([fussy_backend(optimizer=sgd)]) as other,
    ):
        y = remote(rows(2, 0)) if backward else None
        module.others = [RemoteExpert("fussy", other.address, retry=NEVER)]
        other.shutdown()
        with pytest.raises(ExpertFailedError, match="UnreachableError: ") as caught:
            remote(rows(2, 0)) if y is None else y.sum().backward()
        assert caught.value.details["type"] == "RuntimeError" and module.own_calls == 1
        module.others = [RemoteExpert("nobody", server.address)]
        with pytest.raises(ExpertFailedError, match="UnknownExpertError: there is no expert 'nobody'"):
            remote(rows(2, 0))


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("executor", ["threads", "serial"])
def test_pipe_stage_steps_once_without_extra_calls(server: Server, checkpoint: Any, executor: Any) -> None:
    with GrpcTransport(server.address) as transport:
        remote, local = RemoteExpert("fussy", transport, accumulate=True), seeded(Fussy)
        optimizer = sgd(local.parameters())
        settings = {"chunks": 4, "balance": [1, 1, 1], "checkpoint": checkpoint, "executor": executor}
        pipe, twin = Pipe(surround(remote), **settings), surround(local)
        for step in range(2):
            pipe.zero_grad()
            twin.zero_grad()
            pipe(rows(8, step)).square().sum().backward()
            twin(rows(8, step)).square().sum().backward()
            mine = gradients(twin)
            assert all(close(a, b) for a, b in zip(gradients(pipe), [*mine[:2], *mine[-2:]], strict=True))
            optimizer.step()
            assert commit(pipe) == {"fussy": True}
        assert remote.steps == 2
        # Two steps of four micro-batches, forward and backward, two commits, one info.
        assert transport.statistics().calls == 2 * 4 * 2 + 2 + 1


@pytest.mark.parametrize("executor", ["threads", "serial", "graph", "auto"])
def test_pipe_rejects_an_expert_that_steps_per_micro_batch(server: Server, executor: Any) -> None:
    with RemoteExpert("fussy", server.address) as remote, Connections({"fussy": server.address}) as connections:
        mixture = RemoteMixtureOfExperts(in_features=4, grid_size=[1], uid_prefix="fussy", connections=connections)
        model = nn.Sequential(surround(remote), nn.Sequential(nn.Identity(), mixture))
        with pytest.raises(UsageError) as caught:
            Pipe(model, chunks=2, balance=[1, 1], executor=executor)(rows(4, 0))
        for words in ("layer '0' of stage 0 (RemoteExpert)", "layer '1' of stage 1 (RemoteMixtureOfExperts)"):
            assert f"{words}: make it with accumulate=True and commit" in str(caught.value)
        assert server.statistics().calls == 0
        pipe = Pipe(surround(remote), chunks=2, balance=[1, 1, 1], executor=executor)
        with torch.no_grad():
            pipe(rows(4, 0))
        pipe.chunks = 1
        pipe(rows(4, 0)).sum().backward()
        assert remote.steps == 1


def test_the_first_stage_of_a_pipe_is_trained_too(server: Server) -> None:
    with RemoteExpert("fussy", server.address, accumulate=True) as remote:
        model = nn.Sequential(remote, seeded(lambda: nn.Linear(WIDTH, 1, dtype=torch.float64)))
        Pipe(model, chunks=2, balance=[1, 1], executor="threads")(rows(4, 0)).sum().backward()
        assert commit(model) == {"fussy": True} and remote.steps == 1


def test_clients_share_batches_and_every_backward_steps_once(server: Server) -> None:
    def work(seed: int) -> None:
        with RemoteExpert("fussy", server.address) as remote:
            for turn in range(4):
                remote(rows(2, seed + turn)).sum().backward()

    in_threads(work, range(6))
    seen = server.statistics().experts["fussy"]
    backward = seen.pools["fussy.backward"]
    assert backward.answered == 24 and seen.steps == backward.batches <= 24
    wait_until(lambda: not server.statistics().calls)  # the last answers can still be in flight


def test_expert_is_found_again_at_a_new_address(directory: LocalDirectory) -> None:
    options = ServerOptions(lease_seconds=0.6)
    with Connections(directory) as connections:
        with Server([fussy_backend(optimizer=sgd)], directory=directory, options=options):
            remote, missing = create_remote_experts(["fussy", "nobody"], connections)
            assert missing is None and remote is not None
            expected = remote(rows(2, 0))
        assert "fussy" not in connections.snapshot()
        other = Server([fussy_backend(optimizer=sgd)], directory=directory, options=options)
        later = threading.Timer(0.3, other.start)
        later.start()
        try:
            assert close(remote(rows(2, 0)), expected)  # retried until a server lists it again
        finally:
            later.join()
            other.shutdown()


def test_plain_directories_and_fixed_addresses_work(server: Server) -> None:
    addresses, directory = {"fussy": server.address}, LocalDirectory()
    directory.declare(server.experts, server.address, 60.0)
    with Connections(addresses) as connections:
        for steps, source in enumerate((addresses, connections, directory), 1):
            remote, missing = create_remote_experts(["fussy", "else"], source)
            assert remote is not None and missing is None
            remote(rows(2, 0)).sum().backward()
            assert remote.steps == steps
    directory.close()
    for known, words in ((addresses, "fussy"), ({}, "no expert")):
        rejection = pytest.raises(UsageError, match=f"no address of expert 'fusy', but addresses of {words}$")
        with Connections(known) as connections, RemoteExpert("fusy", connections, timeout=2.0) as wrong, rejection:
            wrong(rows(1, 0))


SERVE = """
import sys, threading, torch
torch.set_num_threads(1)
from functools import partial
sys.path.insert(0, {root!r})
from tests.experts.expert_cases import fussy_backend
from torchweft.experts.checkpoint import FolderCheckpointStore
from torchweft.experts.server import Server, ServerOptions
server = Server(
    [fussy_backend(optimizer=partial(torch.optim.SGD, lr=0.1))], address={address!r},
    checkpoints=FolderCheckpointStore({root_of_checkpoints!r}), options=ServerOptions(checkpoint_seconds=3600.0),
)
server.start()
print(server.address, flush=True)
for line in sys.stdin:
    if line.strip() == "save":
        print(server.checkpoint(), flush=True)
server.shutdown()
"""


class Child:
    def __init__(self, folder: Path, address: str = "127.0.0.1:0") -> None:
        text = SERVE.format(root=str(ROOT), address=address, root_of_checkpoints=str(folder))
        env, pipe = {**os.environ, "PYTHONPATH": str(SOURCE)}, subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", text], stdin=pipe, stdout=pipe, text=True, env=env)
        assert self.process.stdout is not None and self.process.stdin is not None
        self._input, self._output = self.process.stdin, self.process.stdout
        self.address = self._output.readline().strip()

    def save(self) -> None:
        self._input.write("save\n")
        self._input.flush()
        assert self._output.readline().strip() == "1"

    def end(self, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        self.process.communicate(timeout=60)


def call_until_failure(transport: GrpcTransport) -> "Future[BaseException]":
    failure: Future[BaseException] = Future()
    call = Call(Header(kind=Kind.FORWARD, call_id=0, uid="fussy"), [rows(512, 0)])

    def work() -> None:
        while (error := transport.submit(call, 25.0).exception(30.0)) is None:
            pass
        failure.set_result(error)

    threading.Thread(target=work).start()
    return failure


@pytest.mark.long
def test_killed_server_keeps_durable_steps_once(tmp_path: Path) -> None:
    child = Child(tmp_path)
    key = "the-key"
    x, gradient = rows(2, 0), rows(2, 1)
    backward = Call(Header(kind=Kind.BACKWARD, call_id=0, uid="fussy", key=key, client="me"), [x, gradient])
    with GrpcTransport(child.address) as transport, RemoteExpert("fussy", transport, timeout=20.0) as remote:
        first = transport.submit(backward, 10.0).result(10.0)
        assert first.header.step == 1
        child.save()
        assert remote.describe().durable == 1 and remote.durable_step == 1
        remote(x).sum().backward()
        assert (remote.steps, remote.durable_step) == (2, 1)  # the second step is not durable yet
        failure = call_until_failure(transport)
        child.end(kill=True)
        start = time.monotonic()
        assert isinstance(failure.result(20.0), LostError | UnreachableError)  # well before the deadline of 25 s
        assert isinstance(transport.submit(backward, 1.0).exception(20.0), UnreachableError)
        assert time.monotonic() - start < 20.0
        again = Child(tmp_path, child.address)
        try:
            with pytest.warns(StepsLostWarning, match=f"from step 2 to step 1: the server at {child.address} was"):
                description = remote.describe()  # waits for the restart
            assert (description.steps, description.durable) == (1, 1) and remote.steps_lost == 1
            repeated = transport.submit(backward, 10.0).result(10.0)
            assert torch.equal(repeated.tensors()[0], first.tensors()[0])
            assert remote.describe().steps == 1  # no second step
            other = Call(Header(kind=Kind.BACKWARD, call_id=0, uid="fussy", key="new", client="me"), [x, gradient])
            assert transport.submit(other, 10.0).result(10.0).header.step == 2
        finally:
            again.end()
    assert FolderCheckpointStore(tmp_path).steps("fussy")[0] == 2  # saved at the shutdown


def test_mini_batch_torn_by_a_restart_is_not_applied() -> None:
    with (
        Server([fussy_backend(optimizer=sgd)]) as server,
        RemoteExpert("fussy", server.address, accumulate=True) as remote,
    ):
        remote(rows(2, 0)).sum().backward()
        server.shutdown()  # open mini-batches are not saved
        with Server([fussy_backend(optimizer=sgd)], address=server.address):
            remote(rows(2, 1)).sum().backward()
            with pytest.raises(CommitError, match="incomplete"):
                remote.commit()
            remote.discard()
            remote(rows(2, 0)).sum().backward()
            assert remote.commit() and remote.steps == 1
