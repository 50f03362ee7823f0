"""Errors that new users meet: each names the place, the value seen, the value expected and a remedy."""

import importlib
import socket
import threading
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler

from tests.experts.certificates import Authority
from tests.processes import python
from tests.type_checks import without_type_checks
from torchweft.core.errors import UsageError, WeftError
from torchweft.experts import Dim, ExpertBackend, TensorSpec
from torchweft.experts.checkpoint import FolderCheckpointStore
from torchweft.experts.client import NEVER, ClientTls, Connections, RemoteExpert, create_remote_experts
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.errors import CertificateError, CheckpointError, NoExpertsError, UnreachableError
from torchweft.experts.mixture import RemoteMixtureOfExperts
from torchweft.experts.server import Server, ServerTls

ROWS = TensorSpec((None, 8), torch.float32)


def backend(name: str = "ffn.0", optimizer: Any = SGD, **options: Any) -> ExpertBackend:
    return ExpertBackend(name, nn.Linear(8, 8), optimizer, args_schema=(ROWS,), **options)


def message_of(kind: type[BaseException], act: Callable[[], object]) -> str:
    """Text of the error that ``act`` raises, including its notes."""
    with without_type_checks(), pytest.raises(kind) as caught:
        act()
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Server([cast(Any, nn.Linear(4, 4))]), ["experts[0] is of type Linear", "ExpertBackend('ffn.0'"]),
        (lambda: Server(cast(Any, backend())), ["experts is of type ExpertBackend", "Server([...])"]),
        (
            lambda: Server(cast(Any, nn.Sequential(nn.Linear(4, 4)))),
            ["experts is of type Sequential", "ExpertBackend("],
        ),
        (lambda: Server(cast(Any, "127.0.0.1:7070")), ["experts is of type str", "a list of them"]),
        (lambda: Server([]), ["experts is empty", "ExpertBackend(", "add()"]),
        (lambda: Server().add(cast(Any, nn.Linear(4, 4))), ["backend is of type Linear", "ExpertBackend("]),
        (lambda: TensorSpec(cast(Any, 8)), ["TensorSpec((None, 8), torch.float32)", "shape is 8", "dtype is None"]),
        (lambda: TensorSpec((-1, 8), torch.float32), ["shape is (-1, 8)", "[-1]", "None for an axis of any size"]),
        (lambda: TensorSpec((None, 8), cast(Any, "float32")), ["dtype is 'float32'", "torch.float32"]),
        (lambda: TensorSpec((None,), torch.int64, values=cast(Any, 10)), ["values is 10", "range(1000)"]),
        (lambda: backend(optimizer=partial(SGD, lrr=0.1)), ["'ffn.0'", "SGD", "'lrr'", "did you mean 'lr'?"]),
        (
            lambda: backend(schedule=partial(lr_scheduler.StepLR, step=1)),
            ["schedule cannot be made by StepLR", "its arguments are", "did you mean 'step_size'?"],
        ),
        (lambda: TensorSpec((None, Dim(max=0)), torch.float32), ["Dim(max=4096)", "max is 0"]),
        (lambda: Server(checkpoints=cast(Any, 5)), ["checkpoints is 5", "a folder"]),
        (lambda: backend(optimiser=SGD), ["'optimiser'", "did you mean 'optimizer'?"]),
        (
            lambda: backend(optim_kwargs={"lr": 0.1}),
            ["has no argument 'optim_kwargs'", "partial(torch.optim.SGD, lr=0.1)"],
        ),
        (lambda: backend(unheard_of=1), ["has no argument 'unheard_of'", "known are args_schema, clip_grad_norm"]),
    ],
)
def test_wrong_argument_is_explained(make: Callable[[], object], words: list[str]) -> None:
    text = message_of(UsageError, make)
    assert not [word for word in words if word not in text], text


def test_list_of_sizes_becomes_a_tuple() -> None:
    with without_type_checks():
        assert TensorSpec(cast(Any, [None, 8]), torch.float32) == ROWS


def test_optimizer_from_any_callable_is_accepted() -> None:
    assert backend(optimizer=lambda parameters: SGD(parameters, lr=0.1)).optimizer is not None


