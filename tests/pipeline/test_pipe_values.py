"""Values into a Pipe, between its stages and out of it: nested tensors and other objects."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.pipeline.pipe_cases import EXECUTORS, assert_alike, assert_close, backward, every_run, piped, rows
from torchweft import NoChunk, Pipe
from torchweft.core import pytree as tree
from torchweft.core.errors import BatchError, UsageError


class FunctionLayer(nn.Module):
    """Layer that applies a function to its weight and its arguments."""

    def __init__(self, function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.weight, *args, **kwargs)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def pipe_and_plain(functions, **settings: Any) -> tuple[Pipe, nn.Sequential]:
    """A pipe with one stage per function, and the plain model."""
    count = len(functions)
    model = nn.Sequential(*(FunctionLayer(function) for function in functions))
    return piped(model, devices=["cpu"] * count, balance=[1] * count, **settings)


def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the first layer with all arguments, as a pipe does. A plain nn.Sequential takes only one."""
    if isinstance(model, Pipe):
        return model(*args, **kwargs)
    value = model[0](*args, **kwargs)
    for layer in list(model)[1:]:
        value = layer(value)
    return value


def backward_of_squares(*tensors: Tensor) -> None:
    """Run backward on the sum of squares."""
    sum(tensor.square().sum() for tensor in tensors).backward()


@every_run
def test_tuples_dicts_and_named_tuples_travel_and_come_out(executor: str, checkpoint: str) -> None:
    functions = [
        lambda w, x: (x * w, {"b": x + w, "a": [x, None, "text", 3]}),
        lambda w, v: {"pair": Pair(v[0] * v[1]["b"] * w, v[1]["a"][0]), "rest": v[1]["a"][1:]},
        lambda w, v: (v["pair"], {"sum": v["pair"].left + w * v["pair"].right, "left": v["pair"].left}, v["rest"]),
    ]

    def step(model: nn.Module) -> list[Tensor]:
        pair, named, rest = model(rows(7, 2))
        assert type(pair) is Pair and list(named) == ["sum", "left"] and rest == [None, "text", 3]
        backward_of_squares(pair.left * 2 + named["sum"])
        return [*pair, *named.values()]

    assert_alike(*pipe_and_plain(functions, executor=executor, checkpoint=checkpoint), step)


def _overwrites(w, value):
    value["x"] = (value["x"] * w).tanh()
    return value


def _adds(w, value):
    value[len(value)] = (value["x"] * w).tanh()
    return value


def _takes_out(w, value):
    return {"x": (value["x"] * w).tanh() + value.pop("m"), "m": value["x"] * w}


def _appends(w, value):
    value["list"].append((value["list"][-1] * w).tanh())
    return value


@every_run
@pytest.mark.parametrize("layer", [_overwrites, _adds, _takes_out, _appends])
def test_a_layer_may_change_the_lists_and_dicts_that_it_gets(executor: str, checkpoint: str, layer) -> None:
    functions = [
        lambda w, x: {"x": x * w, "m": x + w, "list": [x * w]},
        layer,
        layer,
        lambda w, value: w * sum(tree.flatten(value)[0]),
    ]
    assert_alike(
        *pipe_and_plain(functions, executor=executor, checkpoint=checkpoint), lambda model: backward(model, rows(7, 2))
    )


@every_run
@pytest.mark.parametrize("used", [[0], [1], [0, 1]])
def test_a_loss_may_use_only_some_outputs(executor: str, checkpoint: str, used: list[int]) -> None:
    functions = [lambda w, x: (x * w, x + w), lambda w, v: (v[0] * w, v[1].square() * w)]
    pipe, plain = pipe_and_plain(functions, executor=executor, checkpoint=checkpoint)
    assert_alike(pipe, plain, lambda model: backward_of_squares(*(model(rows(7, 2))[index] for index in used)))


@every_run
def test_arguments_and_uncut_values_reach_the_first_layer(executor: str, checkpoint: str) -> None:
    functions = [
        lambda w, x, y, *, scale, extra=None, whole: x * w + y * scale + extra["z"] + whole.sum(0),
        lambda w, v: v * w,
    ]

    def step(model: nn.Module) -> list[Tensor | None]:
        x, y, z = (rows(7, 2, seed=seed).requires_grad_() for seed in (1, 2, 3))
        whole = rows(4, 2, seed=4).requires_grad_()
        uncut = NoChunk(whole) if isinstance(model, Pipe) else whole
        backward_of_squares(call(model, x, y, scale=3, extra={"z": z}, whole=uncut))
        return [x.grad, y.grad, z.grad, whole.grad]

    assert_alike(*pipe_and_plain(functions, executor=executor, checkpoint=checkpoint), step)


@every_run
def test_a_view_may_be_returned(executor: str, checkpoint: str) -> None:
    def step(model: nn.Module) -> Tensor | None:
        x = rows(7, 2).requires_grad_()
        backward(model, x)
        return x.grad

    functions = [lambda w, x: (x * w).T.T[:, :1], lambda w, v: v.expand(-1, 3)]
    assert_alike(*pipe_and_plain(functions, executor=executor, checkpoint=checkpoint), step)


@pytest.mark.parametrize("executor", [*EXECUTORS, "auto"])
def test_an_input_that_cannot_be_cut_is_refused_by_name(executor: str) -> None:
    pipe, _ = pipe_and_plain([lambda w, v: v["a"] * w], executor=executor)
    with pytest.raises(BatchError, match=r"(?s)7 rows.*'c'.*6 rows"):
        pipe({"a": rows(7, 2), "b": {"c": rows(6, 2)}})
    with pytest.raises(BatchError, match="no tensor to cut"):
        pipe(3)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_scalar_output_is_refused_and_the_next_step_works(executor: str) -> None:
    pipe, _ = pipe_and_plain([lambda w, x: x.sum() * w if x.sum() > 0 else x * w], executor=executor)
    with pytest.raises(BatchError, match="single number"):
        pipe(torch.ones(6, 2, dtype=torch.float64))
    assert pipe(-torch.ones(6, 2, dtype=torch.float64)).shape == (6, 2)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("change", [lambda x: x[::2], lambda x: torch.cat([x, x]), lambda x: x.flatten()])
def test_another_number_of_rows_than_came_in_is_refused(executor: str, change: Callable[[Tensor], Tensor]) -> None:
    """The place of such rows in the output is unknown: a joined ``cat`` of micro-batches has another order."""
    pipe, _ = pipe_and_plain([lambda w, x: change(x) * w], executor=executor, chunks=2)
    with pytest.raises(BatchError, match=r"output has \d+, \d+ rows along axis 0 where the micro-batches have 4, 4"):
        pipe(rows(8, 2))
    back, plain = pipe_and_plain(
        [lambda w, x: change(x) * w, lambda w, x: x.view(4, -1) * w], executor=executor, chunks=2
    )
    assert_close(back(rows(8, 2)), torch.cat([plain(piece) for piece in rows(8, 2).split(4)]))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_target_without_a_loss_is_refused(executor: str) -> None:
    pipe, _ = pipe_and_plain([lambda w, x: x * w], executor=executor)
    with pytest.raises(UsageError, match=r"no loss.*loss=fn"):
        pipe(rows(8, 2), target=rows(8, 2))
