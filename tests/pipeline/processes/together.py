"""Work for ranks: calls that all ranks make together outside of a step, while one of them fails, dies or stops."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import torchweft as weft
from tests.pipeline.processes.failing import outcome
from tests.pipeline.processes.weights import adam, batch, model, on_meta, piped, train
from torchweft import checkpoint
from torchweft.pipeline.processes.links import Walk
from torchweft.pipeline.processes.membership import Rendezvous
from torchweft.pipeline.processes.store_exchange import StoreExchange


class Blocks(nn.Module):
    """Here and not in `splitting`, whose imports would take a new rank seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x).tanh()).tanh())


class Call:
    """One of the calls, and the pipe that it is made with. `run` can be repeated."""

    def __init__(self, name: str, folder: str) -> None:
        self.name, self.folder = name, Path(folder)
        self.pipe: Any = piped(on_meta() if name == "materialize" else model())
        self.optimizer = adam(self.pipe) if name in ("save", "load") else None
        if name in ("save", "load", "clip"):
            train(self.pipe, adam(self.pipe), range(1))
        if name == "load":
            weft.checkpoint.save(self.folder / "latest", self.pipe, self.optimizer)
        if name == "record":
            self.pipe = weft.Pipe(
                Blocks(), chunks=2, split=["second", "third"][3 - dist.get_world_size() :], group=dist.group.WORLD
            )

    def run(self) -> None:
        if self.name == "save":
            weft.checkpoint.save(self.folder / "latest", self.pipe, self.optimizer)
        elif self.name == "load":
            weft.checkpoint.load(self.folder / "latest", self.pipe, self.optimizer)
        elif self.name == "clip":
            weft.clip_grad_norm_(self.pipe, 1.0)
        elif self.name == "materialize":
            self.pipe.materialize()
        elif self.name == "record":
            self.pipe(torch.ones(4, 6))
        else:
            x, y = batch(0)
            self.pipe(x, target=y)


# Functions of a rank's own work in each call: one that raises there must be an error on all ranks.
WORK: dict[str, list[tuple[Any, str]]] = {
    "save": [
        (checkpoint, "_clear_way"),
        (checkpoint, "_model_state"),
        (DefaultSavePlanner, "create_local_plan"),
        (FileSystemWriter, "write_data"),
        (FileSystemWriter, "finish"),
        (checkpoint, "_publish"),
    ],
    "load": [
        (FileSystemReader, "read_metadata"),
        (FileSystemReader, "read_data"),
        (checkpoint, "_optimizer_from"),
        (torch.optim.Adam, "load_state_dict"),
    ],
    "clip": [(nn.utils, "get_total_norm")],
    "materialize": [(nn.Linear, "reset_parameters")],
    "record": [(nn.Linear, "forward")],
    "settings": [(weft.Pipe, "_settings_state"), (Rendezvous, "connect")],
}
# Exchanges of ranks: one that dies or stops there must be named by the others.
EXCHANGES = [(Walk, "agree"), (Walk, "receive"), (StoreExchange, "gather")]


def fail_in(name: str, number: int, bad: int, folder: str) -> tuple[str, str, bool]:
    """The error of a call with a function that raises on one rank, and whether the call succeeds afterwards."""
    call = Call(name, folder)
    where, function = WORK[name][number]

    def fail(*_: Any, **__: Any) -> None:
        raise ArithmeticError("on purpose")

    with mock.patch.object(where, function, fail) if dist.get_rank() == bad else mock.MagicMock():
        kind, text = outcome(call.run)
    call.run()
    return kind, text, True


@contextmanager
def stopping_at(number: int, act: Callable[[], None]) -> Iterator[list[int]]:
    """Act before the exchange of this number. The list has the number of exchanges that have begun."""
    seen = [0]

    def patched(kind: Any, function: str) -> Any:
        plain = getattr(kind, function)

        def exchange(*args: Any, **kwargs: Any) -> Any:
            seen[0] += 1
            if seen[0] == number:
                act()
            return plain(*args, **kwargs)

        return mock.patch.object(kind, function, exchange)

    patches = [patched(*entry) for entry in EXCHANGES]
    for patch in patches:
        patch.start()
    try:
        yield seen
    finally:
        for patch in patches:
            patch.stop()


def count_exchanges(name: str, folder: str) -> int:
    """The number of exchanges of a call on this rank."""
    call = Call(name, folder)
    with stopping_at(0, lambda: None) as seen:
        call.run()
    return seen[0]


def lose_at(name: str, number: int, sent: int, folder: str) -> tuple[str, str, float]:
    """The error of a call in which the last rank gets a signal before one of its exchanges, and its seconds."""
    call, begun = Call(name, folder), time.monotonic()

    def act() -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), sent)
            signal.pause()

    with stopping_at(number, act):
        kind, text = outcome(call.run)
    if not kind:  # the rank was lost after the last exchange with this one: the next call must find it
        kind, text = outcome(lambda: call.pipe(batch(0)[0], target=batch(0)[1]))
    return kind, text, time.monotonic() - begun


def load_damaged(folder: str, how: str) -> tuple[str, str, bool]:
    """The error of loading a checkpoint with a file that is damaged, cut or missing, and whether nothing changed."""
    call = Call("load", folder)
    train(call.pipe, call.optimizer, range(1, 2))
    before = {key: value.clone() for key, value in call.pipe.state_dict().items()}
    states = [value.clone() for state in call.optimizer.state.values() for value in state.values()]
    if dist.get_rank() == 0:
        file = call.folder / "latest" / "__1_0.distcp"
        content = file.read_bytes()
        if how == "missing":
            file.unlink()
        else:
            file.write_bytes(content[:100] if how == "cut" else b"x" * len(content))
    dist.barrier()
    kind, text = outcome(call.run)
    now = [value for state in call.optimizer.state.values() for value in state.values()]
    same = all(torch.equal(value, before[key]) for key, value in call.pipe.state_dict().items())
    return kind, text, same and all(torch.equal(one, other) for one, other in zip(states, now, strict=True))
