"""An interrupt stops the step, in the caller and in its workers, and nothing else."""

import os
import signal
import threading

import pytest
import torch
from torch import nn

from tests.pipeline.pipe_cases import (
    CHECKPOINTS,
    EXECUTORS,
    assert_alike,
    assert_gradients_equal,
    backward,
    chain,
    every_run,
    piped,
    rows,
)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_base_exceptions_reach_the_caller(executor: str, kind: type[BaseException]) -> None:
    class Stops(nn.Module):
        stops = True

        def forward(self, x):
            if self.stops:
                raise kind()
            return x

    model = nn.Sequential(nn.Identity(), Stops())
    pipe, _ = piped(model, executor=executor)
    with pytest.raises(kind):
        pipe(rows(6, 2))
    model[1].stops = False
    assert torch.equal(pipe(rows(6, 2)), rows(6, 2))


@every_run
def test_held_error_leaves_other_models_of_its_thread_alone(executor: str, checkpoint: str) -> None:
    """PyTorch 2.11 leaves hooks in place, which would recompute the next model as the failed one."""
    pipe, plain = piped(chain(4, 5, 3), executor=executor, checkpoint=checkpoint)
    with pytest.raises(RuntimeError, match="multiplied") as held:
        pipe(rows(6, 5))
    assert_alike(plain, pipe)
    del held


class Interrupts(nn.Module):
    """Interrupts the main thread once, as Ctrl-C does, and then works for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = self.busy = False

    def forward(self, x):
        if self.armed:
            self.armed, self.busy = False, True
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            for _ in range(300_000):
                pass
            self.busy = False
        return x * 2


@pytest.mark.skipif(os.name != "posix", reason="needs pthread_kill")
@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("during", ["forward", "backward"])
def test_keyboard_interrupt_reaches_the_caller(executor: str, checkpoint: str, during: str) -> None:
    """The pipe works afterwards."""
    if during == "backward" and checkpoint == "never":
        return  # without recomputation, no layer of the test runs in backward
    layer = Interrupts()
    pipe, plain = piped(nn.Sequential(*chain(4, 5, 3), layer), chunks=4, executor=executor, checkpoint=checkpoint)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            layer.armed = during == "forward"
            output = pipe(rows(8, 4))
            layer.armed = True
            output.sum().backward()
            pytest.fail("no interrupt arrived")
        assert not layer.busy or executor == "serial", "the caller must continue only after its workers have stopped"
        layer.armed = layer.busy = False
        pipe.zero_grad()
        plain.zero_grad()
        assert_alike(pipe, plain)


@pytest.mark.skipif(os.name != "posix", reason="needs pthread_kill")
def test_an_interrupt_at_any_moment_leaves_a_pipe_that_works() -> None:
    """Another thread interrupts the caller while it distributes work, waits, or collects results."""
    pipe, plain = piped(chain(4, 5, 3), executor="threads")
    backward(pipe, rows(8, 4))
    backward(plain, rows(8, 4))
    for number in range(30):
        heard = threading.Event()
        thread = threading.Thread(target=interrupt_later, args=(number * 40, heard))
        try:
            with pytest.raises(KeyboardInterrupt):
                thread.start()
                while True:
                    backward(pipe, rows(8, 4))
        finally:  # a thread that is still running would keep the process alive
            heard.set()
            thread.join()
        pipe.zero_grad()
        backward(pipe, rows(8, 4))
        assert_gradients_equal(pipe, plain)


def interrupt_later(loops: int, heard: threading.Event) -> None:
    """Interrupt the main thread as Ctrl-C does, after `loops` iterations. Repeat it if a finalizer swallowed it."""
    for _ in range(loops):
        pass
    while not heard.is_set():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        heard.wait(5)
