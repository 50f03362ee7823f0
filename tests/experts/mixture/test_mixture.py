"""A remote mixture equals the local computation, whichever of its experts fail."""

import copy
import itertools
import math
import pickle
import socket
import time
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad

from tests.experts.concurrency import FakeClock, in_threads, wait_until
from tests.experts.mixture.mixture_cases import (
    GRID,
    WIDTH,
    Fault,
    World,
    fails,
    first_row_is_nan,
    hangs,
    lacks_a_row,
    numbers,
    only,
    routed,
)
from torchweft import Recurrent
from torchweft.core.errors import BackwardTwiceError, DoubleBackwardError, SpecError, UsageError
from torchweft.experts import ExpertBackend, TensorSpec
from torchweft.experts.client import Connections, RemoteExpert, StepsLostWarning
from torchweft.experts.client.retry import NEVER, Retry
from torchweft.experts.compression import Policy
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.errors import AnomalyError, NoExpertsError, TooFewAnswersError, UnreachableError
from torchweft.experts.mixture import RemoteMixtureOfExperts
from torchweft.experts.server import Server
from torchweft.experts.wire import Header, Kind
from torchweft.recurrent import NoPlanWarning

sgd = partial(torch.optim.SGD, lr=0.1)


def local_output(
    world: World, mixture: RemoteMixtureOfExperts, x: Tensor, gone: frozenset[str] = frozenset()
) -> Tensor:
    """The mixture in plain autograd, sample by sample. Experts in ``gone`` have no weight."""
    sizes, uids = mixture.grid.sizes, sorted(world.here)
    starts = [0, *itertools.accumulate(sizes)]
    scores = nn.functional.linear(x, mixture.proj.weight, mixture.proj.bias)
    rows: list[Tensor] = []
    for row, score in zip(x, scores, strict=True):
        by_uid = {uid: sum(score[starts[a] + int(i)] for a, i in enumerate(uid.split(".")[1:])) for uid in uids}
        best = sorted(by_uid, key=lambda uid: -float(by_uid[uid].detach()))[: mixture.options.k_best]
        alive = [uid for uid in best if uid not in gone]
        if not alive:
            rows.append(0 * row)
            continue
        weights = torch.stack([by_uid[uid] for uid in alive]).softmax(0)
        rows.append(sum(w * world.here[uid](row[None])[0] for w, uid in zip(weights, alive, strict=True)))
    return torch.stack(rows)


def gradients(world: World, mixture: RemoteMixtureOfExperts, x: Tensor, *, here: bool) -> dict[str, Tensor]:
    """Return all gradients of the last backward by name, and clear them."""
    modules = world.here if here else world.servers.modules
    named = {f"{uid}.{n}": p for uid, module in modules.items() for n, p in module.named_parameters()}
    by_name: dict[str, Tensor] = {}
    for name, tensor in {"x": x, **dict(mixture.named_parameters()), **named}.items():
        by_name[name] = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        tensor.grad = None
    return by_name


def assert_same(world: World, mixture: RemoteMixtureOfExperts, x: Tensor, gone: frozenset[str] = frozenset()) -> None:
    output_gradient = numbers(len(x), WIDTH, seed=9)
    local = local_output(world, mixture, x, gone)
    local.backward(output_gradient)
    expected = gradients(world, mixture, x, here=True)
    remote = mixture(x)
    remote.backward(output_gradient)
    torch.testing.assert_close(remote, local, rtol=0, atol=1e-12)
    seen = gradients(world, mixture, x, here=False)
    for name, gradient in expected.items():
        torch.testing.assert_close(
            seen[name], gradient, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@settings(max_examples=15)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 5), st.integers(1, 6), st.data())
