"""A pool's process that stops before every batch, so that a test knows what is under way and what waits."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.core.spec import TensorSpec
from weft.experts.schema import Column, FlatSchema
from weft.experts.task import Task

X = FlatSchema([Column("x", TensorSpec((None,), torch.float32))])


def same(tasks: Sequence[Task]) -> list[list[Tensor]]:
    """Every task gets back what it brought."""
    return [list(task.tensors) for task in tasks]


class Gate:
    """Begins a batch when it is let on, and then gives what ``answers`` makes of the tasks."""

    def __init__(self, answers: Callable[[Sequence[Task]], Any] = same) -> None:
        self.answers = answers
        self.entered, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, tasks: Sequence[Task]) -> Any:
        self.entered.release()
        assert self.go.acquire(timeout=30)
        return self.answers(tasks)