@pytest.mark.parametrize("kind", ["file", "below a file", "read-only"])
def test_unwritable_checkpoint_folder_is_found_at_once(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    root = tmp_path / "checkpoints"
    if kind == "read-only":  # root ignores the mode of a folder
        monkeypatch.setattr("os.access", lambda *_: False)
    else:
        root.write_text("not a folder")
    text = message_of(CheckpointError, lambda: FolderCheckpointStore(root / "x" if kind == "below a file" else root))
    assert str(root) in text and "Give another folder" in text


def test_taken_port_names_the_address(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        text = message_of(UsageError, Server([backend()], address=address).start)
    assert repr(address) in text and "another process listens there" in text
    # gRPC must not print a line of its own.
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("address", "words"),
    [("192.0.2.1:0", "this machine does not have that address"), ("no-such-host.invalid:0", "is 'no-such-host")],
)
def test_address_of_another_machine_is_explained(address: str, words: str) -> None:
    text = message_of(UsageError, Server([backend()], address=address).start)
    assert repr(address) in text and words in text


def test_port_of_an_ended_server_can_be_used_at_once() -> None:
    with Server([backend()]) as server, RemoteExpert("ffn.0", server.address) as remote:
        remote(torch.randn(2, 8))
        address = server.address
    with Server([backend()], address=address) as again:
        assert again.address == address


def test_missing_server_is_reported_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with RemoteExpert("ffn.0", address, timeout=4.0) as remote:  # time for two attempts on a crowded machine
        text = message_of(UnreachableError, lambda: remote(torch.randn(2, 8)))
    assert text.count("cannot be reached") == 1 and "in the same way" in text
    assert text.splitlines()[0].endswith("is `torchweft serve` running there?")


def test_wrong_authority_is_explained() -> None:
    server_side, other = Authority("lab"), Authority("another")
    tls = ServerTls(*server_side.issue("server"))
    trusting_another = ClientTls(authority=other.pem)
    with (
        Server([backend()], address="localhost:0", tls=tls) as server,
        RemoteExpert("ffn.0", server.address, tls=trusting_another, timeout=5.0) as remote,
    ):
        text = message_of(CertificateError, lambda: remote(torch.randn(2, 8)))
    assert server.address in text and "is not signed by authority=; check the certificates of both ends (tls=)" in text


@pytest.mark.parametrize(("prefix", "grid"), [("fnn", [4]), ("ffn", [4, 4])])
def test_grid_without_experts_lists_the_known_ones(prefix: str, grid: list[int]) -> None:
    directory = LocalDirectory()
    with Server([backend("ffn.0"), backend("ffn.1")], directory=directory), Connections(directory) as connections:
        mixture = RemoteMixtureOfExperts(in_features=8, grid_size=grid, uid_prefix=prefix, connections=connections)
        text = message_of(NoExpertsError, lambda: mixture(torch.randn(2, 8)))
    example = ".".join([prefix, *"0" * len(grid)])
    for words in (f"the grid {prefix}.*", repr(example), "it lists ffn.0, ffn.1", "Check uid_prefix and grid_size"):
        assert words in text


def test_empty_directory_says_that_it_lists_nothing() -> None:
    with Connections(LocalDirectory()) as connections:
        mixture = RemoteMixtureOfExperts(in_features=8, grid_size=[4], uid_prefix="ffn", connections=connections)
        assert "it lists no expert at all" in message_of(NoExpertsError, lambda: mixture(torch.randn(2, 8)))


def test_warns_if_no_requested_expert_is_listed() -> None:
    with pytest.warns(UserWarning, match=r"none of the experts fnn\.0, fnn\.1 is listed .* lists ffn\.0; check their"):
        assert create_remote_experts(["fnn.0", "fnn.1"], {"ffn.0": "127.0.0.1:1"}) == [None, None]


def test_unknown_expert_lists_those_of_the_server() -> None:
    with Server([backend()]) as server, RemoteExpert("fnn.0", server.address) as remote:
        assert "there is no expert 'fnn.0' here; there are 1: ffn.0" in message_of(
            WeftError, lambda: remote(torch.randn(2, 8))
        )


def test_names_of_hivemind_lead_to_the_own_ones() -> None:
    with pytest.raises(ImportError, match=r"hivemind's ModuleBackend is called ExpertBackend here"):
        importlib.import_module("torchweft.experts").ModuleBackend  # noqa: B018
    with pytest.raises(AttributeError, match=r"hivemind's Server.create, write Server\(\[ExpertBackend"):
        Server.create(["ffn.0"])
    with pytest.raises(AttributeError, match=r"no attribute 'crate'$"):
        Server.crate()


def test_http_server_is_recognised() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as other:
        thread = threading.Thread(target=other.serve_forever, args=(0.01,))
        thread.start()
        try:
            with (
                RemoteExpert("ffn.0", f"127.0.0.1:{other.server_address[1]}", timeout=2.0, retry=NEVER) as remote,
                pytest.raises(UnreachableError, match=r"is that a torchweft server\?"),
            ):
                remote(torch.ones(2, 8))
        finally:
            other.shutdown()
            thread.join()


def test_checkpoints_can_be_a_path(tmp_path: Path) -> None:
    for folder in (str(tmp_path / "a"), tmp_path / "b"):
        with Server([backend()], checkpoints=folder):
            pass
        assert FolderCheckpointStore(folder).steps("ffn.0") == [0]


END_WITH_AN_OPEN_CALL = """
import queue
import grpc, torchweft as weft
from torchweft.experts.wire.service import INFO

server, requests = weft.Server(), queue.SimpleQueue()
server.start()
with grpc.insecure_channel(server.address) as channel:
    call = channel.stream_stream(INFO)(iter(requests.get, None))
    while not server._grpc_server.handlers.budget.streams:
        pass
    server.shutdown()
    try:
        next(call)
    except (grpc.RpcError, StopIteration):
        requests.put(None)
"""


def test_client_hears_of_a_shutdown_without_lines_of_grpc() -> None:
    done = python(END_WITH_AN_OPEN_CALL)
    assert done.returncode == 0 and done.stderr == "", done.stderr
