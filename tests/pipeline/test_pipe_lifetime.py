"""Threads end with their pipe, graphs and tensors with their step."""

import contextvars
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from tests.pipeline.pipe_cases import (
    CHECKPOINTS,
    Early,
    Late,
    assert_gradients_equal,
    backward,
    chain,
    every_cut_run,
    every_run,
    piped,
    rows,
)
from torchweft import Pipe


class Tracked(torch.autograd.Function):
    """Identity that saves a tensor. The census counts its nodes in the graph."""

    @staticmethod
    def forward(ctx, x, census):
        ctx.save_for_backward(x)
        census.add(ctx)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 0 * ctx.saved_tensors[0], None


class Census(nn.Module):
    """Identity that keeps weak references to its tensors and graph nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: weakref.WeakSet = weakref.WeakSet()
        self.tensors: list[weakref.ref] = []
        self.fails = False

    def forward(self, x):
        if self.fails:
            raise ValueError("no")
        y = Tracked.apply(x, self.seen)
        self.tensors += [weakref.ref(x), weakref.ref(y)]
        return y

    def alive(self) -> int:
        """The number of live objects, without a run of the garbage collector."""
        self.tensors = [reference for reference in self.tensors if reference() is not None]
        return len(self.seen) + len(self.tensors)


def model() -> tuple[nn.Sequential, list[Census]]:
    census = [Census(), Census(), Census()]
    torch.manual_seed(2)
    first, last = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    return nn.Sequential(first, census[0], Early(), census[1], Late(), census[2], last), census


def alive(census: list[Census]) -> int:
    return sum(counter.alive() for counter in census)


def pipe_of(executor: str, checkpoint: str, **settings) -> tuple[Pipe, list[Census]]:
    layers, census = model()
    stages = {"balance": [3, 1, 3], "devices": ["cpu"] * 3}
    return Pipe(layers, chunks=3, executor=executor, checkpoint=checkpoint, **stages, **settings), census


@pytest.fixture(autouse=True)
def no_collector():
    """Objects must be freed without the garbage collector, because it can run late."""
    gc.disable()
    yield
    gc.enable()


@every_run
@pytest.mark.parametrize("inside", [None, "gpipe", "1f1b"])
def test_nothing_of_a_step_outlives_it(executor: str, checkpoint: str, inside: str | None) -> None:
    settings = {"loss": nn.MSELoss(), "schedule": inside} if inside else {}
    pipe, census = pipe_of(executor, checkpoint, **settings)
    x = rows(7, 4)
    of_autograd = executor == "graph" or (executor, checkpoint) == (
        "auto",
        "never",
    )  # freed with the loss

    def gone() -> bool:
        if executor == "graph" and alive(census):
            gc.collect()  # PyTorch's checkpointing leaves reference cycles
        return alive(census) == 0

    for retained in ((), (False,), (True, True)) * 2:  # "auto" tries another layout in every step
        loss = pipe(x, target=x) if inside else pipe(x).square().sum()
        if not of_autograd and checkpoint != "always":
            assert (alive(census) > 0) == (inside != "1f1b"), "1F1B frees its graphs before it returns the loss"
        for retain in retained:
            loss.backward(retain_graph=retain)
        if retained == (False,) and not of_autograd:
            assert alive(census) == 0, "backward frees what it used"
        del loss
        assert gone()
    with torch.no_grad():
        output = pipe(x)
    assert gone() and len(output) == 7


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_an_output_keeps_its_own_step_alone(executor: str) -> None:
    pipe, census = pipe_of(executor, "never")
    output = pipe(rows(7, 4))
    kept = alive(census)
    for _ in range(3):
        backward(pipe, rows(7, 4))
        assert alive(census) == kept > 0
    output.sum().backward()
    assert alive(census) == 0


@pytest.mark.long
@every_cut_run
@pytest.mark.parametrize("where", [0, 2])
def test_after_an_exception_nothing_of_the_step_lives(executor: str, checkpoint: str, where: int) -> None:
    pipe, census = pipe_of(executor, checkpoint)
    census[where].fails = True
    for _ in range(2):
        try:
            pipe(rows(7, 4))
        except ValueError:
            pass
        else:
            pytest.fail("the step should have failed")
        gc.collect()  # a traceback and its frames can be a cycle
        assert alive(census) == 0
    census[where].fails = False
    backward(pipe, rows(7, 4))
    assert alive(census) == 0


@pytest.mark.long
@pytest.mark.parametrize(("executor", "checkpoint"), [("serial", "never"), ("threads", "always"), ("auto", "never")])
def test_the_number_of_tensors_does_not_grow_from_step_to_step(executor: str, checkpoint: str) -> None:
    pipe, _ = pipe_of(executor, checkpoint)

    def tensors() -> int:
        backward(pipe, rows(7, 4))
        gc.collect()
        return sum(issubclass(type(candidate), torch.Tensor) for candidate in gc.get_objects())

    for _ in range(2):
        tensors()
    assert tensors() == tensors()


@pytest.mark.parametrize("executor", ["serial", "threads", "auto", "graph"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_dropped_pipe_is_gone_at_once_and_its_threads_with_it(executor: str, checkpoint: str) -> None:
    before = set(threading.enumerate())
    pipe, census = pipe_of(executor, checkpoint)
    assert pipe.statistics()["threads"] == 0
    for _ in range(3):  # "auto" measures threads at its third step
        backward(pipe, rows(7, 4))
    mine = set(threading.enumerate()) - before
    assert len(mine) == (3 if executor in ("threads", "auto") else 0) == pipe.statistics()["threads"]
    assert all(thread.name.startswith("torchweft-") and thread.daemon for thread in mine)
    gone = [weakref.ref(target) for target in (pipe, *pipe.parameters())]
    del pipe, census
    if executor == "graph":
        gc.collect()
    assert not any(reference() is not None for reference in gone)
    for thread in mine:
        thread.join(10)
        assert not thread.is_alive(), "a dropped pipe is in no cycle, so its threads end without the collector"


def test_backward_works_after_its_pipe_is_freed() -> None:
    pipe, plain = piped(chain(4, 5, 3), executor="threads")
    weights = dict(pipe.named_parameters())
    loss = pipe(rows(7, 4)).square().sum()
    del pipe
    loss.backward()
    backward(plain, rows(7, 4))
    for name, expected in plain.named_parameters():
        torch.testing.assert_close(weights[name].grad, expected.grad)


@pytest.mark.parametrize("executor", ["serial", "threads", "auto"])
def test_a_pipe_keeps_no_context_variable_of_its_callers(executor: str) -> None:
    class Value:
        pass

    pipe, _ = piped(chain(4, 5, 3), executor=executor, checkpoint="never")
    pipe._current_runtime().layouts.fixed = "serial"  # the caller's thread, under "auto"

    def steps() -> "weakref.ref[Value]":
        value = Value()
        contextvars.ContextVar[Value]("value").set(value)
        for _ in range(3):
            backward(pipe, rows(7, 4))
        return weakref.ref(value)

    kept = contextvars.Context().run(steps)
    assert kept() is None


@pytest.mark.parametrize("executor", ["serial", "threads", "graph"])
def test_forward_in_one_thread_and_backward_in_another(executor: str) -> None:
    pipe, plain = piped(chain(4, 5, 3), executor=executor)
    for step in range(4):
        work = pipe(rows(7, 4)).square().sum().backward if step % 2 else lambda: backward(pipe, rows(7, 4))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
        backward(plain, rows(7, 4))
        assert_gradients_equal(pipe, plain, 1e-11)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_two_threads_can_call_one_pipe(checkpoint: str) -> None:
    """One thread waits for the other, because a walk is not shared."""
    pipe, plain = piped(chain(4, 5, 3), executor="threads", checkpoint=checkpoint)
    outputs: list[torch.Tensor] = []

    def run() -> None:
        for _ in range(5):
            outputs.append(pipe(rows(7, 4)))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    expected = plain(rows(7, 4))
    assert len(outputs) == 10
    for output in outputs:
        torch.testing.assert_close(output, expected)
