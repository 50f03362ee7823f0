"""Which layers stand in which stage, and how a Pipe shows it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.pipeline.pipe_cases import EXECUTORS, assert_close, assert_gradients_equal, backward, chain, piped, rows
from weft import Pipe


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.sampled_from(EXECUTORS))
def test_any_balance_gives_the_same_gradients(balance: list[int], executor: str) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(sum(balance)))).double()
    pipe, plain = piped(model, balance=balance, devices=["cpu"] * len(balance), executor=executor)
    assert_close(backward(pipe, rows(5, 3)), backward(plain, rows(5, 3)))
    assert_gradients_equal(pipe, plain)
    assert pipe.balance == balance == [len(stage) for stage in pipe.partitions]


def test_partitions_are_the_very_same_layers_under_their_names() -> None:
    model = nn.Sequential()
    layers = {"in": nn.Linear(2, 2), "mid": nn.Tanh(), "out": nn.Linear(2, 2)}
    for name, layer in layers.items():
        model.add_module(name, layer)
    pipe = Pipe(model, chunks=2, balance=[1, 2], devices=["cpu", "cpu"])
    shown = [dict(stage.named_children()) for stage in pipe.partitions]
    assert shown == [{"in": layers["in"]}, {"mid": layers["mid"], "out": layers["out"]}]
    assert len(pipe) == 3 and list(pipe) == list(layers.values())
    assert pipe[0] is layers["in"] and pipe[-1] is layers["out"]
    assert pipe.get_submodule("mid") is layers["mid"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the default is the GPUs")
def test_without_arguments_there_are_two_balanced_stages_on_the_cpu() -> None:
    pipe = Pipe(chain(4, 4, 4), chunks=2)
    assert pipe.devices == [torch.device("cpu")] * 2 and sum(pipe.balance) == 3
    backward(pipe, rows(5, 4))


def test_a_sample_balances_and_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    pipe = Pipe(model, chunks=2, devices=["cpu", "cpu"], sample=torch.ones(6, 4))
    assert sum(pipe.balance) == 4 and len(pipe.balance) == 2
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, state[name]) for name, value in pipe.state_dict().items())
    assert all(each.grad is None for each in pipe.parameters())


def test_a_layer_that_was_moved_away_is_named() -> None:
    pipe = Pipe(chain(4, 4, 4), chunks=2, balance=[2, 1], devices=["cpu", "cpu"])
    pipe[2].to("meta")
    pipe[0].register_buffer("spare", torch.ones(1, device="meta"))
    with pytest.raises(RuntimeError) as caught:
        pipe(rows(4, 4))
    told = str(caught.value)
    assert all(name in told for name in ("2.weight is on meta, stage 1 on cpu", "2.bias", "0.spare"))


def test_printing_shows_stages_and_layers() -> None:
    shown = repr(Pipe(chain(4, 4, 4), chunks=3, balance=[2, 1], devices=["cpu", "cpu"]))
    assert "2 on cpu, 1 on cpu" in shown and "chunks=3" in shown and "(2): Linear" in shown


def test_statistics_tell_what_auto_chose() -> None:
    pipe, _ = piped(chain(4, 4, 4), executor="auto", checkpoint="never")
    assert pipe.statistics()["chosen"] == {}
    for _ in range(20):
        backward(pipe, rows(6, 4))
    assert len(pipe.statistics()["chosen"]) == 1
    assert pipe.statistics()["balance"] == pipe.balance


def test_auto_gives_the_same_gradients_whatever_it_tries() -> None:
    pipe, plain = piped(nn.Sequential(*chain(4, 4, 4), nn.Dropout(0.0)), executor="auto", checkpoint="never")
    for step in range(12):
        for model in (pipe, plain):
            model.zero_grad()
            backward(model, rows(6, 4, seed=step))
        assert_gradients_equal(pipe, plain)
