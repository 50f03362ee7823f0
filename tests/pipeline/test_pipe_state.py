"""A Pipe saves, copies and shares the state of the wrapped model."""

import copy

import pytest
import torch
from torch import nn

from tests.pipeline.pipe_cases import (
    EXECUTORS,
    Early,
    Late,
    assert_alike,
    assert_close,
    assert_gradients_equal,
    backward,
    chain,
    pickle_copy,
    piped,
    rows,
    torch_save_copy,
    with_batch_norm,
)
from torchweft import Namespace, Pipe


def varied_model() -> nn.Sequential:
    """Model with skips, batch norms, buffers and custom names."""
    space = Namespace()
    named = [
        ("early", Early().isolate(space)),
        ("first", nn.Linear(4, 4).double()),
        ("norm", nn.BatchNorm1d(4).double()),
        ("middle", nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()),
        ("last", Late().isolate(space)),
    ]
    model = nn.Sequential()
    for name, layer in named:
        model.add_module(name, layer)
    return model


@with_batch_norm
@pytest.mark.parametrize("deferred", [False, True])
def test_state_has_the_keys_of_the_sequential_both_ways(deferred: bool) -> None:
    pipe, plain = piped(varied_model(), balance=[2, 3], deferred_batch_norm=deferred)
    assert list(pipe.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in plain.named_parameters()]
    backward(pipe, rows(8, 4))
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.add_(1)
    plain.load_state_dict(pipe.state_dict(), strict=True)
    other, _ = piped(varied_model(), balance=[3, 2], deferred_batch_norm=deferred)
    other.load_state_dict(plain.state_dict(), strict=True)
    for name, seen in other.state_dict().items():
        assert torch.equal(seen, pipe.state_dict()[name]), name


@pytest.mark.parametrize("executor", EXECUTORS)
def test_one_layer_may_stand_in_two_stages(executor: str) -> None:
    layer = nn.Linear(4, 4).double()
    pipe, plain = piped(nn.Sequential(layer, nn.Tanh(), layer), balance=[1, 2], executor=executor)
    assert_alike(pipe, plain)
    assert list(pipe.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_eval_uses_running_statistics_and_leaves_them(executor: str) -> None:
    pipe, plain = piped(varied_model(), balance=[2, 3], executor=executor, deferred_batch_norm=True)
    before = copy.deepcopy(pipe.eval().state_dict())
    with torch.no_grad():
        assert_close(pipe(rows(5, 4)), plain.eval()(rows(5, 4)))
    assert all(torch.equal(seen, before[name]) for name, seen in pipe.state_dict().items())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, pickle_copy, torch_save_copy])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_copy_works_and_so_does_the_original(duplicate, steps: int) -> None:
    pipe, plain = piped(chain(4, 5, 3), executor="threads")
    for _ in range(steps):
        backward(pipe, rows(7, 4))
    twin = duplicate(pipe)
    assert twin.statistics()["threads"] == 0
    assert twin.statistics()["balance"] == pipe.statistics()["balance"]
    backward(plain, rows(7, 4))
    shared = {id(parameter) for parameter in pipe.parameters()} & {id(parameter) for parameter in twin.parameters()}
    assert len(shared) == (4 if duplicate is copy.copy else 0)
    for model in (twin, pipe):
        model.zero_grad()
        backward(model, rows(7, 4))
        assert_gradients_equal(model, plain)


@with_batch_norm
def test_meta_model_is_materialized_stage_by_stage() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Linear(5, 3))
    pipe = Pipe(model, chunks=2, balance=[2, 2], devices=["cpu", "cpu"])
    assert all(parameter.is_meta for parameter in pipe.parameters())
    with pytest.raises(RuntimeError, match=r"materialize\(\)") as caught:
        pipe(torch.ones(4, 4))
    assert "0.weight" in str(caught.value) and "3.bias" in str(caught.value)
    assert pipe.materialize() is pipe
    assert not any(tensor.is_meta for tensor in (*pipe.parameters(), *pipe.buffers()))
    assert torch.equal(pipe[2].running_var, torch.ones(5))
    backward(pipe, torch.randn(4, 4))
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in pipe.parameters())


def on_the_meta_device() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 2))


def test_a_layer_is_initialised_the_same_wherever_it_is_cut() -> None:
    results: list[list[torch.Tensor]] = []
    for balance, dropped in (([2, 2], None), ([1, 3], None), ([1, 3], 0)):
        pipe = Pipe(on_the_meta_device(), chunks=2, balance=balance, devices=["cpu", "cpu"])
        if dropped is not None:
            pipe.add_module(str(dropped), nn.Identity())  # as if another process had that layer
        torch.manual_seed(3)
        pipe.materialize()
        results.append([parameter.detach() for parameter in (*pipe[2].parameters(), *pipe[3].parameters())])
        results[-1].append(torch.rand(3))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_materialize_keeps_the_runtime() -> None:
    pipe = Pipe(on_the_meta_device(), chunks=2, balance=[2, 2], devices=["cpu", "cpu"], executor="threads")
    with pytest.raises(RuntimeError, match=r"materialize\(\)"):
        pipe(torch.ones(4, 4))
    runtime = pipe._runtime
    pipe.materialize()
    pipe(torch.ones(4, 4)).sum().backward()
    assert pipe._runtime is runtime
    assert all(parameter.grad is not None for parameter in pipe.parameters())


def test_materialize_applies_the_callback_to_meta_layers_only() -> None:
    def ones(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)

    stored = nn.Linear(3, 2)
    pipe = Pipe(nn.Sequential(nn.Linear(4, 3, device="meta"), stored), chunks=2)
    kept = stored.weight.detach().clone()
    pipe.materialize(ones)
    assert torch.equal(pipe[0].weight, torch.ones(3, 4)) and torch.equal(pipe[1].weight, kept)
    micro_batches = torch.full((2, 3), 5.0).split(1)  # two rows together can be summed in another order
    assert torch.equal(pipe(torch.ones(2, 4)), torch.cat([stored(micro_batch) for micro_batch in micro_batches]))


@pytest.mark.parametrize("executor", ["serial", "threads", "auto"])
def test_a_layer_may_be_replaced_between_steps(executor: str) -> None:
    pipe, plain = piped(chain(4, 5, 3), executor=executor)
    backward(pipe, rows(7, 4))
    pipe.zero_grad()
    pipe.add_module("0", chain(4, 5))  # as e.g. convert_sync_batchnorm does
    plain[0] = chain(4, 5)
    assert_alike(pipe, plain)


@with_batch_norm
@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_evaluation_before_backward_keeps_running_statistics(executor: str) -> None:
    pipe, _ = piped(varied_model(), balance=[3, 2], executor=executor, checkpoint="always")
    loss = pipe(rows(6, 4)).sum()
    before = copy.deepcopy(pipe.state_dict())
    pipe.eval()
    pipe(rows(6, 4, seed=1))
    pipe.train()
    loss.backward()
    assert all(torch.equal(seen, before[name]) for name, seen in pipe.state_dict().items())
