"""A backward does not send what the server has kept, and sends all where that is gone: with the same numbers, once."""

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
    with reached("fake", backend) as (_, found):
        assert isinstance(found, FakeTransport)
        yield found


def sent(transport: FakeTransport, kind: Kind = Kind.BACKWARD) -> list[int]:
    return [len(call.tensors) for call in transport.seen if call.header.kind is kind]


def trained(layer: torch.nn.Module, steps: int = 1) -> list[Tensor | None]:
    """The gradients of the inputs of some steps, of which each changes the weights."""
    found: list[Tensor | None] = []
    for step in range(steps):
        x = rows(2, step).requires_grad_()
        layer(x).square().sum().backward()
        found.append(x.grad)
        if not isinstance(layer, RemoteExpert):
            with torch.no_grad():
                for parameter in layer.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    return found


def all_close(found: list[Tensor | None], wanted: list[Tensor | None]) -> bool:
    return all(map(close, found, wanted)) and len(found) == len(wanted)


def test_only_gradients_travel_on_the_way_back(transport: FakeTransport, backend: ExpertBackend) -> None:
    assert all_close(trained(RemoteExpert("fussy", transport, keep_graph=True), 3), trained(fussy_backend().module, 3))
    assert sent(transport) == [1, 1, 1] and backend.statistics().used_graphs == 3
    trained(RemoteExpert("fussy", transport))
    assert sent(transport) == [1, 1, 1, 2], "who did not ask for it sends all"
    loss = RemoteExpert("fussy", transport, keep_graph=True)(rows(2, 0)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert sent(transport)[4:] == [1, 2] and backend.steps == 6, "a second walk over a graph sends all"


def test_of_many_processes_none_sends_its_inputs_twice(transport: FakeTransport, backend: ExpertBackend) -> None:
    layers = [RemoteExpert("fussy", transport, keep_graph=True) for _ in range(3)]
    losses = [layer(rows(2, i)).sum() for i, layer in enumerate(layers)]
    for loss in losses:
        loss.backward()
    assert sent(transport) == [1, 1, 1] and backend.steps == 3
    assert backend.statistics().used_graphs == 1, "the first step makes the other graphs old"


@pytest.mark.parametrize("nbytes", [None, 1])
def test_a_server_that_keeps_nothing_is_sent_all_at_once(nbytes: int | None) -> None:
    budget = None if nbytes is None else GraphBudget(nbytes)
    with reached("fake", fussy_backend(optimizer=sgd, keep_graphs=budget)) as (_, transport):
        assert isinstance(transport, FakeTransport)
        trained(RemoteExpert("fussy", transport, keep_graph=True))
        assert sent(transport) == [2]


@pytest.mark.parametrize("accumulate", [False, True])
def test_inputs_that_are_gone_are_sent(transport: FakeTransport, backend: ExpertBackend, accumulate: bool) -> None:
    remote = RemoteExpert("fussy", transport, keep_graph=True, accumulate=accumulate)
    x, y = rows(2, 0).requires_grad_(), rows(2, 0).requires_grad_()
    loss = remote(x).square().sum()
    backend.executor.graphs._drop(next(iter(backend.executor.graphs._all)))
    loss.backward()
    fussy_backend().module(y).square().sum().backward()
    assert all_close([x.grad], [y.grad]) and sent(transport) == [1, 2]
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
    assert sent(transport)[0] == 1 and sent(transport)[-1] == last


def test_compressed_inputs_are_those_of_the_forward(transport: FakeTransport, backend: ExpertBackend) -> None:
    gradients: list[Tensor | None] = []
    for keep in (True, False):
        remote = RemoteExpert("fussy", transport, compression=Policy(inputs=Compression.INT8), keep_graph=keep)
        x = rows(2, 0)
        gradients += torch.autograd.grad(remote(x.requires_grad_()).sum(), x)
        backend.load_state_dict(fussy_backend(optimizer=sgd).state_dict())  # back to the first weights
    assert sent(transport) == [1, 2] and all_close(gradients[:1], gradients[1:])


@pytest.mark.parametrize(("client", "key"), [("ann", "other"), ("bob", "mine"), ("ann", "")])
def test_nobody_gets_at_what_is_not_there_or_another_s(
    transport: FakeTransport, backend: ExpertBackend, client: str, key: str
) -> None:

    def ask(kind: Kind, client: str, key: str, x: Tensor) -> Received:
        header = Header(kind, 0, "fussy", key=key, client=client, keep=True)
        return transport.submit(Call(header, [x]), 5.0).result(5.0)

    assert ask(Kind.FORWARD, "ann", "mine", rows(2, 0)).header.keep
    with pytest.raises(InputsGoneError, match="'fussy' does not hold the inputs"):
        ask(Kind.BACKWARD, client, key, rows(2, 1))
    assert backend.steps == 0
    ask(Kind.BACKWARD, "ann", "mine", rows(2, 1))
    assert backend.steps == 1
