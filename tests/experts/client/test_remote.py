"""RemoteExpert as a layer: the numbers of a local module, its state, copies, deadlines and large calls."""

import copy
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.experts.client.transport_cases import WAYS, FakeTransport, reached
from tests.experts.concurrency import FakeClock, in_threads, wait_until
from tests.experts.expert_cases import NESTED_SCHEMAS, WIDTH, Nested, close, fussy_backend, rows, seeded
from torchweft.core.errors import BackwardTwiceError, DoubleBackwardError, InPlaceError, SpecError, UsageError
from torchweft.experts import AccumulationOptions, ExpertBackend, GraphBudget, TensorSpec
from torchweft.experts.client import GrpcTransport, RemoteExpert, Retry, Transport
from torchweft.experts.compression import Policy
from torchweft.experts.errors import CommitError, DeadlineError, ExpertFailedError, GradientError, UnreachableError
from torchweft.experts.server import Server
from torchweft.experts.wire import Call, Kind, Received

sgd = partial(torch.optim.SGD, lr=0.1)


def nested_backend() -> ExpertBackend:
    return ExpertBackend("nested", seeded(Nested), sgd, **NESTED_SCHEMAS)


def call_nested(module: nn.Module, x: Tensor, pair: Tensor | None = None, scale: Tensor | None = None) -> Any:
    count = len(x)
    options = {"scale": rows(count, 2, 1) if scale is None else scale, "mode": "plain"}
    return module(x, [torch.arange(count) % 5, rows(count, 1, 2) if pair is None else pair], options=options)


def trains_like_local(remote: RemoteExpert, x: Tensor | None = None) -> bool:
    x = rows(2, 0) if x is None else x
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    for layer, leaf in zip((remote, fussy_backend().module), leaves, strict=True):
        layer(leaf).square().sum().backward()
    return close(leaves[0].grad, leaves[1].grad)


@pytest.fixture(params=WAYS)
def there(request: pytest.FixtureRequest) -> Iterator[tuple[Server, Transport]]:
    with reached(request.param, fussy_backend(optimizer=sgd), nested_backend()) as server_and_transport:
        yield server_and_transport


@pytest.fixture
def fake() -> Iterator[FakeTransport]:
    with reached("fake", fussy_backend(optimizer=sgd)) as (_, transport):
        assert isinstance(transport, FakeTransport)
        yield transport


@pytest.mark.parametrize("there", WAYS, indirect=True)
def test_steps_equal_those_of_a_local_module(there: tuple[Server, Transport]) -> None:
    remote, twin = RemoteExpert("fussy", there[1]), fussy_backend().module
    optimizer = sgd(twin.parameters())
    for step in range(3):
        x, y = rows(5, step).requires_grad_(), rows(5, step).requires_grad_()
        assert close(remote(x), twin(y))
        remote(x).square().sum().backward()
        twin(y).square().sum().backward()
        assert close(x.grad, y.grad)
        optimizer.step()
        optimizer.zero_grad()
    assert remote.steps == 3


def test_nested_arguments_and_outputs(there: tuple[Server, Transport]) -> None:
    remote, twin = RemoteExpert("nested", there[1]), seeded(Nested)
    results: list[tuple[Tensor, Tensor, Tensor]] = []
    for module in (remote, twin):
        x, scale = rows(3, 0).requires_grad_(), rows(3, 2, 1).requires_grad_()
        out = call_nested(module, x, scale=scale)
        assert out["none"] is None and not out["best"].requires_grad
        (out["y"][0].sum() + out["y"][1].square().sum()).backward()
        assert x.grad is not None and scale.grad is not None
        results.append((out["y"][1].detach(), x.grad, scale.grad))
    assert all(close(a, b) for a, b in zip(*results, strict=True))
    x, pair = rows(2, 0), rows(2, 1, 2).requires_grad_()  # one output is unused, and x needs no gradient
    call_nested(remote, x, pair)["y"][1].sum().backward()
    assert x.grad is None and pair.grad is not None and not pair.grad.any()
    with pytest.raises(SpecError, match="'fancy', wanted 'plain'"):
        remote(x, [torch.tensor([0, 2]), pair], options={"scale": rows(2, 2, 1), "mode": "fancy"})


