"""Partitions are optimal, as brute force shows. Profiles find the heavy layer and leave the model unchanged."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.type_checks import without_type_checks
from torchweft import NoChunk, Pipe
from torchweft.core.errors import BatchError, PartitionError, UsageError
from torchweft.pipeline.partition import (
    balance_by_parameters,
    balance_by_size,
    balance_by_time,
    partition,
    profile_sizes,
    profile_times,
)
from torchweft.pipeline.skip import pop, skippable, stash

Case = tuple[list[int], int, list[tuple[int, int, int]]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    costs = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    parts = draw(st.integers(1, len(costs)))
    pairs = list(itertools.combinations(range(len(costs)), 2))
    skips: list[tuple[int, int, int]] = []
    if pairs:
        skips = [
            (*pair, cost)
            for pair, cost in draw(st.lists(st.tuples(st.sampled_from(pairs), st.integers(0, 9)), max_size=4))
        ]
    return costs, parts, skips


def score(lengths: list[int], costs: list[int], skips: list[tuple[int, int, int]]) -> tuple[int, int, int]:
    """The objective of the partition, from its definition."""
    part_of = [part for part, length in enumerate(lengths) for _ in range(length)]
    load = [0] * len(lengths)
    for layer, cost in enumerate(costs):
        load[part_of[layer]] += cost
    for source, destination, cost in skips:
        if part_of[source] != part_of[destination]:
            load[part_of[source]] += cost
            load[part_of[destination]] += cost
    return max(load), sum(part * part for part in load), sum(part * part for part in lengths)


@settings(max_examples=150)
@given(cases())
def test_no_other_cut_is_better(case: Case) -> None:
    costs, parts, skips = case
    lengths = partition(costs, parts, skips=skips)
    assert sum(lengths) == len(costs)
    assert len(lengths) == parts
    assert min(lengths) >= 1
    all_cuts = [
        [stop - start for start, stop in itertools.pairwise([0, *cuts, len(costs)])]
        for cuts in itertools.combinations(range(1, len(costs)), parts - 1)
    ]
    assert score(lengths, costs, skips) == min(score(other, costs, skips) for other in all_cuts)


def test_all_faults_come_in_one_error() -> None:
    with pytest.raises(PartitionError) as caught:
        partition([1, -1, float("nan"), float("inf")], 5, skips=[(2, 1, 1), (0, 9, 1), (0, 1, -3)])
    text = str(caught.value)
    for words in (
        "4 layers cannot be cut into 5 parts",
        "ask for fewer parts",
        "layer 1 costs -1",
        "layer 2 costs nan",
        "layer 3 costs inf",
        "from layer 2 to layer 1 should lead forward",
        "from layer 0 to layer 9 should lead forward between layers 0 to 3",
        "from layer 0 to layer 1 costs -3",
    ):
        assert words in text
    with pytest.raises(PartitionError, match="at least one part"):
        partition([1], 0)


@pytest.mark.parametrize("parts", [2.0, "2", True])
def test_a_number_of_parts_is_an_int_before_anything_is_measured(parts: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    calls: list[Callable[[], Any]] = [
        lambda: partition(["a", 1], parts),
        lambda: balance_by_time(parts, model, None),
        lambda: balance_by_size(parts, model, None),
    ]
    for call in calls:
        with (
            without_type_checks(),
            pytest.raises(PartitionError, match=f"the number of parts is {parts!r}, wanted an int"),
        ):
            call()


def test_unmeasurable_arguments_are_refused_with_all_faults() -> None:
    with without_type_checks(), pytest.raises(UsageError, match="of type Linear, wanted an nn") as caught:
        profile_times(nn.Linear(2, 2), torch.ones(2, 2), timeout="1")
    assert "timeout is '1'" in str(caught.value)
    with without_type_checks(), pytest.raises(UsageError, match=r"chunks is 2\.5") as caught:
        profile_sizes(nn.Sequential(nn.Tanh()), torch.ones(2, 2), chunks=2.5, param_scale=float("nan"))
    assert "param_scale is nan" in str(caught.value)
    with without_type_checks(), pytest.raises(UsageError, match="of type Linear"):
        balance_by_time(1, nn.Linear(2, 2), torch.ones(2, 2))


class Heavy(nn.Module):
    """Many small matrix products, forward and backward."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x @ self.weight
        return x


class Power(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * x) * x


