"""Crashes: a server process that is killed at random moments, and a disk that stops at every one of its moments.

trainers ── keys ──> server ── checkpoints ──> disk        SIGKILL ── what is on the disk? ── a new server ...

promised   the largest step that an answer called durable: it is on the disk, whatever happens
once       no key has two steps, before and after; a key whose step was on the disk keeps it
"""

import os
import random
import signal
import tempfile
import time
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.experts.helper import ROOT, Helper
from benchmarks.experts.survive_common import Verdict, until
from benchmarks.experts.survive_steps import UID, Trainers, WrappedTransport, counted
from tests.experts.crashing_disk import Crash, CrashingDisk
from torchweft.core.errors import UsageError
from torchweft.experts.checkpoint import FolderCheckpointStore
from torchweft.experts.client import GrpcTransport
from torchweft.experts.errors import UnreachableError
from torchweft.experts.wire import Call, Received
from torchweft.experts.wire.service import StepReceipt

KEYS = 1 << 17
_LONGEST = 0.1
_CONNECTED = 5.0  # seconds until the first answer of a new server is waited for no longer


class _Newest(WrappedTransport):
    """The transport to the server of now: a client may wait a while before it connects again, a new one not."""

    def __init__(self, address: str) -> None:
        super().__init__(GrpcTransport(address))

    def renew(self) -> None:
        """Connect again. Waiting calls are lost, and sent again under their keys."""
        old, self.inner = self.inner, GrpcTransport(self.address)
        old.close()

    def submit(self, call: Call, timeout: float) -> "Future[Received]":
        """See `Transport.submit`."""
        try:
            return self.inner.submit(call, timeout)
        except UsageError as error:  # closed just now
            raise UnreachableError(str(error)) from None


class Killing:
    """The helper that starts servers, the trainers, and the findings after every kill. A context manager."""

    def __init__(self, stack: ExitStack, python: str) -> None:
        self._folder = stack.enter_context(tempfile.TemporaryDirectory())
        given = {"root": str(ROOT), "folder": self._folder, "keys": KEYS}
        self._keeper = stack.enter_context(Helper("survive_keeper", given, python=python))
        self.kills = self.lost = self.repeated = self.forgotten = self.durable = 0
        self._safe: set[int] = set()
        self._draw = random.Random(11)
        self._looked = 0

    def run(self, most: int, seconds: float) -> Verdict:
        """Kill until it was done so often, or so many seconds have passed."""
        self._keeper.hear()
        address, end = "127.0.0.1:0", time.monotonic() + seconds
        trainers: Trainers | None = None
        transport: _Newest | None = None
        with ExitStack() as stack:
            while self.kills < most and time.monotonic() < end:
                found = self._keeper.ask({"start": address})
                address = found["address"]
                if trainers is None or transport is None:
                    transport = _Newest(address)
                    stack.callback(transport.close)
                    trainers = Trainers(transport, threads=2, most=KEYS)
                else:
                    transport.renew()
                told = len(trainers.heard)
                until(lambda trainers=trainers, told=told: len(trainers.heard) > told, _CONNECTED)
                time.sleep(self._draw.random() * _LONGEST)
                os.kill(found["pid"], signal.SIGKILL)
                self._keeper.ask({"reap": found["pid"]})
                self.kills += 1
                self._look(trainers)
            found = self._keeper.ask({"start": address})  # so that what is under way comes to its end
            if trainers is not None:
                trainers.stop()
            os.kill(found["pid"], signal.SIGKILL)
            self._keeper.ask({"reap": found["pid"]})
        assert trainers is not None
        self._look(trainers)
        good = not (self.lost or self.repeated or self.forgotten or trainers.faults)
        return Verdict(
            "SIGKILL of a server at random moments, and its restart",
            f"{self.kills}",
            "nothing durable lost, no key twice",
            f"{len(trainers.heard)} keys answered, {self.durable} steps durable; {self.lost} times behind what "
            f"was promised, {self.forgotten} safe keys gone, {self.repeated} keys twice, "
            f"{len(trainers.faults)} calls failed",
            good and bool(trainers.heard) and self.durable > 0,
        )

    def _look(self, trainers: Trainers) -> None:
        """Compare the disk with the answers to the trainers."""
        found = FolderCheckpointStore(self._folder).load_newest(UID)
        heard = list(trainers.heard)
        promised = max((each.receipt.durable or 0 for each in heard), default=0)
        step = -1 if found is None else found.step
        self.lost += step < promised
        if found is None:
            return
        weight: Tensor = found.state["module"]["weight"]
        count = counted(weight, found.step)
        self.repeated += count.repeated + (count.unexplained != 0)
        news = heard[self._looked :]
        self._looked = len(heard)
        self._safe |= {each.number for each in news if self._kept(each.receipt, each.step, news[-1].receipt, step)}
        self.forgotten += sum(bool(weight[number] != -1) for number in self._safe)
        self.durable = step

    @staticmethod
    def _kept(receipt: StepReceipt, at: int, last: StepReceipt, step: int) -> bool:
        """Whether an answer is of the server that was just killed, and its step on the disk."""
        return receipt.incarnation == last.incarnation and at <= step


def disk_crashes(seeds: int) -> Verdict:
    """A crash at every write, fsync, rename and removal. A random part of the unsynced data survives."""
    bad = runs = 0
    for keep in (1, 2):
        count = CrashingDisk()
        _save(count, keep)
        for crash_at in range(count.moments):
            for seed in range(seeds):
                disk = CrashingDisk(crash_at)
                promised = _save(disk, keep)
                after = disk.after_crash(random.Random(1000 * seed + crash_at))
                bad += _step_of(FolderCheckpointStore(Path("/data"), keep=keep, disk=after)) not in (
                    promised,
                    promised + 1,
                )
                runs += 1
    return Verdict(
        "a crash at every write, fsync, rename of a checkpoint",
        f"{runs}",
        "the old checkpoint or the new one, whole",
        f"{bad} times another",
        not bad,
    )


def _save(disk: CrashingDisk, keep: int) -> int:
    """Save four steps, as far as it goes; the last that was promised."""
    promised = 0
    try:
        store = FolderCheckpointStore(Path("/data"), keep=keep, disk=disk)
        for step in range(1, 5):
            state: dict[str, Any] = {"w": torch.full((5,), float(step)), "steps": step}
            store.save(UID, state, step, {"keys": [step]})
            promised = step
    except Crash:
        pass
    return promised


def _step_of(store: FolderCheckpointStore) -> int:
    """The step in all parts of the newest checkpoint; 0 without one; -1 if they differ."""
    found = store.load_newest(UID)
    if found is None:
        return 0
    told = {found.step, found.state["steps"], found.extra["keys"][0], *found.state["w"].long().tolist()}
    return found.step if len(told) == 1 else -1