def test_many_threads_call_at_once(there: tuple[Server, Transport]) -> None:
    remote, twin = RemoteExpert("nested", there[1]), seeded(Nested)

    @torch.no_grad()
    def work(seed: int) -> bool:
        inputs = [rows(2, seed + turn) for turn in range(3)]
        return all([close(call_nested(remote, x)["y"][0], call_nested(twin, x)["y"][0]) for x in inputs])

    assert all(in_threads(work, range(8)))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda e: e(rows(2, 0, WIDTH + 1)), "size 5, wanted 4"),
        (lambda e: e(rows(2, 0).float()), "float32"),
        (lambda e: e(), "call"),
        (lambda e: e(rows(2, 0), rows(2, 0)), "call"),
        (lambda e: e(rows(2, 0), more=1), "call"),
        (lambda e: e("text"), "type str"),
        (lambda e: e(rows(0, 0)), "0 rows"),
    ],
)
def test_invalid_call_is_refused_before_it_is_sent(fake: FakeTransport, wrong: object, words: str) -> None:
    remote = RemoteExpert("fussy", fake)
    remote.describe()
    remote(rows(1, 0))
    sent = len(fake.seen)
    with pytest.raises(SpecError, match=words):
        wrong(remote)  # type: ignore[operator]
    assert len(fake.seen) == sent


def test_trained_unless_grad_mode_is_off(fake: FakeTransport) -> None:
    remote = RemoteExpert("fussy", fake)
    with torch.no_grad():
        assert not remote(rows(2, 0)).requires_grad
    remote(rows(2, 0)).sum().backward()
    assert remote.steps == 1
    torch.autograd.grad(remote(rows(2, 0)).sum(), list(remote.parameters()))
    assert remote.steps == 2


class Calibrated(RemoteExpert):
    def __init__(self, uid: str, where: str | Transport) -> None:
        super().__init__(uid, where)
        self.scale = nn.Parameter(torch.full((1,), 2.0, dtype=torch.float64))
        self.shift = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self.shift(self.scale * super().forward(*args, **kwargs))


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("strange", ["weight", "layer.weight", "anchor"])
def test_remote_expert_has_no_entries_in_a_state_dict(fake: FakeTransport, strange: str, alone: bool) -> None:
    remote = RemoteExpert("fussy", fake)
    model, key = (remote, strange) if alone else (nn.Sequential(nn.Linear(2, 2), remote), f"1.{strange}")
    own = nn.Module.state_dict(model)  # `RemoteExpert.state_dict` asks the server
    assert list(own) == ([] if alone else ["0.weight", "0.bias"])
    assert model.load_state_dict(own).missing_keys == []
    state = {**own, key: torch.ones(1)}
    with pytest.raises(RuntimeError, match=rf'Unexpected key\(s\) in state_dict: "{key}"'):
        model.load_state_dict(state)
    assert model.load_state_dict(state, strict=False) == ([], [key])
    assert remote.anchor == 0


def test_parameters_of_a_subclass_are_state(fake: FakeTransport) -> None:
    one, other = (nn.Sequential(Calibrated("fussy", fake)) for _ in range(2))
    with torch.no_grad():
        one[0].scale.fill_(3.0)
    assert list(one.state_dict()) == ["0.scale", "0.shift.weight", "0.shift.bias"]
    other.load_state_dict(one.state_dict())
    assert close(one(rows(2, 0)), other(rows(2, 0)))
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.scale"'):
        other.load_state_dict({name: value for name, value in one.state_dict().items() if name != "0.scale"})