def test_outputs_and_gradients_equal_the_local_mixture(
    sizes: list[int], k: int, samples: int, data: st.DataObject
) -> None:
    whole = list(itertools.product(*map(range, sizes)))
    living = sorted(data.draw(st.sets(st.sampled_from(whole), min_size=1)))
    gone = data.draw(st.sets(st.sampled_from(living)))
    with World(living) as world:
        mixture = RemoteMixtureOfExperts(
            **world.options(grid_size=sizes, k_best=k, allow_zero_outputs=True, retry=NEVER)
        )
        mixture(numbers(1, WIDTH))
        names = frozenset(mixture.grid.uid(place) for place in gone)
        world.servers.faults = dict.fromkeys(names, fails)
        assert_same(world, mixture, numbers(samples, WIDTH, seed=1).requires_grad_(), names)


def make_mixture(world: World, **more: Any) -> RemoteMixtureOfExperts:
    return routed(RemoteMixtureOfExperts, world, k_best=2, **more)


def chosen_uids(world: World, mixture: RemoteMixtureOfExperts, x: Tensor) -> list[str]:
    """Return the experts that are called for these samples in ``no_grad`` mode."""
    world.servers.headers.clear()
    with torch.no_grad():
        assert not mixture(x).requires_grad
    return world.servers.called(Kind.FORWARD)


def test_expert_is_called_once_in_each_direction(world: World) -> None:
    mixture = make_mixture(world)
    x = numbers(64, WIDTH)
    mixture(x).sum().backward()
    assert world.servers.called(Kind.FORWARD) == sorted(set(world.servers.called(Kind.FORWARD)))
    assert world.servers.called(Kind.BACKWARD) == world.servers.called(Kind.FORWARD)
    assert 1 <= len(world.servers.called(Kind.INFO)) <= 4
    world.servers.headers.clear()
    mixture(x)
    assert world.servers.called(Kind.INFO) == []
    seen = mixture.statistics()
    assert (seen.forwards, seen.backwards, seen.living, seen.zeroed) == (2, 1, 4, 0) and not seen.failed


@pytest.mark.parametrize("fault", [fails, hangs, lacks_a_row, first_row_is_nan])
def test_failed_forward_gets_no_weight_and_no_backward(fault: Fault) -> None:
    with World(GRID) as world:
        mixture = make_mixture(world, timeout_after_k_min=0.05, forward_timeout=100.0, detect_anomalies=True)
        x = numbers(1, WIDTH).requires_grad_()
        bad = chosen_uids(world, mixture, x)[0]
        world.servers.faults = {bad: fault}
        world.servers.headers.clear()
        assert_same(world, mixture, x, frozenset([bad]))
        assert world.servers.called(Kind.BACKWARD) == [uid for uid in world.servers.called(Kind.FORWARD) if uid != bad]
        assert sum(mixture.statistics().failed.values()) == 1
        wait_until(lambda: not any(transport.waiting for transport in world.connections.statistics().values()))


def test_only_non_finite_rows_have_no_weight(world: World) -> None:
    mixture = make_mixture(world, detect_anomalies=True)
    x = numbers(32, WIDTH)
    clean = mixture(x)
    bad = chosen_uids(world, mixture, x)[0]
    world.servers.faults = {bad: first_row_is_nan}
    changed = (mixture(x) != clean).any(1)
    assert int(changed.sum()) == 1
    loose = make_mixture(world)
    assert bool(loose(x).isnan().any())


def test_failed_backward_adds_nothing_to_input_gradients(world: World) -> None:
    mixture = make_mixture(world, timeout_after_k_min=0.05)
    x = numbers(1, WIDTH).requires_grad_()
    bad, good = chosen_uids(world, mixture, x)
    whole = torch.autograd.grad(mixture(x).sum(), x)[0]
    world.servers.faults = {bad: only(Kind.BACKWARD, fails)}
    without = torch.autograd.grad(mixture(x).sum(), x)[0]
    world.servers.faults = {bad: only(Kind.BACKWARD, hangs)}
    assert torch.equal(without, torch.autograd.grad(mixture(x).sum(), x)[0])
    world.servers.faults = {good: only(Kind.BACKWARD, fails)}
    other = torch.autograd.grad(mixture(x).sum(), x)[0]
    world.servers.faults = {uid: only(Kind.BACKWARD, fails) for uid in (bad, good)}
    lenient = make_mixture(world, allow_zero_outputs=True)
    router_only = torch.autograd.grad(lenient(x).sum(), x)[0]
    torch.testing.assert_close(without + other - router_only, whole, rtol=0, atol=1e-12)


