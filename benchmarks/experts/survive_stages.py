"""Commits of three remote stages in two phases, while trainers are killed.

    4 trainers, processes ── forward, backward, commit of all stages ──> 3 servers of one stage each, in this process
       '── SIGKILL of one of them every few seconds, and a new one in its place

A mini-batch has a name at each stage, and the servers remember the names that they have applied.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.experts.helper import PROGRAMS, ROOT
from benchmarks.experts.survive_common import Verdict
from torchweft.experts import AccumulationOptions, ExpertBackend, TensorSpec
from torchweft.experts.server import Server
from torchweft.experts.task import Results

STAGES, TRAINERS, WIDTH = ("stage.0", "stage.1", "stage.2"), 4, 16
SETTLE = 3.0  # seconds, after the last kill, for commits that are on their way


def killed_trainers(seconds: float, pause: float) -> Verdict:
    """Kill a trainer every `pause` seconds."""
    kills = 0
    sums = AccumulationOptions(mini_batches=64, max_client_mini_batches=64, orphan_seconds=1.0)
    rows = (TensorSpec((None, WIDTH), torch.float32),)
    stages = {name: _Stage(name, args_schema=rows, mini_batches=sums) for name in STAGES}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(Server([stage])) for name, stage in stages.items()}
        options = json.dumps({"addresses": {name: server.address for name, server in servers.items()}, "width": WIDTH})
        trainers = [_Trainer(options, stack) for _ in range(TRAINERS)]
        everyone = list(trainers)
        while not all(trainer.has_begun() for trainer in trainers):
            time.sleep(0.1)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(pause * random.uniform(0.8, 1.2))
            trainers.pop(random.randrange(TRAINERS)).kill()
            kills += 1
            trainers.append(_Trainer(options, stack))
            everyone.append(trainers[-1])
        for trainer in trainers:
            trainer.kill()
        time.sleep(SETTLE)
        events = [event for trainer in everyone for event in trainer.events()]
        begun = [names for kind, names in events if kind == "begin"]
        done = [names for kind, names in events if kind == "done"]
        steps = [stage.steps for stage in stages.values()]
        applied = {name: stage.applied for name, stage in stages.items()}
    lost = sum(names[name] not in applied[name] for names in done for name in STAGES)
    apart = sum(len({names[name] in applied[name] for name in STAGES}) > 1 for names in begun)
    twice = sum(count - len(applied[name]) for count, name in zip(steps, STAGES, strict=True))
    return Verdict(
        "a trainer of three stages is killed (SIGKILL)",
        f"{kills} times in {seconds:g} s",
        "all stages have the same steps; every acknowledged mini-batch on all of them, none twice",
        f"steps {', '.join(map(str, steps))}; {len(done)} acknowledged, {lost} lost, {twice} twice, {apart} in part",
        bool(done) and len(set(steps)) == 1 and not (lost or apart or twice),
    )


class _Stage(ExpertBackend):
    """An expert that notes the mini-batches whose commit it has answered with a step."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, nn.Linear(WIDTH, WIDTH), partial(torch.optim.SGD, lr=1e-3), **options)
        self.applied: set[str] = set()

    def commit(self, mini_batch: str, **options: Any) -> "Future[Results]":
        """`ExpertBackend.commit`, noted."""
        future = super().commit(mini_batch, **options)
        future.add_done_callback(lambda done: done.exception() or self.applied.add(mini_batch))
        return future


class _Trainer:
    def __init__(self, options: str, stack: ExitStack) -> None:
        self._log = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  (the stack closes it)
        program = str(PROGRAMS / "survive_stage_trainer.py")
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, program, options], stdout=self._log, stderr=subprocess.DEVNULL, env=environment
        )
        stack.callback(self.kill)

    def has_begun(self) -> bool:
        return bool(self.events())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def events(self) -> list[tuple[str, dict[str, str]]]:
        self._log.seek(0)
        lines = self._log.read().decode().splitlines()
        complete = [line for line in lines if line.endswith("]")]
        return [(kind, names) for kind, names in map(json.loads, complete)]
