"""Backwards that omit inputs which the server has cached, and resend them if the server has evicted them."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.experts.client.transport_cases import FakeTransport, reached
from tests.experts.expert_cases import close, fussy_backend, rows
from torchweft.experts import ExpertBackend, GraphBudget
from torchweft.experts.client import RemoteExpert, Retry
from torchweft.experts.compression import Compression, Policy
from torchweft.experts.errors import InputsGoneError
from torchweft.experts.wire import Call, Header, Kind, Received

sgd = partial(torch.optim.SGD, lr=0.1)


@pytest.fixture
def backend() -> ExpertBackend:
    return fussy_backend(optimizer=sgd, keep_graphs=GraphBudget(1 << 20))


@pytest.fixture
def transport(backend: ExpertBackend) -> Iterator[FakeTransport]:
    with reached("fake", backend) as (_, fake):
        assert isinstance(fake, FakeTransport)
        yield fake


def tensor_counts(transport: FakeTransport, kind: Kind = Kind.BACKWARD) -> list[int]:
    return [len(call.tensors) for call in transport.seen if call.header.kind is kind]


def input_gradients(layer: torch.nn.Module, steps: int = 1) -> list[Tensor | None]:
    """Input gradients of several training steps, each of which changes the weights."""
    gradients: list[Tensor | None] = []
    for step in range(steps):
        x = rows(2, step).requires_grad_()
        layer(x).square().sum().backward()
        gradients.append(x.grad)
        if not isinstance(layer, RemoteExpert):
            with torch.no_grad():
                for parameter in layer.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    return gradients


def all_close(actual: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    return all(map(close, actual, expected)) and len(actual) == len(expected)


def test_backward_sends_only_gradients(transport: FakeTransport, backend: ExpertBackend) -> None:
    remote, module = RemoteExpert("fussy", transport, keep_graph=True), fussy_backend().module
    assert all_close(input_gradients(remote, 3), input_gradients(module, 3))
    assert tensor_counts(transport) == [1, 1, 1] and backend.statistics().used_graphs == 3
    input_gradients(RemoteExpert("fussy", transport))
    assert tensor_counts(transport) == [1, 1, 1, 2], "without keep_graph, it sends all"
    loss = RemoteExpert("fussy", transport, keep_graph=True)(rows(2, 0)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert tensor_counts(transport)[4:] == [1, 2] and backend.steps == 6, "the second backward sends all"


def test_clients_of_one_expert_send_inputs_once(transport: FakeTransport, backend: ExpertBackend) -> None:
    layers = [RemoteExpert("fussy", transport, keep_graph=True) for _ in range(3)]
    losses = [layer(rows(2, i)).sum() for i, layer in enumerate(layers)]
    for loss in losses:
        loss.backward()
    assert tensor_counts(transport) == [1, 1, 1] and backend.steps == 3
    assert backend.statistics().used_graphs == 1, "the first step makes the other graphs stale"


@pytest.mark.parametrize("nbytes", [None, 1])
def test_backward_sends_inputs_if_the_server_keeps_none(nbytes: int | None) -> None:
    budget = None if nbytes is None else GraphBudget(nbytes)
    with reached("fake", fussy_backend(optimizer=sgd, keep_graphs=budget)) as (_, transport):
        assert isinstance(transport, FakeTransport)
        input_gradients(RemoteExpert("fussy", transport, keep_graph=True))
        assert tensor_counts(transport) == [2]


@pytest.mark.parametrize("accumulate", [False, True])
def test_evicted_inputs_are_resent(transport: FakeTransport, backend: ExpertBackend, accumulate: bool) -> None:
    remote = RemoteExpert("fussy", transport, keep_graph=True, accumulate=accumulate)
    x, y = rows(2, 0).requires_grad_(), rows(2, 0).requires_grad_()
    loss = remote(x).square().sum()
    backend.executor.graphs._drop(next(iter(backend.executor.graphs._all)))
    loss.backward()
    fussy_backend().module(y).square().sum().backward()
    assert all_close([x.grad], [y.grad]) and tensor_counts(transport) == [1, 2]
    assert not accumulate or remote.commit()
    assert backend.steps == 1


@pytest.mark.parametrize(("lose", "last"), [("reply", 2), ("request", 1)])
def test_lost_message_steps_once_with_kept_inputs(
    transport: FakeTransport, backend: ExpertBackend, lose: str, last: int
) -> None:
    remote = RemoteExpert("fussy", transport, keep_graph=True, retry=Retry(first=0.001))
    x, y = rows(2, 0).requires_grad_(), rows(2, 0).requires_grad_()
    loss = remote(x).sum()
    transport.lose = [lose, lose, lose]
    loss.backward()
    fussy_backend().module(y).sum().backward()
    assert all_close([x.grad], [y.grad]) and backend.steps == 1
    assert tensor_counts(transport)[0] == 1 and tensor_counts(transport)[-1] == last


def test_compressed_inputs_are_those_of_the_forward(transport: FakeTransport, backend: ExpertBackend) -> None:
    gradients: list[Tensor | None] = []
    for keep in (True, False):
        remote = RemoteExpert("fussy", transport, compression=Policy(inputs=Compression.INT8), keep_graph=keep)
        x = rows(2, 0)
        gradients += torch.autograd.grad(remote(x.requires_grad_()).sum(), x)
        backend.load_state_dict(fussy_backend(optimizer=sgd).state_dict())  # restore the initial weights
    assert tensor_counts(transport) == [1, 2] and all_close(gradients[:1], gradients[1:])


@pytest.mark.parametrize(("client", "key"), [("ann", "other"), ("bob", "mine"), ("ann", "")])
def test_missing_or_foreign_inputs_are_not_used(
    transport: FakeTransport, backend: ExpertBackend, client: str, key: str
) -> None:

    def send(kind: Kind, client: str, key: str, x: Tensor) -> Received:
        header = Header(kind, 0, "fussy", key=key, client=client, keep=True)
        return transport.submit(Call(header, [x]), 5.0).result(5.0)

    assert send(Kind.FORWARD, "ann", "mine", rows(2, 0)).header.keep
    with pytest.raises(InputsGoneError, match="'fussy' does not hold the inputs"):
        send(Kind.BACKWARD, client, key, rows(2, 1))
    assert backend.steps == 0
    send(Kind.BACKWARD, "ann", "mine", rows(2, 1))
    assert backend.steps == 1
