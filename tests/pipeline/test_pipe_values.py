"""What may go into a Pipe, between its stages and out of it: nested tensors, and what is no tensor."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.pipeline.pipe_cases import (
    EXECUTORS,
    assert_close,
    assert_gradients_equal,
    backward,
    chain,
    every_run,
    piped,
    rows,
)
from weft import NoChunk, Pipe
from weft.core import pytree as tree
from weft.core.errors import BatchError, UsageError


class Does(nn.Module):
    """A layer out of a function, with one weight."""

    def __init__(self, function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.weight, *args, **kwargs)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def both(functions, **settings: Any) -> tuple[Pipe, nn.Sequential]:
    """A pipe of as many stages as functions, and the plain model."""
    count = len(functions)
    model = nn.Sequential(*(Does(each) for each in functions))
    return piped(model, devices=["cpu"] * count, balance=[1] * count, **settings)


def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """As the pipe does: the first layer gets all arguments. A plain nn.Sequential takes only one."""
    if isinstance(model, Pipe):
        return model(*args, **kwargs)
    value = model[0](*args, **kwargs)
    for layer in list(model)[1:]:
        value = layer(value)
    return value


@every_run
def test_tuples_dicts_and_named_tuples_travel_and_come_out(executor: str, checkpoint: str) -> None:
    functions = [
        lambda w, x: (x * w, {"b": x + w, "a": [x, None, "text", 3]}),
        lambda w, v: {"pair": Pair(v[0] * v[1]["b"] * w, v[1]["a"][0]), "rest": v[1]["a"][1:]},
        lambda w, v: (v["pair"], {"sum": v["pair"].left + w * v["pair"].right}, v["rest"]),
    ]
    pipe, plain = both(functions, executor=executor, checkpoint=checkpoint)
    seen, wanted = (model(rows(7, 2)) for model in (pipe, plain))
    assert type(seen[0]) is Pair and seen[2] == [None, "text", 3]
    assert_close([*list(seen[0]), seen[1]["sum"]], [*list(wanted[0]), wanted[1]["sum"]])
    for pair, summed, _ in (seen, wanted):
        (pair.left * 2 + summed["sum"]).square().sum().backward()
    assert_gradients_equal(pipe, plain)


@every_run
def test_the_order_of_a_dict_is_kept(executor: str, checkpoint: str) -> None:
    pipe, _ = both([lambda w, x: {"z": x * w, "a": x}, lambda w, v: v], executor=executor, checkpoint=checkpoint)
    assert list(pipe(rows(7, 2))) == ["z", "a"]


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
    pipe, plain = both(functions, executor=executor, checkpoint=checkpoint)
    assert_close(backward(pipe, rows(7, 2)), backward(plain, rows(7, 2)))
    assert_gradients_equal(pipe, plain)


@every_run
@pytest.mark.parametrize("used", [[0], [1], [0, 1]])
def test_a_loss_may_use_only_some_outputs(executor: str, checkpoint: str, used: list[int]) -> None:
    functions = [lambda w, x: (x * w, x + w), lambda w, v: (v[0] * w, v[1].square() * w)]
    pipe, plain = both(functions, executor=executor, checkpoint=checkpoint)
    for model in (pipe, plain):
        outputs = model(rows(7, 2))
        sum(outputs[index].square().sum() for index in used).backward()
    assert_gradients_equal(pipe, plain)


@every_run
def test_an_output_that_depends_on_no_parameter_wants_no_gradient(executor: str, checkpoint: str) -> None:
    functions = [lambda w, x: (x * w, x.argsort(0)), lambda w, v: (v[0] * w, v[1], v[1] > 0)]
    pipe, plain = both(functions, executor=executor, checkpoint=checkpoint, chunks=1)
    seen, order, mask = pipe(rows(7, 2))
    assert seen.requires_grad and not order.requires_grad and not mask.requires_grad
    assert torch.equal(order, plain(rows(7, 2))[1]) and mask.dtype == torch.bool


@every_run
def test_several_arguments_and_keywords_reach_the_first_layer(executor: str, checkpoint: str) -> None:
    functions = [lambda w, x, y, *, scale, extra=None: x * w + y * scale + extra["z"], lambda w, v: v * w]
    pipe, plain = both(functions, executor=executor, checkpoint=checkpoint)
    found = []
    for model in (pipe, plain):
        x, y, z = (rows(7, 2, seed=seed).requires_grad_() for seed in (1, 2, 3))
        call(model, x, y, scale=3, extra={"z": z}).square().sum().backward()
        found.append([x.grad, y.grad, z.grad])
    assert_close(*found)
    assert_gradients_equal(pipe, plain)


@every_run
def test_what_stands_in_no_chunk_reaches_every_micro_batch_whole(executor: str, checkpoint: str) -> None:
    functions = [lambda w, x, y: x * w + y.sum(0), lambda w, v: v * w]
    pipe, plain = both(functions, executor=executor, checkpoint=checkpoint)
    found = []
    for model in (pipe, plain):
        whole = rows(4, 2, seed=1).requires_grad_()
        call(model, rows(7, 2), NoChunk(whole) if model is pipe else whole).square().sum().backward()
        found.append(whole.grad)
    assert_close(*found)
    assert_gradients_equal(pipe, plain)


@every_run
def test_whole_numbers_go_in_and_come_out(executor: str, checkpoint: str) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(9, 4).double(), nn.Tanh(), Does(lambda w, x: (x * w, x.argmax(1))))
    pipe, plain = piped(model, executor=executor, checkpoint=checkpoint)
    words = torch.tensor([[1, 2], [3, 4], [5, 6], [8, 8], [0, 0]])
    for each in (pipe, plain):
        each(words)[0].square().sum().backward()
    assert torch.equal(pipe(words)[1], plain(words)[1]) and pipe(words)[1].dtype == torch.int64
    assert_gradients_equal(pipe, plain)


@every_run
def test_a_view_may_be_returned(executor: str, checkpoint: str) -> None:
    functions = [lambda w, x: (x * w).T.T[:, :1], lambda w, v: v.expand(-1, 3)]
    pipe, plain = both(functions, executor=executor, checkpoint=checkpoint)
    found = []
    for model in (pipe, plain):
        x = rows(7, 2).requires_grad_()
        backward(model, x)
        found.append(x.grad)
    assert_close(*found)
    assert_gradients_equal(pipe, plain)


@every_run
def test_an_identity_passes_tensors_and_gradients_through(executor: str, checkpoint: str) -> None:
    pipe, _ = piped(nn.Sequential(nn.Identity(), nn.Identity()), executor=executor, checkpoint=checkpoint)
    x = rows(5, 2).requires_grad_()
    output = backward(pipe, x)
    assert torch.equal(output, x) and torch.equal(x.grad, 2 * x.detach())


@every_run
def test_the_output_may_be_changed_in_place_by_the_caller(executor: str, checkpoint: str) -> None:
    pipe, plain = piped(chain(4, 5, 3), executor=executor, checkpoint=checkpoint, chunks=1)
    x = rows(7, 4)
    for model in (pipe, plain):
        model(x).mul_(3).square().sum().backward()
    assert_gradients_equal(pipe, plain)


@pytest.mark.parametrize("executor", [*EXECUTORS, "auto"])
def test_tensors_of_different_length_are_refused_by_name(executor: str) -> None:
    pipe, _ = both([lambda w, v: v["a"] * w], executor=executor)
    with pytest.raises(BatchError) as caught:
        pipe({"a": rows(7, 2), "b": {"c": rows(6, 2)}})
    assert "7 rows" in str(caught.value) and "6 rows" in str(caught.value) and "'c'" in str(caught.value)


@pytest.mark.parametrize("executor", [*EXECUTORS, "auto"])
def test_an_input_without_any_tensor_is_refused(executor: str) -> None:
    pipe, _ = both([lambda w, v: w], executor=executor)
    with pytest.raises(BatchError, match="no tensor to cut"):
        pipe(3)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_one_number_per_micro_batch_is_refused_and_the_next_step_works(executor: str) -> None:
    pipe, _ = both([lambda w, x: x.sum() * w if x.sum() > 0 else x * w], executor=executor)
    with pytest.raises(BatchError, match="single number"):
        pipe(torch.ones(6, 2, dtype=torch.float64))
    assert pipe(-torch.ones(6, 2, dtype=torch.float64)).shape == (6, 2)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("change", [lambda x: x[::2], lambda x: torch.cat([x, x]), lambda x: x.flatten()])
def test_another_number_of_rows_than_came_in_is_refused(executor: str, change: Callable[[Tensor], Tensor]) -> None:
    """Nobody knows whose rows they are: ``cat`` joined per micro-batch has them in another order."""
    pipe, _ = both([lambda w, x: change(x) * w], executor=executor, chunks=2)
    with pytest.raises(BatchError, match=r"output has \d+, \d+ rows along axis 0 where the micro-batches have 4, 4"):
        pipe(rows(8, 2))
    back, plain = both([lambda w, x: change(x) * w, lambda w, x: x.view(4, -1) * w], executor=executor, chunks=2)
    assert_close(back(rows(8, 2)), torch.cat([plain(each) for each in rows(8, 2).split(4)]))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_target_for_which_there_is_no_loss_is_told(executor: str) -> None:
    pipe, _ = both([lambda w, x: x * w], executor=executor)
    with pytest.raises(UsageError, match=r"no loss.*loss=fn"):
        pipe(rows(8, 2), target=rows(8, 2))