def test_too_few_answers_raise_at_once_and_list_failures(world: World) -> None:
    mixture = make_mixture(world, k_min=2, backward_k_min=2, forward_timeout=60.0)
    x = numbers(4, WIDTH).requires_grad_()
    bad = chosen_uids(world, mixture, x)[0]
    world.servers.faults = {bad: fails} | {uid: hangs for uid in world.here if uid != bad}
    start = time.monotonic()
    with pytest.raises(TooFewAnswersError, match=rf"forward.*fewer than 2 answers(.|\n)*{bad}: .*it is gone") as caught:
        mixture(x)
    assert time.monotonic() - start < 30.0 and bad in caught.value.faults
    world.servers.faults = {bad: only(Kind.BACKWARD, fails)}
    with pytest.raises(TooFewAnswersError, match="backward of a mixture"):
        mixture(x).sum().backward()


def test_unreachable_experts_error_names_the_retry() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound, but not listening
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        for retry, seconds, suggests_retry in ((None, 60.0, True), (Retry(), 1.0, False)):
            with Connections({"m.0": address}) as connections:
                options: dict[str, Any] = {"in_features": WIDTH, "grid_size": [1], "uid_prefix": "m", "retry": retry}
                mixture = RemoteMixtureOfExperts(connections=connections, forward_timeout=seconds, **options)
                with pytest.raises(TooFewAnswersError, match=r"m\.0: (Unreachable|Deadline)Error") as caught:
                    mixture(torch.zeros(2, WIDTH))
                assert ("retry=Retry() waits for them" in str(caught.value)) is suggests_retry


def test_waits_end_at_the_timeout(world: World) -> None:
    mixture = make_mixture(world, forward_timeout=1.0, backward_timeout=0.15)
    x = numbers(4, WIDTH)
    mixture(x)
    world.servers.faults = dict.fromkeys(world.here, hangs)
    start = time.monotonic()
    with pytest.raises(TooFewAnswersError, match="4 of 4 samples"):
        mixture(x)
    assert 1.0 <= time.monotonic() - start < 20.0
    world.servers.faults = dict.fromkeys(world.here, only(Kind.BACKWARD, hangs))
    loss = mixture(x).sum()
    start = time.monotonic()
    with pytest.raises(TooFewAnswersError):
        loss.backward()
    assert 0.15 <= time.monotonic() - start < 20.0


def test_description_shares_the_deadline_of_the_first_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [f"torchweft.experts.{name}" for name in ("mixture.mixture", "mixture.fanout", "client.calls")]
    clock = FakeClock().install(monkeypatch, *modules)

    def slowly(header: Header, answer: list[Tensor]) -> list[Tensor]:
        clock.now = 2.0
        return answer

    with World(GRID) as world:
        mixture = make_mixture(world, forward_timeout=20.0)
        world.servers.faults = dict.fromkeys(world.here, slowly)
        mixture(numbers(4, WIDTH))
        deadlines = {header.deadline_ms for header in world.servers.headers if header.kind is Kind.FORWARD}
        assert deadlines == {18_000}


def test_late_answers_are_awaited_after_the_quorum(world: World) -> None:
    x = numbers(1, WIDTH)
    patient, hasty = make_mixture(world), make_mixture(world, timeout_after_k_min=0.05)
    slow = chosen_uids(world, patient, x)[0]
    world.servers.late = {slow: 0.6}
    start = time.monotonic()
    hurried = hasty(x)
    assert time.monotonic() - start >= 0.05  # the outputs below show which answers were used
    whole = patient(x)
    assert time.monotonic() - start >= 0.35
    torch.testing.assert_close(whole, local_output(world, patient, x))
    torch.testing.assert_close(hurried, local_output(world, hasty, x, frozenset([slow])))
    transports = world.connections.statistics()
    assert transports[f"{slow}:1"].waiting == 0


