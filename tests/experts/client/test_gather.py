"""Many calls of experts from one thread: `gather` as one autograd node, `submit` and `acall` without a gradient."""

import asyncio
import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchweft as weft
from tests.experts.client.transport_cases import FakeTransport, reached
from tests.experts.concurrency import wait_until
from tests.experts.expert_cases import TROUBLE, WIDTH, Fussy, X, rows
from torchweft.core.errors import InPlaceError, SpecError, UsageError
from torchweft.experts import ExpertBackend
from torchweft.experts.client import Connections, LocalTransport, RemoteExpert, Retry
from torchweft.experts.errors import ExpertFailedError, UnknownExpertError
from torchweft.experts.wire import Kind

SWIFT = Retry(first=0.001, longest=0.002)
NAMES = ("a", "b")


def backend(name: str, **options: object) -> ExpertBackend:
    torch.manual_seed(len(name) + ord(name[0]))
    return ExpertBackend(name, Fussy(), partial(torch.optim.SGD, lr=0.1), args_schema=(X,), **options)  # type: ignore[arg-type]


class Pair:
    """Two experts behind one transport, and copies of their modules as they were at the start."""

    def __init__(self, transport: FakeTransport, backends: dict[str, ExpertBackend]) -> None:
        self.transport, self.backends = transport, backends
        self.here = {name: copy.deepcopy(one.module) for name, one in backends.items()}

    def remote(self, name: str, **options: object) -> RemoteExpert:
        return RemoteExpert(name, self.transport, retry=SWIFT, **options)  # type: ignore[arg-type]

    def steps(self) -> list[int]:
        return [one.steps for one in self.backends.values()]

    def backward_keys(self) -> Counter[str]:
        return Counter(call.header.key for call in self.transport.seen if call.header.kind is Kind.BACKWARD)


@pytest.fixture
def pair() -> Iterator[Pair]:
    backends = {name: backend(name, max_batch_size=8) for name in NAMES}
    with reached("fake", *backends.values()) as (_, transport):
        assert isinstance(transport, FakeTransport)
        yield Pair(transport, backends)


def inputs(count: int, size: int = 2) -> list[Tensor]:
    return [rows(size, number).requires_grad_() for number in range(count)]