def scaled(by: float, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return by * output


OPTIMIZERS: list[Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = [
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1, amsgrad=True),
    partial(torch.optim.Adafactor, lr=0.1, weight_decay=0.1),
    partial(torch.optim.RMSprop, lr=0.1, centered=True),
    partial(torch.optim.Rprop, lr=0.1),
    partial(torch.optim.Adagrad, lr=0.1),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_anchor_stays_zero(fake: FakeTransport, dtype: torch.dtype) -> None:
    for optimizer in OPTIMIZERS:
        remote = RemoteExpert("fussy", fake).to(dtype)
        mine = optimizer(list(remote.parameters()))
        for _ in range(3):
            remote(rows(2, 0)).sum().backward()
            mine.step()
            mine.zero_grad()
        assert [parameter.tolist() for parameter in remote.parameters()] == [[0.0]], mine


@pytest.mark.parametrize("kind", [2.0, float("inf")])
def test_the_anchor_does_not_change_gradient_norms(fake: FakeTransport, kind: float) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), RemoteExpert("fussy", fake))
    model(rows(2, 0)).sum().backward()
    expected = nn.utils.get_total_norm([p.grad for p in model[0].parameters() if p.grad is not None], kind)
    assert nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type=kind) == expected
    assert all(p.grad is not None and p.grad.abs().max() >= 0 for p in model.parameters())


def test_a_frozen_expert_gives_values_but_takes_no_gradients(fake: FakeTransport) -> None:
    remote = RemoteExpert("fussy", fake).requires_grad_(False)
    assert not remote(rows(2, 0)).requires_grad
    with pytest.raises(UsageError, match="frozen here"):
        remote(rows(2, 0).requires_grad_())


@pytest.mark.parametrize("most", [4096, 4])
def test_expert_without_optimizer_returns_gradients(most: int) -> None:
    with reached("fake", fussy_backend(optimizer=None, max_batch_size=most)) as (_, transport):
        remote = RemoteExpert("fussy", transport)
        assert trains_like_local(remote, rows(10, 0)) and remote.steps == 0
        assert not remote(rows(2, 0)).requires_grad


