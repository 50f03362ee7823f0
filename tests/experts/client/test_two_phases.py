"""Commit of several experts: all step, or none does, and no step is repeated."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn

import torchweft as weft
from tests.experts.client.transport_cases import FakeTransport, make_transport
from tests.experts.expert_cases import WIDTH, Formula, X, rows
from torchweft.core.errors import WeftError
from torchweft.experts import AccumulationOptions, ExpertBackend, Guards
from torchweft.experts.client import NEVER, RemoteExpert, Retry, commit, discard
from torchweft.experts.errors import CommitError, DrainingError, GradientError, LostError
from torchweft.experts.server import Server
from torchweft.experts.wire import Call, Kind, Received

NAMES = ("a", "b", "c")


class Stages:
    """Three experts in a row, each at its own server behind a transport that loses chosen messages."""

    def __init__(self) -> None:
        self.backends: dict[str, ExpertBackend] = {}
        self.servers: dict[str, Server] = {}
        self.transports: dict[str, FakeTransport] = {}
        for name in NAMES:
            self.serve(name, nn.Linear(WIDTH, WIDTH, dtype=torch.float64))
        experts = [
            RemoteExpert(name, self.transports[name], retry=Retry(first=0.001), accumulate=True) for name in NAMES
        ]
        self.model = nn.Sequential(*experts)

    def serve(self, name: str, module: nn.Module) -> None:
        guards, sums = Guards(max_norm=1e6), AccumulationOptions(orphan_seconds=0.0)
        options = {"args_schema": (X,), "guards": guards, "mini_batches": sums}
        self.backends[name] = ExpertBackend(name, module, partial(torch.optim.SGD, lr=0.01), **options)  # type: ignore[arg-type]
        self.servers[name] = Server([self.backends[name]])
        self.servers[name].start()
        transport = make_transport("fake", self.servers[name])
        assert isinstance(transport, FakeTransport)
        if name in self.transports:
            self.transports[name]._handler = transport._handler
        self.transports.setdefault(name, transport)

    def restart(self, name: str) -> None:
        self.servers[name].shutdown()
        self.serve(name, self.backends[name].module)

    def run(self) -> None:
        for number in range(2):
            self.model(rows(2, number)).square().sum().backward()

    def steps(self) -> list[int]:
        return [backend.steps for backend in self.backends.values()]

    def sent(self, kind: Kind) -> int:
        return sum(call.header.kind is kind for transport in self.transports.values() for call in transport.seen)


@pytest.fixture
def stages() -> Iterator[Stages]:
    stages = Stages()
    yield stages
    for server in stages.servers.values():
        server.shutdown()


def test_all_experts_step_once(stages: Stages) -> None:
    for number in (1, 2):
        stages.run()
        assert commit(list(stages.model)) == dict.fromkeys(NAMES, True)
        assert stages.steps() == [number] * 3
    assert commit(stages.model) == dict.fromkeys(NAMES, False)


def test_one_expert_has_one_phase(stages: Stages) -> None:
    stages.run()
    assert commit(stages.model[0]) == {"a": True}
    assert stages.sent(Kind.PREPARE) == 0 and stages.sent(Kind.COMMIT) == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", ["restart", "gradient", "silent"])
def test_none_steps_if_one_cannot(stages: Stages, name: str, fault: str) -> None:
    """A server that was restarted, a gradient beyond the guards, or a server that does not answer."""
    stages.run()
    kinds: tuple[type[WeftError], ...] = (CommitError, LostError)
    if fault == "restart":
        stages.restart(name)
    elif fault == "gradient":
        object.__setattr__(stages.backends[name].executor._guards, "max_norm", 1e-12)
        kinds = (GradientError,)
    else:
        stages.transports[name].lose = ["request"] * 9
        stages.model[NAMES.index(name)]._stub.caller.retry = NEVER
    with pytest.raises(kinds) as caught:
        commit(stages.model)
    assert stages.steps() == [0, 0, 0] and stages.sent(Kind.COMMIT) == 0
    notes = "\n".join(caught.value.__notes__)
    assert f"from expert {name!r}" in notes and "no expert has stepped" in notes
    object.__setattr__(stages.backends[name].executor._guards, "max_norm", 1e6)
    stages.transports[name].lose = []
    discard(stages.model)
    stages.run()
    assert commit(stages.model) == dict.fromkeys(NAMES, True) and stages.steps() == [1, 1, 1]


@pytest.mark.parametrize(
    "lose", [["reply"], ["request"], ["", "reply"], ["", "request"], ["reply", "reply", "request"]]
)
def test_lost_messages_step_none_twice(stages: Stages, lose: list[str]) -> None:
    stages.run()
    for transport in stages.transports.values():
        transport.lose = list(lose)
    assert commit(stages.model) == dict.fromkeys(NAMES, True) and stages.steps() == [1, 1, 1]


def test_a_second_commit_completes_the_first(stages: Stages) -> None:
    """The commit of one expert is lost for good. The error names the others, which do not step again."""
    stages.run()
    stages.transports["b"].lose = ["", "request"]
    stages.model[1]._stub.caller.retry = NEVER
    with pytest.raises(LostError) as caught:
        commit(stages.model)
    assert "have stepped: a, c" in "\n".join(caught.value.__notes__) and stages.steps() == [1, 0, 1]
    assert commit(stages.model) == {"a": False, "b": True, "c": False} and stages.steps() == [1, 1, 1]


def test_server_that_ends_between_the_phases_is_named(stages: Stages) -> None:
    """Its sum is gone, and the others have stepped. The next mini-batch is one step of all again."""
    stages.run()
    transport = stages.transports["b"]
    handle = transport._handler

    def end_before_commit(call: Received, reply: Callable[[Call], None]) -> object:
        if call.header.kind is Kind.COMMIT:
            stages.restart("b")  # it has another handler then
        return (transport._handler if call.header.kind is Kind.COMMIT else handle)(call, reply)

    transport._handler = end_before_commit
    with pytest.raises(CommitError) as caught:
        commit(stages.model)
    notes = "\n".join(caught.value.__notes__)
    assert "from expert 'b'" in notes and "have stepped: a, c" in notes and stages.steps() == [1, 0, 1]
    with pytest.raises(CommitError, match="incomplete"):
        commit(stages.model)
    discard(stages.model)
    stages.run()
    assert commit(stages.model) == dict.fromkeys(NAMES, True) and stages.steps() == [2, 1, 2]


def test_a_prepared_sum_is_closed_and_outlives_its_stream(stages: Stages) -> None:
    """Its stream has ended, and `orphan_seconds` is 0. A repeated prepare, also after the commit, changes nothing."""
    stages.run()
    expert = stages.model[0]
    for _ in range(2):
        weft.experts.client.calls.run_steps(expert.commit_steps(prepares=True))
    (accumulator,) = stages.backends["a"].executor.mini_batches.values()
    assert accumulator.is_prepared and accumulator.stream is None
    with pytest.raises(CommitError, match="is being committed"):
        expert(rows(2, 0)).sum().backward()
    discard(stages.model)
    stages.run()
    stub, incarnation = expert._stub, expert._stub.mini_batch.commit_incarnation()
    again = stub.requests.commit("a", stub.mini_batch.name, incarnation or 0, 0, prepares=True)
    assert expert.commit() and stages.steps() == [1, 0, 0]
    assert stub.caller.call(again, 60.0).tensors()[0].item() == 1 and stages.steps() == [1, 0, 0]


def test_a_server_that_shuts_down_applies_what_it_has_prepared(stages: Stages) -> None:
    stages.run()
    for expert in stages.model:
        weft.experts.client.calls.run_steps(expert.commit_steps(prepares=True))
        expert._stub.caller.retry = NEVER
    stages.servers["b"]._dispatcher.refuse_new_work("it shuts down")
    with pytest.raises(DrainingError):
        stages.model[1](rows(1, 0))
    assert [expert.commit() for expert in stages.model] == [True] * 3 and stages.steps() == [1, 1, 1]


def test_a_failed_sum_is_found_before_anything_is_sent(stages: Stages) -> None:
    with torch.no_grad():
        stages.backends["c"].module.weight.zero_()
    stages.transports["b"].lose = ["", "", "request"]
    stages.model[1]._stub.caller.retry = NEVER
    with pytest.raises(LostError):
        stages.run()
    with pytest.raises(CommitError, match="incomplete"):
        commit(stages.model)
    assert stages.steps() == [0, 0, 0]


def test_formula_without_optimizer_has_nothing_to_prepare() -> None:
    backend = ExpertBackend("f", Formula(lambda _, x: x * 2), args_schema=(X,))
    with pytest.raises(weft.errors.UsageError, match="no optimizer"):
        backend.prepare("m")
