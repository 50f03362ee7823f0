"""Polling, threads, a fake clock, and work that blocks until it is released."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
from torch import Tensor, nn

from tests.experts.expert_cases import X
from torchweft.experts import ExpertBackend
from torchweft.experts.task import Task

Item = TypeVar("Item")
Result = TypeVar("Result")


class FakeClock:
    """Manually advanced clock that replaces the `time` module in the given modules."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def install(self, patch: pytest.MonkeyPatch, *modules: str) -> "FakeClock":
        for module in modules:
            patch.setattr(f"{module}.time", self)
        return self


def wait_until(true: Callable[[], object], seconds: float = 60.0) -> None:
    """Poll ``true``. Fails if it does not hold within ``seconds``."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"the condition did not hold within {seconds:g} s"
        time.sleep(0.005)


def in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the results of ``work``, called in one thread per item. Raises the exception of a thread."""
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(work, items))


def echo(tasks: Sequence[Task]) -> list[list[Tensor]]:
    return [list(task.tensors) for task in tasks]


class BlockingProcess:
    """Pool process that waits for a release of ``go`` before each batch, and then returns ``answers(tasks)``."""

    def __init__(self, answers: Callable[[Sequence[Task]], Any] = echo) -> None:
        self.answers = answers
        self.entered, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, tasks: Sequence[Task]) -> Any:
        self.entered.release()
        assert self.go.acquire(timeout=30)
        return self.answers(tasks)


class BlockingModule(nn.Module):
    """Doubles its input, as soon as ``go`` is set or the ``with`` block ends."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        self.go.set()

    def forward(self, x: Tensor) -> Tensor:
        self.entered.set()
        assert self.go.wait(20)
        return x * 2


def blocking_expert() -> tuple[BlockingModule, ExpertBackend]:
    """Expert named "gate" that blocks from its first task on."""
    gate = BlockingModule()
    gate.go.set()  # the backend runs the module once when it is created
    backend = ExpertBackend("gate", gate, args_schema=(X,))
    gate.entered.clear()
    gate.go.clear()
    return gate, backend