def test_second_backward_of_a_retained_graph_steps_again(fake: FakeTransport) -> None:
    remote = RemoteExpert("fussy", fake)
    loss = remote(rows(2, 0)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert remote.steps == 2
    with pytest.raises(BackwardTwiceError):
        loss.backward()


def test_the_gradient_of_a_gradient_is_refused(fake: FakeTransport) -> None:
    x = rows(2, 0).requires_grad_()
    with pytest.raises(DoubleBackwardError, match="expert 'fussy' has its graph at its server") as caught:
        torch.autograd.grad(RemoteExpert("fussy", fake)(x).sum(), x, create_graph=True)
    assert "Pipe" not in str(caught.value)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("optimizer", [sgd, None])
def test_a_tangent_is_refused_before_anything_is_sent(grad: bool, optimizer: Any) -> None:
    with reached("fake", fussy_backend(optimizer=optimizer)) as (_, fake):
        assert isinstance(fake, FakeTransport)
        remote, x = RemoteExpert("fussy", fake), rows(2, 0)
        remote(x)
        sent = len(fake.seen)
        with torch.set_grad_enabled(grad):
            with forward_ad.dual_level(), pytest.raises(UsageError, match="'fussy' has a tangent"):
                remote(forward_ad.make_dual(x, torch.ones_like(x)))
            with pytest.raises(UsageError, match="'fussy' has a tangent"):
                torch.func.jvp(remote, (x,), (torch.ones_like(x),))
            assert len(fake.seen) == sent
            with forward_ad.dual_level():
                assert remote(x).shape == x.shape


def test_in_place_change_of_an_input_is_detected(fake: FakeTransport) -> None:
    remote, x = RemoteExpert("fussy", fake), rows(2, 0).requires_grad_()
    y = x * 1
    loss = remote(y).sum()
    y.detach().zero_()
    with pytest.raises(InPlaceError, match=r"args\[0\]"):
        loss.backward()
    assert remote.steps == 0


def test_outputs_can_be_modified_in_place(there: tuple[Server, Transport]) -> None:
    remote = RemoteExpert("fussy", there[1])
    with torch.no_grad():
        first = remote(rows(2, 0))
        first.zero_()
        assert remote(rows(2, 0)).any()


def test_autocast_casts_floats_as_layers_do() -> None:
    layer = seeded(lambda: nn.Linear(WIDTH, WIDTH))
    backend = ExpertBackend("half", layer, args_schema=(TensorSpec((None, WIDTH), torch.float32),))
    with reached("fake", backend) as (_, transport), torch.autocast("cpu", torch.bfloat16):
        x = rows(2, 0).bfloat16().requires_grad_()
        RemoteExpert("half", transport)(x).sum().backward()
        assert x.grad is not None and x.grad.dtype == torch.bfloat16


def test_compression_is_close(fake: FakeTransport) -> None:
    policy = Policy(inputs="bf16", outputs="fp16", output_gradients="bf16", input_gradients="int8")
    x, y = rows(8, 0).requires_grad_(), rows(8, 0).requires_grad_()
    RemoteExpert("fussy", fake, compression=policy)(x).sum().backward()
    fussy_backend().module(y).sum().backward()
    assert x.grad is not None and y.grad is not None
    assert not torch.equal(x.grad, y.grad) and torch.allclose(x.grad, y.grad, rtol=0.05, atol=0.05)


def test_accumulated_micro_batches_are_one_step(there: tuple[Server, Transport]) -> None:
    remote, twin = RemoteExpert("fussy", there[1], accumulate=True), fussy_backend().module
    optimizer = sgd(twin.parameters())
    for step in range(2):
        for part in rows(6, step).split(2):
            remote(part).square().sum().backward()
            twin(part).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert remote.commit() and not remote.commit()
        with torch.no_grad():
            assert close(remote(rows(3, 9)), twin(rows(3, 9)))
    assert remote.steps == 2


def test_discarded_gradients_are_not_committed(fake: FakeTransport) -> None:
    remote = RemoteExpert("fussy", fake, accumulate=True)
    remote(rows(2, 0)).sum().backward()
    for _ in range(2):  # the second discard has nothing to drop and sends no call
        remote.discard()
        assert not remote.commit() and remote.describe().steps == 0
        assert [call.header.kind for call in fake.seen].count(Kind.DISCARD) == 1
    with pytest.raises(UsageError, match="accumulate"):
        RemoteExpert("fussy", fake).commit()


def test_discard_frees_the_mini_batch_at_the_server() -> None:
    backend = fussy_backend(mini_batches=AccumulationOptions(mini_batches=1))
    with Server([backend]) as server, GrpcTransport(server.address) as transport:
        remote = RemoteExpert("fussy", transport, accumulate=True)
        for _ in range(5):
            wait_until(lambda: backend.statistics().open_mini_batches == 0)
            remote(rows(2, 0)).sum().backward()
            assert backend.statistics().open_mini_batches == 1
            remote.discard()
        wait_until(lambda: backend.statistics().open_mini_batches == 0)
        remote(rows(2, 0)).sum().backward()
    remote.discard()
    assert not remote.commit()


def test_a_mini_batch_with_a_failed_backward_is_not_committed(fake: FakeTransport) -> None:
    remote = RemoteExpert("fussy", fake, accumulate=True)
    remote(rows(2, 0)).sum().backward()
    with pytest.raises(GradientError):
        (remote(rows(2, 0)) * float("inf")).sum().backward()
    with pytest.raises(CommitError, match="discard"):
        remote.commit()
    remote.discard()
    remote(rows(2, 0)).sum().backward()
    assert remote.commit() and remote.steps == 1


@pytest.mark.parametrize("lose", [["reply"], ["request"], ["reply", "request", "reply"]])
def test_lost_message_does_not_step_twice(fake: FakeTransport, lose: list[str]) -> None:
    remote = RemoteExpert("fussy", fake, retry=Retry(first=0.001))
    remote(rows(1, 0))
    fake.lose = ["", *lose]
    assert trains_like_local(remote) and remote.describe().steps == 1
    assert len({call.header.key for call in fake.seen if call.header.key}) == 2, "one key per forward and its backward"
    remote = RemoteExpert("fussy", fake, retry=Retry(first=0.001), accumulate=True)
    remote(rows(2, 0)).sum().backward()
    fake.lose = list(lose)
    assert remote.commit() and remote.describe().steps == 2


def test_missing_server_is_unreachable_within_the_timeout() -> None:
    with (
        RemoteExpert("fussy", "127.0.0.1:1", timeout=0.5) as remote,
        pytest.raises((UnreachableError, DeadlineError), match=r"127\.0\.0\.1:1"),
    ):
        remote(rows(1, 0))


class DelayedInfo:
    """Transport that answers INFO after two seconds of ``clock``, or never without a clock. Records each timeout."""

    def __init__(self, within: Transport, clock: FakeClock | None) -> None:
        self.within, self.clock = within, clock
        self.address, self.close, self.statistics = within.address, within.close, within.statistics
        self.timeouts: list[tuple[Kind, float]] = []

    def submit(self, call: Call, timeout: float) -> Future[Received]:
        self.timeouts.append((call.header.kind, timeout))
        if call.header.kind is Kind.INFO:
            if self.clock is None:
                return Future()
            self.clock.now += 2.0
        return self.within.submit(call, timeout)


def test_first_call_and_its_info_request_share_a_deadline(fake: FakeTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock().install(
        monkeypatch,
        "torchweft.experts.client.remote",
        "torchweft.experts.client.stub",
        "torchweft.experts.client.calls",
    )
    slow = DelayedInfo(fake, clock)
    remote = RemoteExpert("fussy", slow, timeout=10.0)
    for _ in range(2):
        remote(rows(2, 0))
    assert slow.timeouts == [(Kind.INFO, 10.0), (Kind.FORWARD, 8.0), (Kind.FORWARD, 10.0)]


def test_concurrent_first_calls_time_out_together(fake: FakeTransport) -> None:
    remote = RemoteExpert("fussy", DelayedInfo(fake, None), timeout=0.5)

    def call(_: int) -> None:
        with pytest.raises(DeadlineError):
            remote(rows(2, 0))

    start = time.monotonic()
    in_threads(call, range(60))
    assert time.monotonic() - start < 60 * 0.5


def test_an_exception_of_the_module_names_its_type(fake: FakeTransport) -> None:
    x = rows(1, 0)
    x[0, 0] = 1e6
    with pytest.raises(ExpertFailedError, match="in forward") as caught:
        RemoteExpert("fussy", fake)(x)
    assert caught.value.details["type"] == "Troubled"


COPIES: list[Callable[[nn.Module], nn.Module]] = [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
CONVERSIONS: list[Callable[[nn.Module], nn.Module]] = [
    *(lambda m, d=dtype: m.to(d) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    lambda m: m.to("meta"),
    lambda m: m.requires_grad_(False),
    lambda m: m.eval(),
]


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("converted", CONVERSIONS)
def test_copy_keeps_conversions_of_the_original(
    copied: Callable[[nn.Module], nn.Module], converted: Callable[[nn.Module], nn.Module]
) -> None:
    model = converted(nn.Sequential(nn.Linear(2, 2), RemoteExpert("fussy", "127.0.0.1:1"), Calibrated("a", "b:1")))
    again = copied(model)
    for mine, other in zip(model.modules(), again.modules(), strict=True):
        assert mine is not other and type(mine) is type(other) and mine.training == other.training
    for mine, other in zip(model.parameters(), again.parameters(), strict=True):
        attributes = [(p.dtype, p.device, p.requires_grad, p.shape) for p in (mine, other)]
        assert mine is not other and attributes[0] == attributes[1]


@pytest.mark.parametrize("copied", COPIES)
def test_copy_computes_the_same_and_is_independent(copied: Callable[[nn.Module], nn.Module]) -> None:
    with Server([fussy_backend(optimizer=sgd)]) as server, Calibrated("fussy", server.address) as remote:
        remote.register_forward_hook(partial(scaled, 2.0))
        remote.note = ["mine"]
        again = copied(remote)
        assert isinstance(again, Calibrated) and again.note == remote.note and again.note is not remote.note
        with again:
            assert close(again(rows(2, 0)), remote(rows(2, 0)))
            again.scale.detach().zero_()
            assert not close(again(rows(2, 0)), remote(rows(2, 0)))
            again.close()
            assert remote(rows(2, 0)).shape == (2, WIDTH)


def test_copy_keeps_shared_modules_shared(fake: FakeTransport) -> None:
    remote = RemoteExpert("fussy", fake)
    remote.others = [remote]
    again = copy.deepcopy(nn.Sequential(remote, remote))
    assert again[0] is again[1] and again[0] is not remote and len(list(again.parameters())) == 1
    assert again[0].others == [again[0]]


def test_averaged_model_contains_a_remote_expert(fake: FakeTransport) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), RemoteExpert("fussy", fake)).double()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        averaged.update_parameters(model)
    assert close(averaged(rows(2, 0)), model(rows(2, 0)))


def test_expert_with_a_transport_is_copied_but_not_pickled(fake: FakeTransport) -> None:
    remote = RemoteExpert("fussy", fake)
    assert close(copy.deepcopy(remote)(rows(2, 0)), remote(rows(2, 0)))
    with pytest.raises(UsageError, match="cannot be pickled"):
        pickle.dumps(remote)
    for _ in range(2):
        remote.close()
    with pytest.raises(UsageError, match="closed"):
        remote(rows(1, 0))


def make_retrying(transport: Transport, accumulate: bool = False) -> RemoteExpert:
    return RemoteExpert("fussy", transport, accumulate=accumulate, retry=Retry(first=0.001))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_large_call_is_sent_in_parts_and_steps_once(way: str, accumulate: bool) -> None:
    plain, backend = fussy_backend(optimizer=sgd), fussy_backend(optimizer=sgd, max_batch_size=4)
    with reached(way, backend) as (_, transport):
        remote = make_retrying(transport, accumulate)
        with torch.no_grad():
            assert close(remote(rows(10, 0)), plain.module(rows(10, 0)))
        assert trains_like_local(remote, rows(10, 0))
        assert backend.steps == (0 if accumulate else 1)
        assert not accumulate or remote.commit()
        assert backend.steps == remote.steps == 1 and backend.statistics().open_mini_batches == 0
        assert backend.statistics().backward_batches == 3
    plain.module(rows(10, 0)).square().sum().backward()
    sgd(plain.module.parameters()).step()
    assert all(map(close, backend.module.parameters(), plain.module.parameters()))


def test_each_part_is_added_once_despite_lost_messages() -> None:
    whole, backend = fussy_backend(optimizer=sgd), fussy_backend(optimizer=sgd, max_batch_size=4)
    for trained, lose in ((whole, []), (backend, ["reply", "request", "", "reply", "", "reply", "reply"])):
        with reached("fake", trained) as (_, transport):
            assert isinstance(transport, FakeTransport)
            y = make_retrying(transport)(rows(10, 0))
            transport.lose = lose
            y.sum().backward()
            assert not transport.lose and trained.steps == 1
    assert all(map(close, backend.module.parameters(), whole.module.parameters()))


def test_failed_part_applies_none_of_the_parts() -> None:
    backend = fussy_backend(optimizer=sgd, max_batch_size=4)
    with reached("fake", backend) as (_, transport):
        weight = torch.ones(10, WIDTH, dtype=torch.float64)
        weight[9, 0] = torch.nan
        y = make_retrying(transport)(rows(10, 0))
        with pytest.raises(GradientError):
            (y * weight).sum().backward()
        assert backend.steps == backend.statistics().open_mini_batches == 0


def test_parts_use_the_graphs_that_were_kept_for_them() -> None:
    backend = fussy_backend(optimizer=sgd, max_batch_size=4, dropout=0.5, keep_graphs=GraphBudget(1 << 20))
    with reached("fake", backend) as (_, transport):
        RemoteExpert("fussy", transport, keep_graph=True)(rows(10, 0).requires_grad_()).sum().backward()
        assert backend.steps == 1 and backend.statistics().used_graphs == 3


def test_rows_in_two_axes_get_advice_to_flatten(fake: FakeTransport) -> None:
    remote, x = RemoteExpert("fussy", fake), torch.zeros(2, 3, WIDTH, dtype=torch.float64)
    with pytest.raises(SpecError, match=r"would fit as flatten\(0, 1\), and .* by unflatten\(0, \(2, 3\)\)"):
        remote(x)
    assert remote(x.flatten(0, 1)).unflatten(0, (2, 3)).shape == x.shape
    with pytest.raises(SpecError) as caught:
        remote(torch.zeros(2, 3, WIDTH + 1, dtype=torch.float64))
    assert "flatten" not in str(caught.value)