@pytest.mark.parametrize("size", [2, 19])  # 19 rows are sent in three parts
@pytest.mark.parametrize("accumulate", [False, True])
def test_gather_has_the_gradients_of_the_modules(pair: Pair, accumulate: bool, size: int) -> None:
    """Different experts, one of them twice. Each backward is one step, or a term of one."""
    remotes = {name: pair.remote(name, accumulate=accumulate, keep_graph=True) for name in NAMES}
    xs, ys = inputs(3, size), inputs(3, size)
    names = ["a", "b", "a"] if accumulate else ["a", "b"]
    outputs = weft.gather([(remotes[name], x) for name, x in zip(names, xs, strict=False)])
    expected = [pair.here[name](y) for name, y in zip(names, ys, strict=False)]
    torch.testing.assert_close(outputs, expected)
    torch.cat(outputs).square().sum().backward()
    torch.cat(expected).square().sum().backward()
    for x, y in zip(xs, ys, strict=True):
        torch.testing.assert_close(x.grad, y.grad)
    if accumulate:
        assert weft.experts.client.commit(nn.ModuleList(remotes.values())) == {"a": True, "b": True}
    assert pair.steps() == [1, 1]
    for name, module in pair.here.items():
        for parameter, remote in zip(module.parameters(), pair.backends[name].module.parameters(), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(remote, parameter - 0.1 * parameter.grad)


def test_a_call_whose_output_is_not_used_takes_no_step(pair: Pair) -> None:
    a, b = weft.gather([(pair.remote(name), x) for name, x in zip(NAMES, inputs(2), strict=True)])
    del b
    a.sum().backward()
    assert pair.steps() == [1, 0]


def test_frozen_experts_only_answer(pair: Pair) -> None:
    frozen, trained = pair.remote("a").requires_grad_(False), pair.remote("b")
    answered, tracked = weft.gather([(frozen, rows(2, 0)), partial(trained, rows(2, 1))])
    assert tracked.requires_grad and not answered.requires_grad
    tracked.sum().backward()
    assert pair.steps() == [0, 1]
    with pytest.raises(UsageError, match="frozen") as caught:
        weft.gather([(frozen, inputs(1)[0]), (trained, rows(2, 1))])
    assert "in call 0 of 2: expert 'a'" in caught.value.__notes__


def test_lost_replies_step_once_per_call(pair: Pair) -> None:
    remotes = {name: pair.remote(name, accumulate=True) for name in NAMES}
    outputs = weft.gather([(remotes[name], x) for name, x in zip(NAMES * 4, inputs(8), strict=True)])
    pair.transport.lose = ["reply", "request", "", "reply"] * 3
    torch.cat(outputs).sum().backward()
    pair.transport.lose = []
    keys = pair.backward_keys()
    assert len(keys) == 8 and max(keys.values()) > 1
    assert weft.experts.client.commit(nn.ModuleList(remotes.values())) == {"a": True, "b": True}
    for name, module in pair.here.items():
        (torch.cat([module(x) for x in inputs(8)[NAMES.index(name) :: 2]])).sum().backward()
        for parameter, remote in zip(module.parameters(), pair.backends[name].module.parameters(), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(remote, parameter - 0.1 * parameter.grad)


def test_an_error_names_its_call_and_can_be_returned(pair: Pair) -> None:
    bad = rows(2, 0) * 0 + TROUBLE
    calls = [(pair.remote("a"), inputs(1)[0]), (pair.remote("b"), bad), (pair.remote("nobody"), rows(2, 1))]
    with pytest.raises(ExpertFailedError, match="in forward") as caught:
        weft.gather(calls[:2])
    assert "in call 1 of 2: expert 'b'" in caught.value.__notes__
    with pytest.raises(UnknownExpertError) as unknown:
        weft.gather(calls[::2], return_exceptions=True)  # nothing can be sent without its description
    assert "in call 1 of 2: expert 'nobody'" in unknown.value.__notes__
    good, failed = weft.gather(calls[:2], return_exceptions=True)
    assert isinstance(failed, ExpertFailedError)
    good.sum().backward()
    assert pair.steps() == [1, 0]
    with pytest.raises(SpecError) as spec:
        weft.gather([calls[0], (pair.remote("b"), rows(2, 0, 7))])
    assert "in call 1 of 2: expert 'b'" in spec.value.__notes__
    with pytest.raises(UsageError, match="call 1 is 5"):
        weft.gather([calls[0], 5])
    assert weft.gather([]) == []


def test_a_failed_backward_waits_for_the_others(pair: Pair) -> None:
    """The other expert steps, and the error names the call that failed."""
    a, b = weft.gather([(pair.remote(name), x) for name, x in zip(NAMES, inputs(2), strict=True)])
    with pytest.raises(ExpertFailedError, match="in backward") as caught:
        torch.autograd.backward([a, b], [torch.full_like(a, TROUBLE), torch.ones_like(b)])
    assert "in call 0 of 2: expert 'a'" in caught.value.__notes__ and pair.steps() == [0, 1]


def test_an_input_that_was_written_to_stops_all_steps(pair: Pair) -> None:
    xs = inputs(2)
    outputs = weft.gather([(pair.remote(name), x) for name, x in zip(NAMES, xs, strict=True)])
    with torch.no_grad():
        xs[1].zero_()
    with pytest.raises(InPlaceError):
        torch.cat(outputs).sum().backward()
    assert pair.steps() == [0, 0]


class Both(nn.Module):
    """A stage that calls both experts at once."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.experts = nn.ModuleList(pair.remote(name, accumulate=True) for name in NAMES)

    def forward(self, x: Tensor) -> Tensor:
        return sum(weft.gather([(expert, x) for expert in self.experts]))


@pytest.mark.parametrize("recompute", ["pipe", "checkpoint"])
def test_gather_within_a_stage_sends_each_forward_once(pair: Pair, recompute: str) -> None:
    stage = Both(pair)
    x, y = inputs(1, 4)[0], inputs(1, 4)[0]
    if recompute == "pipe":
        pipe = weft.Pipe(nn.Sequential(stage, nn.Identity()), balance=[1, 1], chunks=2, checkpoint="always")
        outputs = pipe(x)
    else:
        outputs = checkpoint(stage, x, use_reentrant=False)
    outputs.square().sum().backward()
    expected = pair.here["a"](y) + pair.here["b"](y)
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    forwards = [call.header.key for call in pair.transport.seen if call.header.kind is Kind.FORWARD]
    assert len(forwards) == len(set(forwards)) == (4 if recompute == "pipe" else len(forwards))


def test_submit_returns_results_out_of_order(pair: Pair) -> None:
    remote, done = pair.remote("a"), list[Tensor]()
    futures = [remote.submit(x) for x in inputs(5)]
    futures[0].add_done_callback(lambda future: done.append(future.result()))
    for future, x in zip(reversed(futures), reversed(inputs(5)), strict=True):
        result = future.result(60.0)
        assert not result.requires_grad
        torch.testing.assert_close(result, pair.here["a"](x))
    wait_until(lambda: done)
    failed = remote.submit(rows(1, 0) * 0 + TROUBLE)
    assert isinstance(failed.exception(60.0), ExpertFailedError)
    with pytest.raises(SpecError):
        remote.submit(rows(1, 0, 7))


def test_acall_is_retried_and_raises_the_error(pair: Pair) -> None:
    async def many() -> list[Tensor | BaseException]:
        remote = pair.remote("a")
        bad = remote.acall(rows(2, 0) * 0 + TROUBLE)
        return await asyncio.gather(*[remote.acall(x) for x in inputs(20)], bad, return_exceptions=True)

    pair.transport.lose = ["", *["reply", "request", ""] * 5]
    *results, error = asyncio.run(many())
    torch.testing.assert_close(results, [pair.here["a"](x).detach() for x in inputs(20)])
    assert isinstance(error, ExpertFailedError)


def hung() -> tuple[RemoteExpert, list[object], Callable[[], int]]:
    """An expert of a server that never answers, after its description."""
    seen = list[object]()
    server = weft.Server([backend("a")])
    answer = server.handler()

    def handle(call: object, reply: Callable[[object], None]) -> None:
        seen.append(call)
        if len(seen) == 1:
            answer(call, reply)  # type: ignore[arg-type]

    transport = LocalTransport(handle)  # type: ignore[arg-type]
    remote = RemoteExpert("a", transport)
    remote.describe()
    return remote, seen, lambda: transport.statistics().waiting


def test_a_cancelled_call_is_forgotten() -> None:
    remote, seen, waiting = hung()
    remote._stub.loaded = None
    seen.clear()
    future = remote.submit(rows(1, 0))
    wait_until(lambda: len(seen) == 2)
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result(0)

    async def give_up() -> None:
        await asyncio.wait_for(remote.acall(rows(1, 0)), 0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    wait_until(lambda: waiting() == 0)


def test_the_thread_of_futures_ends_when_idle(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchweft.experts.client.futures._IDLE", 0.05)
    for _ in range(2):
        pair.remote("a").submit(rows(1, 0)).result(60.0)
        wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "torchweft-calls"])


def test_gather_over_connections_calls_every_server() -> None:
    with (
        weft.Server([backend("a")]) as one,
        weft.Server([backend("b")]) as two,
        Connections({"a": one.address, "b": two.address}) as connections,
    ):
        remotes = [RemoteExpert(name, connections) for name in NAMES]
        outputs = weft.gather([(remote, x) for remote, x in zip(remotes * 2, inputs(4), strict=True)])
        assert [y.shape for y in outputs] == [(2, WIDTH)] * 4