def test_unsent_call_is_retried_with_the_same_key() -> None:
    with World([(0, 0)]) as world:
        mixture = RemoteMixtureOfExperts(**world.options(grid_size=[2, 2], k_best=1))
        x = numbers(3, WIDTH).requires_grad_()
        times = [0]

        def sometimes(header: Any, answer: list[Tensor]) -> list[Tensor]:
            times[0] += 1
            if times[0] % 2:
                raise UnreachableError("not now")
            return answer

        world.servers.faults = {"ffn.0.0": sometimes}
        mixture(x).sum().backward()
        keys = [header.key for header in world.servers.headers if header.kind is Kind.BACKWARD]
        assert len(keys) == 2 and len(set(keys)) == 1
        assert not mixture.statistics().failed


def test_samples_with_too_few_answers_are_zero_if_allowed(world: World) -> None:
    mixture = make_mixture(world, k_min=2, allow_zero_outputs=True)
    x = numbers(16, WIDTH).requires_grad_()
    mixture(x)
    world.servers.faults = {"ffn.0.0": fails}
    y = mixture(x)
    short = (y == 0).all(1)
    assert 0 < int(short.sum()) < 16 and mixture.statistics().zeroed == int(short.sum())
    y.sum().backward()
    assert bool((x.grad[short] == 0).all()) and bool((x.grad[~short] != 0).all())
    world.servers.faults = dict.fromkeys(world.here, fails)
    x.grad = None
    nothing = mixture(x)
    nothing.sum().backward()
    assert nothing.shape == (16, WIDTH) and not nothing.any() and not x.grad.any()


def test_next_call_sees_joined_and_left_experts(world: World) -> None:
    mixture = make_mixture(world)
    x = numbers(32, WIDTH)
    mixture(x)
    for uid in ("ffn.0.0", "ffn.0.1", "ffn.1.0"):
        world.directory.withdraw(world.leases[uid])
        assert uid not in chosen_uids(world, mixture, x)
    assert mixture.statistics().living == 1
    world.directory.withdraw(world.leases["ffn.1.1"])
    with pytest.raises(NoExpertsError, match=r"ffn\.\*"):
        mixture(x)
    assert not make_mixture(world, allow_zero_outputs=True)._client._signature
    mixture._client.options = make_mixture(world, allow_zero_outputs=True).options
    assert not mixture(x).any()
    with pytest.raises(NoExpertsError):
        make_mixture(world, allow_zero_outputs=True)(x)
    world.directory.declare("ffn.0.1", "new:1", 60.0)
    assert chosen_uids(world, mixture, x) == ["ffn.0.1"]


def test_fewer_living_experts_than_k_min_raise_at_once(world: World) -> None:
    mixture = make_mixture(world, k_min=2)
    x = numbers(4, WIDTH)
    mixture(x)
    for uid in ("ffn.0.0", "ffn.0.1", "ffn.1.0"):
        world.directory.withdraw(world.leases[uid])
    asked = len(world.servers.headers)
    with pytest.raises(TooFewAnswersError, match=r"needs 2 answers \(k_min\), but .* only 1 living") as caught:
        mixture(x)
    assert len(world.servers.headers) == asked and not caught.value.faults
    mixture._client.options = make_mixture(world, k_min=2, allow_zero_outputs=True).options
    assert not mixture(x).any()


