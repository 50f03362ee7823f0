"""A program for torchgpipe runs after a change of one import."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tests.pipeline.pipe_cases import CHECKPOINTS, assert_close, assert_gradients_equal, backward, chain, rows
from tests.type_checks import without_type_checks
from torchweft import Pipe
from torchweft.compat.torchgpipe import (
    DeferredBatchNorm,
    GPipe,
    balance,
    balance_by_size,
    balance_by_time,
    batchnorm,
    is_checkpointing,
    is_recomputing,
    pop,
    skip,
    skippable,
    stash,
    verify_skippables,
)
from torchweft.core.errors import UsageError

TWO = ["cpu", "cpu"]


@skippable(stash=["1to3"])
class Stashing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, input):
        yield stash("1to3", input)
        return self.conv(input)


class Doubling(nn.Module):
    def forward(self, input):
        return input * 2


@skippable(pop=["1to3"])
class Popping(nn.Module):
    def forward(self, input):
        skip_1to3 = yield pop("1to3")
        return input + skip_1to3


def test_program_of_the_torchgpipe_guide_trains() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    model = GPipe(model, balance=[1, 1, 1, 1], devices=["cpu"] * 4, chunks=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for input, target in [(torch.randn(10, 4), torch.randint(2, (10,))) for _ in range(3)]:
        input = input.to(model.devices[0], non_blocking=True)
        target = target.to(model.devices[-1], non_blocking=True)
        output = model(input)
        assert_close(output, plain(input), 1e-5)
        loss = nn.functional.cross_entropy(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        plain.load_state_dict(model.state_dict())


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_skip_connections_of_the_torchgpipe_guide_train(checkpoint: str) -> None:
    layers = nn.Sequential(Stashing(), Doubling(), Popping()).double()
    verify_skippables(layers)
    plain = copy.deepcopy(layers)
    model = GPipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=3, checkpoint=checkpoint)
    for network in (model, plain):
        backward(network, rows(7, 3, 2, 2))
    assert_gradients_equal(model, plain)


def test_attributes_of_torchgpipe_exist() -> None:
    layers = chain(4, 5, 3)
    model = GPipe(layers, (2, 1), devices=["cpu", "cpu", "cpu"], chunks=4, checkpoint="always")
    assert isinstance(model, Pipe)
    assert model.balance == [2, 1] and model.chunks == 4 and model.checkpoint == "always"
    assert model.devices == [torch.device("cpu")] * 2
    assert [len(partition) for partition in model.partitions] == [2, 1]
    assert all(type(partition) is nn.Sequential for partition in model.partitions)
    assert [name for partition in model.partitions for name, _ in partition.named_children()] == ["0", "1", "2"]
    expected = list(layers)
    assert len(model) == 3 and list(model) == expected and [model[at] for at in range(-3, 3)] == expected + expected
    for index in (3, -4):
        with pytest.raises(IndexError):
            model[index]
    defaults = GPipe(layers, balance=[3], devices=["cpu"])
    assert defaults.chunks == 1 and defaults.checkpoint == "except_last"


def test_layer_can_query_the_checkpointing_phase() -> None:
    seen: list[tuple[bool, bool]] = []

    class PhaseReader(nn.Module):
        def forward(self, x):
            seen.append((is_checkpointing(), is_recomputing()))
            return x * 1

    model = GPipe(nn.Sequential(PhaseReader()), balance=[1], devices=["cpu"], chunks=2, checkpoint="except_last")
    model(torch.ones(2, 1, requires_grad=True)).sum().backward()
    assert seen == [(True, False), (False, False), (False, True)]
    assert not is_checkpointing() and not is_recomputing()


def test_balances_are_measured() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    by_time = balance_by_time(2, model, torch.ones(8, 32), timeout=0.05, device="cpu")
    assert sum(by_time) == 4 and len(by_time) == 2
    assert balance_by_size(2, model, torch.ones(8, 32), chunks=2, param_scale=4.0, device="cpu") == [2, 2]
    GPipe(model, by_time, devices=TWO)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_partition_stays_the_same_module_and_its_hooks_fire(checkpoint: str) -> None:
    layers = chain(4, 5, 3)
    plain = copy.deepcopy(layers)
    model = GPipe(layers, [2, 1], devices=TWO, chunks=2, checkpoint=checkpoint)
    partitions = model.partitions
    assert model.partitions is partitions and list(model.state_dict()) == list(plain.state_dict())
    seen: list[str] = []
    partitions[0].register_forward_pre_hook(lambda *_: seen.append("before"))
    partitions[0].register_forward_hook(lambda *_: seen.append("after"))
    partitions[1].register_full_backward_hook(lambda *_: seen.append("backward"))
    for network in (model, plain):
        backward(network, rows(6, 4))
    assert_gradients_equal(model, plain)
    calls = {"always": 4, "except_last": 3, "never": 2}[checkpoint]
    assert [seen.count(kind) for kind in ("before", "after", "backward")] == [calls, calls, 2]
    assert model.partitions is partitions
    twin = copy.deepcopy(model)
    assert twin.partitions[0][0] is twin[0] and twin.partitions[0] is not partitions[0]
    model.balance = [1, 2]
    assert [len(partition) for partition in model.partitions] == [1, 2]


def test_import_paths_of_torchgpipe_exist() -> None:
    assert balance.balance_by_time is balance_by_time and skip.skippable is skippable
    assert batchnorm.DeferredBatchNorm is DeferredBatchNorm


def test_deferred_batch_norm_counts_micro_batches_by_itself() -> None:
    x = torch.randn(8, 4, 3)
    plain = nn.Sequential(nn.BatchNorm1d(4))
    deferred = DeferredBatchNorm.convert_deferred_batch_norm(copy.deepcopy(plain), chunks=2)
    plain(x)
    for piece in x.chunk(2):
        assert deferred[0].num_batches_tracked == 0
        deferred(piece)
    torch.testing.assert_close(dict(deferred.state_dict()), dict(plain.state_dict()))
    fresh = DeferredBatchNorm(4, chunks=2)
    converted = GPipe(nn.Sequential(nn.BatchNorm1d(4)), [1], devices=["cpu"], chunks=4, deferred_batch_norm=True)
    for model in (GPipe(nn.Sequential(fresh), [1], devices=["cpu"], chunks=4), converted):
        model(x)
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
    with pytest.raises(UsageError, match="chunks is 0"):
        DeferredBatchNorm(4, chunks=0)
    with pytest.raises(ValueError, match="at least 2 axes"):
        fresh(torch.ones(4))


def test_tuple_is_one_input() -> None:
    class Swap(nn.Module):
        def forward(self, pair):
            x, y = pair
            return y, x

    model = GPipe(nn.Sequential(Swap(), Swap(), Swap()), balance=[1, 2], devices=TWO, chunks=2)
    x, y = torch.zeros(3), torch.ones(3)
    assert [output.tolist() for output in model((x, y))] == [y.tolist(), x.tolist()]


def test_state_saved_by_torchgpipe_loads() -> None:
    layers = chain(4, 5, 5, 3)
    state = layers.state_dict()
    old = {f"partitions.{0 if key[0] in '01' else 1}.{key}": value + 1 for key, value in state.items()}
    before = dict(old)
    model = GPipe(layers, balance=[2, 3], devices=TWO)
    model.load_state_dict(old, strict=True)
    assert list(model.state_dict()) == list(state)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    assert list(old) == list(before), "the caller's dictionary is unchanged"
    inside = nn.Sequential(model)
    inside.load_state_dict({f"0.{key}": value for key, value in before.items()}, strict=True)


def test_new_state_loads_and_an_unknown_key_is_rejected() -> None:
    model = GPipe(chain(4, 5, 3), balance=[2, 1], devices=TWO)
    model.load_state_dict(model.state_dict(), strict=True)
    with pytest.raises(RuntimeError, match=r"partitions\.0\.9\.weight"):
        model.load_state_dict({**model.state_dict(), "partitions.0.9.weight": torch.ones(1)})


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copy_is_a_gpipe_that_works(duplicate) -> None:
    model = GPipe(chain(4, 5, 3), balance=[2, 1], devices=TWO, chunks=2)
    twin = duplicate(model)
    assert type(twin) is GPipe and twin.balance == [2, 1]
    assert_close(twin(rows(5, 4)), model(rows(5, 4)))


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.cuda(0),
        lambda model: model.cpu(),
        lambda model: model.to("cpu", torch.float32),
        lambda model: model.to(torch.device("cuda", 0)),
        lambda model: model.to(torch.rand(1)),
        lambda model: model.to(device="cpu"),
    ],
)
def test_gpipe_is_not_moved(move) -> None:
    model = GPipe(chain(4, 5, 3), balance=[2, 1], devices=TWO)
    with pytest.raises(TypeError, match="places its layers itself"):
        move(model)


def test_dtype_can_change() -> None:
    model = GPipe(chain(4, 5, 3), balance=[2, 1], devices=TWO)
    assert model.half() is model and model[0].weight.dtype == torch.float16
    assert model.to(torch.double) is model and model[0].weight.dtype == torch.float64
    assert model.to(dtype=torch.float32, non_blocking=True)[0].weight.dtype == torch.float32
    assert model(torch.ones(2, 4)).dtype == torch.float32


def test_single_device_and_whole_float_chunks_are_accepted() -> None:
    for device in ("cpu", torch.device("cpu"), ["cpu"]):
        model = GPipe(nn.Sequential(nn.Tanh()), balance=[1], devices=device, chunks=4.0)
        assert model.devices == [torch.device("cpu")] and model.chunks == 4


@pytest.mark.parametrize(
    ("layers", "settings", "kind", "words"),
    [
        (1, {"devices": None}, ValueError, "balance_by_time"),
        (1, {"balance": [1], "chunks": 0}, ValueError, "chunks is 0"),
        (1, {"balance": [1], "chunks": 4.5}, ValueError, r"chunks is 4\.5"),
        (1, {"balance": [1], "checkpoint": "INVALID"}, ValueError, "'INVALID'"),
        *((2, {"balance": balance}, ValueError, "balance|layers") for balance in ([], [1, 1, 1], [0, 2], [-1, 3])),
        (3, {"balance": [2]}, ValueError, "balance"),
        (2, {"balance": [1, 1], "devices": ["cpu"]}, IndexError, "2 stages, but there are 1 devices"),
    ],
)
def test_wrong_arguments_raise_the_errors_of_torchgpipe(
    layers: int, settings: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with without_type_checks(), pytest.raises(kind, match=words):
        GPipe(nn.Sequential(*(nn.Tanh() for _ in range(layers))), **{"devices": ["cpu"] * 3, **settings})


def test_skips_that_do_not_match_raise_a_type_error() -> None:
    with pytest.raises(TypeError, match="1to3"):
        GPipe(nn.Sequential(Stashing(), Doubling()), balance=[1, 1], devices=TWO)
