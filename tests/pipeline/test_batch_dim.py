"""Batches on any axis: gradients are those of the undivided model, and modules with another axis are refused."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pipeline.pipe_cases import (
    EXECUTORS,
    assert_alike,
    assert_close,
    assert_gradients_equal,
    backward,
    every_run,
    piped,
    rows,
    with_batch_norm,
    without_target,
)
from torchweft import NoChunk, Pipe
from torchweft.compat.torchgpipe import GPipe
from torchweft.core import pytree as tree
from torchweft.core.errors import BatchError, SpecError, UsageError
from torchweft.pipeline.config import BatchDims
from torchweft.recurrent import LSTM, Bidirectional, Caffe2LSTM, Recurrent, Stack


class OverTime(nn.Module):
    """Layer that mixes along axis 0, so that a cut along axis 0 would change its result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows(4, 4, seed=3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).cumsum(0).tanh()


class First(nn.Module):
    """Recurrent network that returns its output without the states."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Any) -> Any:
        return self.net(x)[0]


def time_mixing_model() -> nn.Sequential:
    return nn.Sequential(OverTime(), nn.Linear(4, 4), OverTime()).double()


@without_target
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@every_run
def test_a_mini_batch_is_cut_and_joined_along_axis_1(executor: str, checkpoint: str, schedule: str) -> None:
    loss = nn.MSELoss()
    pipe, plain = piped(
        time_mixing_model(), batch_dim=1, executor=executor, checkpoint=checkpoint, schedule=schedule, loss=loss
    )
    for count in (7, 3, 8):
        x, y = rows(5, count, 4, seed=count), rows(5, count, 4, seed=-count)
        seen, expected = pipe(x, target=y), loss(plain(x), y)
        assert_close(seen, expected)
        seen.backward()
        expected.backward()
        assert_alike(pipe, plain, lambda model, x=x: backward(model, x))


@pytest.mark.parametrize(
    "net",
    [
        First(nn.LSTM(4, 4)),
        First(LSTM(4, 4)),
        First(Recurrent(nn.GRUCell(4, 4))),
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0),
    ],
    ids=["nn.LSTM", "torchweft LSTM", "Recurrent", "TransformerEncoderLayer"],
)
def test_networks_with_time_first_are_exact_on_axis_1(net: nn.Module) -> None:
    pipe, plain = piped(nn.Sequential(net, nn.Linear(4, 2)).double(), chunks=2, batch_dim=1)
    for _ in range(2):
        assert_alike(pipe, plain, lambda model: backward(model, rows(5, 6, 4)))


class Attend(nn.Module):
    """Takes arguments with different batch axes, and returns a nested output with other batch axes."""

    def forward(self, x: Tensor, parts: dict[str, Any], *, bias: Tensor, table: Any) -> Any:
        y = x * parts["scale"].unsqueeze(0) + bias.transpose(1, 2) + table.sum()
        return {"time": y.cumsum(0), "rows": [y.sum(0), parts["whole"]]}


@pytest.mark.parametrize("executor", [*EXECUTORS, "auto"])
def test_every_argument_and_output_may_have_its_own_axis(executor: str) -> None:
    dims = {0: 1, 1: {"scale": 0, "whole": None}, "bias": 2, "table": 0}
    pipe = Pipe(
        nn.Sequential(Attend()),
        chunks=3,
        devices="cpu",
        batch_dim=dims,
        output_batch_dim={"time": 1, "rows": [0, 0]},
        executor=executor,
    )
    results = []
    for model, table in ((pipe, NoChunk(rows(7, 2))), (Attend(), rows(7, 2))):
        x, scale, bias = (rows(*shape).requires_grad_() for shape in ((5, 7, 1), (7, 1), (1, 1, 7)))
        output = model(x, {"scale": scale, "whole": 3}, bias=bias, table=table)
        (output["time"].square().sum() + output["rows"][0].sum()).backward()
        results.append((output["time"], output["rows"], x.grad, scale.grad, bias.grad))
    assert_close(*results)


@without_target
def test_the_target_may_have_an_axis_of_its_own() -> None:
    class Last(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[-1]

    pipe, plain = piped(
        nn.Sequential(OverTime(), Last()).double(),
        batch_dim={0: 1, "target": 0},
        output_batch_dim=0,
        loss=nn.functional.cross_entropy,
        schedule="1f1b",
    )
    x, y = rows(5, 7, 4), torch.arange(7) % 4
    pipe(x, target=y).backward()
    nn.functional.cross_entropy(plain(x), y).backward()
    assert_gradients_equal(pipe, plain)
    assert_close(pipe(x), plain(x))


def test_axes_that_do_not_fit_the_call_are_named() -> None:
    pipe = Pipe(nn.Sequential(nn.Tanh()), chunks=2, devices="cpu", batch_dim=(1,), output_batch_dim=1)
    with pytest.raises(UsageError, match=r"as in \{0: 1(.|\n)*argument 'x'"):
        pipe(x=rows(2, 2))
    with pytest.raises(BatchError, match=r"along axis 1(.|\n)*input: no such axis, shape \(2,\)"):
        pipe(rows(2))
    pipe = Pipe(nn.Sequential(nn.Tanh()), chunks=2, devices="cpu", batch_dim=({"x": 1},), output_batch_dim=1)
    with pytest.raises(SpecError, match=r"input is a leaf, but .* is given for it"):
        pipe(rows(2, 2))
    pipe = Pipe(nn.Sequential(nn.Tanh()), chunks=2, devices="cpu", batch_dim=0, output_batch_dim=(0, 1))
    with pytest.raises(SpecError, match=r"output is a leaf, but \(0, 1\) is given for it"):
        pipe(rows(2, 2))


def test_all_invalid_axes_are_listed() -> None:
    with pytest.raises(UsageError) as caught:
        Pipe(nn.Sequential(nn.Tanh()), chunks=2, batch_dim=(-1, {"x": True}, None))
    assert [line.split(";")[0] for line in str(caught.value).splitlines()[1:]] == [
        "  - batch_dim has -1",
        "  - batch_dim has True",
        "  - output_batch_dim is missing",
    ]
    with pytest.raises(UsageError, match="batch_dim is '1'"):
        BatchDims("1", 0)
    with pytest.raises(UsageError, match="output_batch_dim has None"):
        Pipe(nn.Sequential(nn.Tanh()), chunks=2, batch_dim=1, output_batch_dim=[None])


TIME_FIRST = {
    "Recurrent": lambda **more: Recurrent(nn.GRUCell(4, 4), **more),
    "LSTM": lambda **more: nn.LSTM(4, 4, **more),
    "GRU": lambda **more: nn.GRU(4, 4, **more),
    "torchweft LSTM": lambda **more: LSTM(4, 4, **more),
    "Caffe2LSTM": lambda **_: Caffe2LSTM(4, 4),
    "Stack": lambda **more: Stack([Recurrent(nn.GRUCell(4, 4), **more)]),
    "Bidirectional": lambda **more: Bidirectional(*(Recurrent(nn.GRUCell(4, 4), **more) for _ in range(2))),
    "MultiheadAttention": lambda **more: nn.MultiheadAttention(4, 2, **more),
    "TransformerEncoderLayer": lambda **more: nn.TransformerEncoderLayer(4, 2, 8, **more),
    "TransformerEncoder": lambda **more: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8, **more), 1, enable_nested_tensor=False
    ),
}


@pytest.mark.parametrize("kind", TIME_FIRST)
def test_time_first_module_is_refused_by_name(kind: str) -> None:
    name = kind.removeprefix("torchweft ")
    for make in (Pipe, lambda model, **more: GPipe(model, [len(model)], devices="cpu", **more)):
        with pytest.raises(UsageError, match=rf"batch_first=True(.|\n)*  - 1\.net \({name}\) has its batch on axis 1$"):
            make(nn.Sequential(nn.Tanh(), First(TIME_FIRST[kind]())), chunks=2)
    if kind != "Caffe2LSTM":
        Pipe(nn.Sequential(nn.Tanh(), First(TIME_FIRST[kind](batch_first=True))), chunks=2)
    Pipe(nn.Sequential(First(TIME_FIRST[kind]())), chunks=2, batch_dim=0)  # the layer can swap axes before and after
    GPipe(nn.Sequential(First(TIME_FIRST[kind]())), [1], devices="cpu", chunks=2, batch_dim=0)


@pytest.mark.parametrize("kind", TIME_FIRST)
@pytest.mark.parametrize("first", [False, True])
def test_first_and_last_module_must_agree_with_batch_dim(kind: str, first: bool) -> None:
    right = 0 if first and kind != "Caffe2LSTM" else 1
    for others in ([], [nn.Linear(4, 4), nn.ReLU()]):
        for swaps in (None, First(nn.Identity())):
            inner = nn.Sequential(*copy.deepcopy(others), TIME_FIRST[kind](batch_first=first))
            for layers, at in (((inner, swaps), "0"), ((swaps, *inner), r"\d")):
                model = nn.Sequential(*(layer for layer in layers if layer is not None))
                with pytest.raises(UsageError, match=rf"  - {at}.*has its batch on axis {right}, but it"):
                    Pipe(model, chunks=2, batch_dim=1 - right, output_batch_dim=1 - right)
                Pipe(model, chunks=2, batch_dim=right, output_batch_dim=right)
    between = nn.Sequential(First(nn.Identity()), TIME_FIRST[kind](batch_first=first), First(nn.Identity()))
    Pipe(between, chunks=2, batch_dim=1 - right)


@pytest.mark.parametrize(
    ("net", "axes"),
    [
        (nn.LSTM(4, 4, batch_first=True), (0, 1)),
        (LSTM(4, 4, batch_first=True), (0, 1)),
        (Recurrent(nn.GRUCell(4, 4)), (1, 0, 1)),
        (Stack([Recurrent(nn.GRUCell(4, 4))]), (1, 0, 1)),
        (Caffe2LSTM(4, 4), (1, 0, 1, 0)),
        (nn.GRU(4, 4), None),
        (Recurrent(nn.GRUCell(4, 4), batch_first=True), None),
    ],
)
def test_states_of_the_last_layer_need_their_batch_dim(net: nn.Module, axes: Any) -> None:
    batch_dim = 0 if getattr(net, "batch_first", False) else 1
    if axes is not None:
        words = rf"^0 \({type(net).__name__}\).*output_batch_dim={re.escape(str(axes[:3]))},"
        with pytest.raises(UsageError, match=words):
            Pipe(nn.Sequential(net), chunks=2, batch_dim=batch_dim or None)
    pipe, plain = piped(nn.Sequential(net).double(), chunks=2, batch_dim=batch_dim, output_batch_dim=axes)
    seen, expected = (tree.flatten(model(rows(8, 8, 4)))[0] for model in (pipe, plain))
    assert len(seen) == len(expected)
    assert_close(seen, expected)


@with_batch_norm
def test_images_have_their_rows_on_axis_0() -> None:
    Pipe(nn.Sequential(nn.Conv1d(1, 1, 1), nn.BatchNorm1d(1)), chunks=2)
    with pytest.raises(UsageError) as caught:
        Pipe(nn.Sequential(nn.ReLU(), nn.Conv1d(1, 1, 1), nn.BatchNorm1d(1)), chunks=2, batch_dim=1)
    assert str(caught.value).splitlines()[1:] == [
        f"  - {name} has its batch on axis 0, but it {words} along axis 1"
        for words, names in (
            ("gets the input, cut", ["1 (Conv1d)", "2 (BatchNorm1d)"]),
            ("makes the output, joined", ["2 (BatchNorm1d)", "1 (Conv1d)"]),
        )
        for name in names
    ]
