"""Nothing outlives what it belongs to: no thread its pipe, no graph and no tensor its step."""

import contextvars
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from tests.pipeline.pipe_cases import CHECKPOINTS, assert_gradients_equal, backward, chain, every_cut_run, piped, rows
from weft import Pipe, pop, skippable, stash


class Tracked(torch.autograd.Function):
    """The identity. Its node in the graph, which saves a tensor, is what the census counts."""

    @staticmethod
    def forward(ctx, x, census):
        ctx.save_for_backward(x)
        census.add(ctx)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 0 * ctx.saved_tensors[0], None


class Census(nn.Module):
    """Notes weakly every tensor and every graph node that it sees."""

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
        """How much of it lives, without the help of the garbage collector."""
        self.tensors = [each for each in self.tensors if each() is not None]
        return len(self.seen) + len(self.tensors)


@skippable(stash=["early"])
class Early(nn.Module):
    def forward(self, x):
        yield stash("early", x * 2)
        return x


@skippable(pop=["early"])
class Late(nn.Module):
    def forward(self, x):
        return x + (yield pop("early"))


def model() -> tuple[nn.Sequential, list[Census]]:
    census = [Census(), Census(), Census()]
    torch.manual_seed(2)
    first, last = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    return nn.Sequential(first, census[0], Early(), census[1], Late(), census[2], last), census


def alive(census: list[Census]) -> int:
    return sum(each.alive() for each in census)


def pipe_of(executor: str, checkpoint: str, **settings) -> tuple[Pipe, list[Census]]:
    layers, census = model()
    stages = {"balance": [3, 1, 3], "devices": ["cpu"] * 3}
    return Pipe(layers, chunks=3, executor=executor, checkpoint=checkpoint, **stages, **settings), census


@pytest.fixture(autouse=True)
def no_collector():
    """What lives no longer must go by itself: the collector may come late."""
    gc.disable()
    yield
    gc.enable()


@every_cut_run
def test_after_backward_nothing_of_the_step_lives(executor: str, checkpoint: str) -> None:
    pipe, census = pipe_of(executor, checkpoint)
    for _ in range(3):
        loss = pipe(rows(7, 4)).square().sum()
        assert alive(census) > 0 or checkpoint == "always"
        loss.backward()
        if (executor, checkpoint) == ("auto", "never"):  # some steps are plain autograd, whose nodes live with the loss
            del loss
        assert alive(census) == 0


@every_cut_run
def test_an_output_that_is_dropped_without_backward_takes_its_step_along(executor: str, checkpoint: str) -> None:
    pipe, census = pipe_of(executor, checkpoint)
    for _ in range(3):
        output = pipe(rows(7, 4))
        del output
        assert alive(census) == 0


@every_cut_run
def test_retained_graphs_go_with_the_loss(executor: str, checkpoint: str) -> None:
    pipe, census = pipe_of(executor, checkpoint)
    loss = pipe(rows(7, 4)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    del loss
    assert alive(census) == 0


@every_cut_run
def test_without_gradients_nothing_is_kept(executor: str, checkpoint: str) -> None:
    pipe, census = pipe_of(executor, checkpoint)
    with torch.no_grad():
        output = pipe(rows(7, 4))
    assert alive(census) == 0 and len(output) == 7


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
            pytest.fail("it should have failed")
        gc.collect()  # a traceback and its frames may be a cycle
        assert alive(census) == 0
    census[where].fails = False
    backward(pipe, rows(7, 4))
    assert alive(census) == 0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@every_cut_run
def test_with_the_loss_inside_nothing_of_the_step_lives(executor: str, checkpoint: str, schedule: str) -> None:
    pipe, census = pipe_of(executor, checkpoint, loss=nn.MSELoss(), schedule=schedule)
    for _ in range(2):
        loss = pipe(rows(7, 4), target=rows(7, 4))
        if schedule == "1f1b":
            assert alive(census) == 0  # its graphs were used on the way
        loss.backward()
        del loss  # run uncut, as "auto" may, it holds its graph as in plain PyTorch
        assert alive(census) == 0


@pytest.mark.long
@pytest.mark.parametrize(("executor", "checkpoint"), [("serial", "never"), ("threads", "always"), ("auto", "never")])
def test_the_number_of_tensors_does_not_grow_from_step_to_step(executor: str, checkpoint: str) -> None:
    pipe, _ = pipe_of(executor, checkpoint)

    def tensors() -> int:
        backward(pipe, rows(7, 4))
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    for _ in range(2):
        tensors()
    assert tensors() == tensors()


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_the_threads_of_a_pipe_end_with_it(checkpoint: str) -> None:
    before = set(threading.enumerate())
    pipe, _ = pipe_of("threads", checkpoint)
    backward(pipe, rows(7, 4))
    mine = set(threading.enumerate()) - before
    assert len(mine) == 3 == pipe.statistics()["threads"]
    assert all(thread.name.startswith("weft-") and thread.daemon for thread in mine)
    del pipe
    for thread in mine:
        thread.join(10)
        assert not thread.is_alive(), "a dropped pipe is no cycle, so its threads end without the collector"


def test_an_output_that_outlives_its_pipe_still_goes_back() -> None:
    pipe, plain = piped(chain(4, 5, 3), executor="threads")
    weights = dict(pipe.named_parameters())
    loss = pipe(rows(7, 4)).square().sum()
    del pipe
    loss.backward()
    backward(plain, rows(7, 4))
    for name, wanted in plain.named_parameters():
        torch.testing.assert_close(weights[name].grad, wanted.grad)


@pytest.mark.parametrize("executor", ["serial", "threads", "auto"])
def test_a_pipe_keeps_no_context_variable_of_its_callers(executor: str) -> None:
    class Value:
        pass

    pipe, _ = piped(chain(4, 5, 3), executor=executor, checkpoint="never")
    pipe._made_runtime().layouts.fixed = "serial"  # the caller's thread, under "auto"

    def steps() -> "weakref.ref[Value]":
        value = Value()
        contextvars.ContextVar[Value]("value").set(value)
        for _ in range(3):
            backward(pipe, rows(7, 4))
        return weakref.ref(value)

    kept = contextvars.Context().run(steps)
    assert kept() is None


def test_a_pipe_that_was_never_used_has_no_thread() -> None:
    pipe, _ = piped(chain(4, 5, 3), executor="threads")
    assert pipe.statistics()["threads"] == 0


@pytest.mark.parametrize("executor", ["serial", "threads", "graph"])
def test_two_threads_of_the_user_may_take_turns(executor: str) -> None:
    pipe, plain = piped(chain(4, 5, 3), executor=executor)
    errors: list[BaseException] = []

    def train() -> None:
        try:
            backward(pipe, rows(7, 4))
        except BaseException as error:
            errors.append(error)

    for _ in range(4):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
        backward(plain, rows(7, 4))
    assert not errors
    assert_gradients_equal(pipe, plain, 1e-11)


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_forward_in_one_thread_and_backward_in_another(executor: str) -> None:
    pipe, plain = piped(chain(4, 5, 3), executor=executor)
    loss = pipe(rows(7, 4)).square().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    backward(plain, rows(7, 4))
    assert_gradients_equal(pipe, plain)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_two_threads_of_the_user_may_even_meet_in_a_pipe(checkpoint: str) -> None:
    """One waits for the other: a walk is not shared."""
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
    wanted = plain(rows(7, 4))
    assert len(outputs) == 10
    for each in outputs:
        torch.testing.assert_close(each, wanted)