class Awkward(nn.Module):
    """Module with nested inputs and outputs of free length. One input has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor], *, scale: Tensor) -> dict[str, Any]:
        y = self.layer(x) * scale[:, None, None] + pair[1] * pair[0][:, None, None]
        return {"y": y, "more": (y.sum((1, 2)), y[..., :2])}


def test_nested_values_of_free_sizes() -> None:
    sample = (
        (
            torch.zeros(1, 3, WIDTH, dtype=torch.float64),
            (torch.ones(1, dtype=torch.int64), torch.zeros(1, 3, WIDTH, dtype=torch.float64)),
        ),
        {"scale": torch.ones(1, dtype=torch.float64)},
    )
    with World(GRID, Awkward, sample) as world:
        mixture = RemoteMixtureOfExperts(**world.options(grid_size=[2, 2], k_best=4))
        x, second = (numbers(6, 3, WIDTH, seed=i).requires_grad_() for i in range(2))
        scale, index = numbers(6, seed=2).requires_grad_(), torch.arange(6)

        def loss(outputs: list[dict[str, Any]], weights: Tensor) -> Tensor:
            mean = {"y": 0, "a": 0, "b": 0}
            for i, out in enumerate(outputs):
                w = weights[:, i]
                mean["y"] = mean["y"] + w[:, None, None] * out["y"]
                mean["a"] = mean["a"] + w * out["more"][0]
                mean["b"] = mean["b"] + w[:, None, None] * out["more"][1]
            return (mean["y"] ** 2).sum() + (mean["a"] ** 3).sum() + mean["b"].sum()

        logits = mixture.proj(x.mean(1))
        scores = torch.stack([logits[:, a] + logits[:, 2 + b] for a, b in GRID], 1)
        outputs = [world.here[uid](x, (index, second), scale=scale) for uid in sorted(world.here)]
        expected = torch.autograd.grad(loss(outputs, scores.softmax(1)), [x, second, scale, mixture.proj.weight])
        seen = mixture(x, (index, second), scale=scale)
        assert set(seen) == {"y", "more"} and isinstance(seen["more"], tuple)
        one = torch.ones(6, 1, dtype=torch.float64)
        gradients = torch.autograd.grad(loss([seen], one), [x, second, scale, mixture.proj.weight])
        for a, b in zip(gradients, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
        part = torch.autograd.grad(mixture(x, (index, second), scale=scale)["more"][0].sum(), x)[0]
        assert bool((part != 0).any())
        for wrong in ({"scale": scale[:, None]}, {}, {"scale": scale, "other": 1}):
            with pytest.raises(SpecError):
                mixture(x, (index, second), **wrong)


def test_anomalies_are_detected_on_request(world: World) -> None:
    mixture = make_mixture(world, detect_anomalies=True)
    x = numbers(3, WIDTH)
    x[1, 0] = math.inf
    with pytest.raises(AnomalyError, match=r"inputs of a mixture are not finite(.|\n)*1 of 3 rows"):
        mixture(x)
    y = mixture(numbers(3, WIDTH))
    assert issubclass(AnomalyError, ValueError)
    with pytest.raises(AnomalyError, match="gradients of outputs"):
        (y * math.nan).sum().backward()
    assert world.servers.called(Kind.BACKWARD) == []


def test_second_backward_needs_a_retained_graph(world: World) -> None:
    mixture = make_mixture(world)
    x = numbers(3, WIDTH).requires_grad_()
    y = mixture(x).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y, x, retain_graph=True)[0])
    keys = [header.key for header in world.servers.headers if header.kind is Kind.BACKWARD]
    assert len(set(keys)) == len(keys)
    with pytest.raises(DoubleBackwardError, match="has its graph at its server"):
        torch.autograd.grad(y, x, create_graph=True)
    y.backward()
    z = mixture(x)
    nodes = [z.grad_fn]
    while not hasattr(nodes[-1], "function"):
        node = nodes.pop()
        nodes = [parent for parent, _ in node.next_functions if parent is not None] + nodes
    function = nodes[-1].function
    z.sum().backward()
    with pytest.raises(BackwardTwiceError):
        function.backward([torch.ones(3, 2, WIDTH, dtype=torch.float64)], retain=False)


@pytest.mark.parametrize("grad", [True, False])
def test_a_tangent_is_refused(grad: bool) -> None:
    with World(GRID) as world, torch.set_grad_enabled(grad), forward_ad.dual_level():
        x = forward_ad.make_dual(numbers(6, WIDTH), numbers(6, WIDTH))
        with pytest.raises(UsageError, match=r"an input of experts ffn\.\* has a tangent"):
            make_mixture(world)(x)


def test_threads_can_share_one_mixture(world: World) -> None:
    mixture = make_mixture(world)
    inputs = [numbers(9, WIDTH, seed=i) for i in range(6)]
    for x, seen in zip(inputs, in_threads(mixture, inputs), strict=True):
        torch.testing.assert_close(seen, local_output(world, mixture, x))


def test_copy_shares_connections_and_pickle_is_refused(world: World) -> None:
    mixture = make_mixture(world)
    twin = copy.deepcopy(mixture)
    assert twin.proj.weight is not mixture.proj.weight
    x = numbers(3, WIDTH)
    assert torch.equal(twin(x), mixture(x))
    with pytest.raises(UsageError, match=r"save its state_dict\(\)"):
        pickle.dumps(mixture)
    assert "ffn.*, grid 2 x 2, k_best=2" in repr(mixture)


def test_autocast_spares_the_router(world: World) -> None:
    half, x = make_mixture(world, compression=Policy("fp16", "fp16", "fp16", "fp16")), numbers(8, WIDTH)
    assert 0 < float((half(x) - make_mixture(world)(x)).detach().abs().max()) < 1e-2
    with World(GRID, lambda: nn.Linear(WIDTH, WIDTH), ((torch.zeros(1, WIDTH),), {})) as single:
        mixture = RemoteMixtureOfExperts(**single.options(grid_size=[2, 2], k_best=2, dtype=torch.float32))
        plain = mixture(x.float())
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(mixture(x.float()).float(), plain, rtol=2e-2, atol=2e-2)
            assert mixture._router_scores(x.float()).dtype is torch.float32


def test_lost_steps_warn_or_raise(directory: LocalDirectory) -> None:

    def step() -> None:
        mixture(torch.ones(2, 4)).sum().backward()

    with Connections(directory) as connections:
        mixture = RemoteMixtureOfExperts(in_features=4, grid_size=[1], uid_prefix="f", connections=connections)
        with Server([linear()], directory=directory):
            for _ in range(2):
                step()
        with Server([linear()], directory=directory), warnings.catch_warnings():
            warnings.simplefilter("error", StepsLostWarning)
            with pytest.raises(StepsLostWarning, match=r"'f\.0' went back from step 2 to"):
                step()
            step()
            assert mixture.steps == {"f.0": 1} and mixture.steps_lost == {"f.0": 2}
    directory.close()


def linear() -> ExpertBackend:
    return ExpertBackend("f.0", nn.Linear(4, 4), sgd, args_schema=(TensorSpec((None, 4), torch.float32),))


@pytest.mark.parametrize("kind", [RemoteExpert, RemoteMixtureOfExperts])
def test_cell_with_remote_calls_warns(kind: type) -> None:
    class Cell(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            h = self.inner((x + h).tanh())
            return h, h

    directory = LocalDirectory()
    with Server([linear()], directory=directory) as server, Connections(directory) as connections:
        if kind is RemoteExpert:
            inner: nn.Module = RemoteExpert("f.0", server.address)
        else:
            inner = RemoteMixtureOfExperts(in_features=4, grid_size=[1], uid_prefix="f", connections=connections)
        cell = Recurrent(Cell(inner))
        words = f"the cell reads {kind.__name__}, which servers compute"
        with pytest.warns(NoPlanWarning, match=words):
            cell(torch.ones(3, 2, 4), torch.zeros(2, 4))
    directory.close()


class Best(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(1)


def test_unusable_inputs_and_outputs_are_refused(world: World) -> None:
    with pytest.raises(SpecError):
        make_mixture(world)(numbers(3, WIDTH + 1))
    with pytest.raises(SpecError, match=r"reads samples x \.\.\. x 7"):
        RemoteMixtureOfExperts(**world.options(grid_size=[2, 2], in_features=7))(numbers(3, WIDTH))
    assert world.servers.called(Kind.FORWARD) == []
    with World(GRID, Best) as other, pytest.raises(UsageError, match=r"output is of torch\.int64"):
        make_mixture(other)(numbers(2, WIDTH))
