"""The layers of each stage, the settings that can change later, and their display."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.pipeline.pipe_cases import assert_gradients_equal, backward, chain, piped, rows
from tests.type_checks import without_type_checks
from torchweft import Pipe, Recorder, is_recomputing
from torchweft.core.errors import UsageError


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
    assert pipe.get_submodule("mid") is layers["mid"] and pipe.balance == [1, 2]
    assert isinstance(pipe[1:], nn.Sequential) and list(pipe[1:].state_dict()) == ["out.weight", "out.bias"]


def test_a_layer_that_was_moved_away_is_named() -> None:
    pipe = Pipe(chain(4, 4, 4), chunks=2, balance=[2, 1], devices=["cpu", "cpu"])
    pipe[2].to("meta")
    pipe[0].register_buffer("spare", torch.ones(1, device="meta"))
    with pytest.raises(RuntimeError) as caught:
        pipe(rows(4, 4))
    message = str(caught.value)
    assert all(name in message for name in ("2.weight is on meta, stage 1 on cpu", "2.bias", "0.spare"))


def test_layers_keep_their_own_training_flags() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Dropout(), nn.Linear(4, 4)))
    model[1].eval()
    model[2][0].eval()
    for deferred in (False, True):
        pipe = Pipe(model, chunks=2, devices=["cpu"], deferred_batch_norm=deferred)
        assert [module.training for module in pipe.modules()] == [True, True, False, True, False, True]
    assert not Pipe(model.eval(), chunks=2).training


def test_changed_settings_apply_from_the_next_step() -> None:
    modes = ["always", "always"]
    pipe, plain = piped(chain(4, 4, 4), executor="serial", balance=[2, 1], checkpoint=modes)
    calls: list[bool] = []
    pipe[0].register_forward_hook(lambda *_: calls.append(is_recomputing()))
    changes: list[tuple[Callable[[], Any], int, list[bool], list[int]]] = [
        (lambda: None, 3, [False] * 3 + [True] * 3, [2, 1]),
        (lambda: modes.__setitem__(0, "never"), 3, [False] * 3, [2, 1]),
        (lambda: setattr(pipe, "chunks", 2), 2, [False] * 2, [2, 1]),
        (lambda: setattr(pipe, "balance", [1, 2]), 2, [False] * 2, [1, 2]),
        (lambda: pipe.balance.insert(0, pipe.balance.pop()), 2, [False] * 2, [2, 1]),
        (lambda: setattr(pipe, "devices", ("cpu:0", "cpu")), 2, [False] * 2, [2, 1]),
        (lambda: setattr(pipe, "executor", "threads"), 2, [False] * 2, [2, 1]),
    ]
    for change, chunks, recomputed, balance in changes:
        change()
        calls.clear()
        with pipe.observed_by(recorder := Recorder()):
            backward(pipe, rows(6, 4))
        backward(plain, rows(6, 4))
        assert calls == recomputed and pipe.statistics()["balance"] == balance
        assert [len(stage.layers) for stage in pipe._current_runtime().stages] == balance
        assert {event.action.micro_batch for event in recorder.events} == set(range(chunks))
        assert_gradients_equal(pipe, plain)
    assert pipe.devices == [torch.device("cpu")] * 2


def test_repr_shows_stages_schedule_and_loss() -> None:
    pipe, _ = piped(chain(4, 5, 3), balance=[2, 1])
    assert "schedule='gpipe', loss=None, checkpoint='never'" in str(pipe)
    assert "2 on cpu, 1 on cpu" in str(pipe) and "chunks=3" in str(pipe) and "(2): Linear" in str(pipe)
    pipe, _ = piped(chain(4, 5, 3), schedule="1f1b", loss=nn.functional.mse_loss)
    assert "schedule='1f1b', loss=mse_loss," in str(pipe)
    pipe, _ = piped(chain(4, 5, 3), schedule="0F0,0B0\n1F0,1B0\n", chunks=1, loss=nn.MSELoss())
    assert "schedule='a table', loss=MSELoss," in str(pipe)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("chunks", "4", "chunks is '4'"),
        ("chunks", 3.0, r"chunks is 3\.0"),
        ("executor", "thread", "executor is 'thread'"),
        ("schedule", "1f1b", "starts backward before all forwards"),
        ("schedule", ["gpipe"], "schedule is of type list"),
        ("balance", [1, 1], "the module has 3"),
        ("balance", None, "it is None"),
        ("devices", ["cpu"], "there are 1 devices"),
        ("devices", ["meta", "meta"], r"(?s)pipe\.devices.*0\.weight is on cpu, stage 0 on meta"),
        ("checkpoint", 5, "it is 5"),
    ],
)
def test_changed_settings_are_validated(name: str, value: Any, told: str) -> None:
    pipe, plain = piped(chain(4, 4, 4), balance=[2, 1])
    backward(pipe, rows(6, 4))
    before = getattr(pipe, name)
    setattr(pipe, name, value)
    for _ in range(2):
        with without_type_checks(), pytest.raises((ValueError, RuntimeError), match=told):
            pipe(rows(6, 4))
    setattr(pipe, name, before)
    backward(pipe, rows(6, 4))
    for _ in range(2):
        backward(plain, rows(6, 4))
    assert_gradients_equal(pipe, plain)


@pytest.mark.parametrize("observer", [None, 3, object(), Recorder])
def test_invalid_observer_is_refused_before_a_step(observer: Any) -> None:
    pipe, _ = piped(chain(4, 4))
    with without_type_checks(), pytest.raises(UsageError, match=r"weft\.Recorder"), pipe.observed_by(observer):
        raise AssertionError("the block began")


def test_the_graph_executor_cannot_be_observed() -> None:
    pipe, _ = piped(chain(4, 4), executor="graph")
    with pytest.raises(UsageError, match="'serial' or 'threads'"), pipe.observed_by(Recorder()):
        raise AssertionError("the block began")


def test_a_recording_of_two_pipes_tells_their_threads_apart() -> None:
    recorder = Recorder()
    for _ in range(2):
        pipe, _ = piped(chain(4, 4, 4), executor="threads")
        with pipe.observed_by(recorder):
            backward(pipe, rows(6, 4))
    assert len({event.thread for event in recorder.events}) == 4


def test_statistics_show_the_choice_of_auto() -> None:
    pipe, _ = piped(chain(4, 4, 4), executor="auto", checkpoint="never")
    assert pipe.statistics()["chosen"] == {}
    for _ in range(20):
        backward(pipe, rows(6, 4))
    assert list(pipe.statistics()["chosen"]) == [
        "gradients, train(), output, 3 micro-batches of 2 to 3 rows, 16 to 31 numbers in all"
    ]
    pipe.eval()
    with torch.no_grad():
        for _, count in itertools.product(range(20), (1, 0)):
            pipe(rows(count, 4))
    assert list(pipe.statistics()["chosen"])[1:] == [
        "no gradients, eval(), output, 1 micro-batch of 1 row, 4 to 7 numbers in all",
        "no gradients, eval(), output, 1 micro-batch of 0 rows, 0 to 0 numbers in all",
    ]
    assert pipe.statistics()["balance"] == pipe.balance