class Chain(nn.Module):
    """Saves twenty results. All but the last are held only by the graph."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20):
            x = x.tanh()
        return x


@skippable(stash=["far"])
class Stash(nn.Module):
    def forward(self, pair):
        yield stash("far", pair["x"])
        return pair["x"] * 2, pair["none"]


@skippable(pop=["far"])
class Pop(nn.Module):
    def forward(self, pair):
        far = yield pop("far")
        return pair[0] + far


def model() -> nn.Sequential:
    """Model with a nested input, skips, dropout, BatchNorm, and in-place, frozen and shared layers."""
    shared = nn.Linear(8, 8)
    frozen = nn.Linear(8, 8).requires_grad_(False)
    inplace = nn.ReLU(inplace=True)
    layers = [Stash(), Pop(), inplace, nn.BatchNorm1d(8), nn.Dropout(0.5), shared, frozen, shared.eval()]
    return nn.Sequential(*layers)


def sample() -> dict[str, Tensor | None]:
    return {"x": torch.randn(6, 8), "none": None}


@pytest.mark.parametrize("how", [balance_by_time, balance_by_size])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_users_model_is_bit_identical_afterwards(how, mode) -> None:
    net, batch = model(), sample()
    (net(batch).sum()).backward()
    before = copy.deepcopy(net)
    grads = [None if parameter.grad is None else parameter.grad.clone() for parameter in net.parameters()]
    x = batch["x"].clone()
    random_state = torch.get_rng_state()
    options = {"timeout": 0.0} if how is balance_by_time else {"chunks": 2}
    with mode():
        lengths = how(3, net, batch, **options)
    assert sum(lengths) == len(net)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(batch["x"], x)
    assert [module.training for module in net.modules()] == [module.training for module in before.modules()]
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before.state_dict()[name])
    for parameter, grad in zip(net.parameters(), grads, strict=True):
        assert (parameter.grad is None) == (grad is None)
        assert grad is None or torch.equal(parameter.grad, grad)


@pytest.mark.parametrize("at", range(4))
def test_the_layer_that_takes_long_gets_a_part_of_its_own(at: int) -> None:
    # A ratio of several hundred is stable on a busy machine.
    net = nn.Sequential(*(Heavy(400 if i == at else 1) for i in range(4)))
    lengths = balance_by_time(2 if at in (0, 3) else 3, net, torch.randn(2, 8), timeout=0.05)
    assert lengths == {0: [1, 3], 1: [1, 1, 2], 2: [2, 1, 1], 3: [3, 1]}[at]


def test_backward_is_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            for _ in range(30_000):  # a ratio of several hundred is stable on a busy machine
                grad = grad + 1
            return grad

    class Layer(nn.Module):
        def forward(self, x):
            return Slow.apply(x)

    times = profile_times(nn.Sequential(nn.Linear(8, 8), Layer(), nn.Linear(8, 8)), torch.randn(2, 8), timeout=0)
    assert times[1] > 2 * max(times[0], times[2])


def test_saved_bytes_are_counted_once_and_without_parameters() -> None:
    rows, width = 6, 8
    x = torch.randn(rows, width)
    linear, relu, power = nn.Linear(width, width), nn.ReLU(), Power()
    one = rows * width * 4  # bytes of one activation
    weights = (width * width + width) * 4
    net = nn.Sequential(linear, relu, power)
    # Linear saves its input, ReLU its output, and Power its input (for both products) and a square.
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            assert profile_sizes(net, x, param_scale=0) == [one, one, 2 * one]
    assert profile_sizes(nn.Sequential(linear, linear, Chain()), x, param_scale=0) == [one, one, 20 * one]
    assert profile_sizes(net, x, param_scale=3)[0] == one + 3 * weights
    assert profile_sizes(net, x, param_scale=0, chunks=2) == [one / 2, one / 2, one]
    assert profile_sizes(net, x, param_scale=0, chunks=5)[0] == 2 * width * 4


def test_buffers_count_once_under_any_parameter_scale() -> None:
    net = nn.Sequential(nn.BatchNorm1d(8).requires_grad_(False).eval())
    assert profile_sizes(net, torch.randn(4, 8), param_scale=0) == [2 * 8 * 4 + 8]


def test_the_layer_that_holds_most_gets_a_part_of_its_own() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2000), nn.Linear(2000, 1), nn.Linear(1, 1))
    assert balance_by_parameters(3, net) == [1, 1, 2]
    shared = nn.Linear(8, 8)  # counts in its first layer
    assert balance_by_parameters(2, nn.Sequential(shared, nn.Linear(8, 4), nn.Linear(8, 4), shared)) == [1, 3]
    assert balance_by_size(2, net, torch.randn(2, 8)) in ([1, 3], [2, 2])
    wide = nn.Sequential(nn.Linear(4, 4), Power(), Power(), nn.Linear(4, 4))
    assert balance_by_size(2, wide, torch.randn(1000, 4), chunks=1) == [2, 2]


def test_weights_that_do_not_exist_yet_can_be_measured() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert balance_by_time(2, net, torch.randn(2, 8), timeout=0) == [1, 1]
    assert balance_by_size(2, net, torch.randn(2, 8)) == [1, 1]
    assert all(parameter.is_meta for parameter in net.parameters())


def test_sample_can_contain_no_chunk_values() -> None:
    class Masked(nn.Module):
        def forward(self, value: dict[str, Tensor]) -> Tensor:
            return value["x"] * value["mask"]

    net = nn.Sequential(Masked(), nn.Linear(3, 3))
    sample = {"x": torch.ones(4, 3), "mask": NoChunk(torch.ones(3))}
    assert balance_by_time(2, net, sample, timeout=0) == balance_by_size(2, net, sample) == [1, 1]
    assert Pipe(net, chunks=2, devices=["cpu"] * 2, sample=sample)(sample).shape == (4, 3)


def test_an_error_of_a_layer_keeps_its_type_and_names_the_layer() -> None:
    net = nn.Sequential(nn.ReLU(), nn.Linear(3, 3))
    with pytest.raises(RuntimeError) as caught:
        profile_times(net, torch.ones(2, 8), timeout=0)
    assert caught.value.__notes__ == ["while measuring layer 1 (Linear)"]
    with pytest.raises(BatchError, match="no tensor to cut"):
        profile_sizes(net, 3)
    with pytest.raises(PartitionError, match="fewer parts"):
        balance_by_time(3, nn.Sequential(nn.ReLU()), torch.ones(2), timeout=0)
