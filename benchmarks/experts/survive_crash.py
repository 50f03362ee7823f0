"""Crashes: a server process killed at random moments, and a disk that stops at each of its operations.

trainers ── keys ──> server ── checkpoints ──> disk        SIGKILL ── compare the disk with answers ── new server ...

promised   the largest step that an answer reported as durable must be on the disk
once       no key has two steps, and a key whose step was on the disk keeps it after a restart
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
_CONNECTED = 5.0  # longest wait in seconds for the first answer of a new server


class _RenewableTransport(WrappedTransport):
    """Transport that can be replaced after a restart, because an old one delays its next connection."""

    def __init__(self, address: str) -> None:
        super().__init__(GrpcTransport(address))

    def renew(self) -> None:
        """Reconnect. Pending calls are lost, and their callers repeat them with the same keys."""
        old, self.inner = self.inner, GrpcTransport(self.address)
        old.close()

    def submit(self, call: Call, timeout: float) -> "Future[Received]":
        """See `Transport.submit`."""
        try:
            return self.inner.submit(call, timeout)
        except UsageError as error:  # closed by a concurrent renew()
            raise UnreachableError(str(error)) from None


class Killing:
    """Helper that starts servers, and the counts of violations that were found after each kill."""

    def __init__(self, stack: ExitStack, python: str) -> None:
        self._folder = stack.enter_context(tempfile.TemporaryDirectory())
        options = {"root": str(ROOT), "folder": self._folder, "keys": KEYS}
        self._keeper = stack.enter_context(Helper("survive_keeper", options, python=python))
        self.kills = self.lost = self.repeated = self.forgotten = self.durable = 0
        self._safe: set[int] = set()
        self._draw = random.Random(11)
        self._checked = 0

    def run(self, most: int, seconds: float) -> Verdict:
        """Kill servers, `most` times or until `seconds` have passed."""
        self._keeper.hear()
        address, end = "127.0.0.1:0", time.monotonic() + seconds
        trainers: Trainers | None = None
        transport: _RenewableTransport | None = None
        with ExitStack() as stack:
            while self.kills < most and time.monotonic() < end:
                started = self._keeper.ask({"start": address})
                address = started["address"]
                if trainers is None or transport is None:
                    transport = _RenewableTransport(address)
                    stack.callback(transport.close)
                    trainers = Trainers(transport, threads=2, most=KEYS)
                else:
                    transport.renew()
                before = len(trainers.heard)
                until(lambda trainers=trainers, before=before: len(trainers.heard) > before, _CONNECTED)
                time.sleep(self._draw.random() * _LONGEST)
                os.kill(started["pid"], signal.SIGKILL)
                self._keeper.ask({"reap": started["pid"]})
                self.kills += 1
                self._check(trainers)
            started = self._keeper.ask({"start": address})  # lets pending calls finish
            if trainers is not None:
                trainers.stop()
            os.kill(started["pid"], signal.SIGKILL)
            self._keeper.ask({"reap": started["pid"]})
        assert trainers is not None
        self._check(trainers)
        good = not (self.lost or self.repeated or self.forgotten or trainers.faults)
        return Verdict(
            "SIGKILL of a server at random moments, then a restart",
            f"{self.kills}",
            "no durable step lost, no key twice",
            f"{len(trainers.heard)} keys answered, {self.durable} steps durable; {self.lost} promised steps "
            f"lost, {self.forgotten} durable keys lost, {self.repeated} keys twice, "
            f"{len(trainers.faults)} calls failed",
            good and bool(trainers.heard) and self.durable > 0,
        )

    def _check(self, trainers: Trainers) -> None:
        """Compare the newest checkpoint with the answers that trainers received."""
        checkpoint = FolderCheckpointStore(self._folder).load_newest(UID)
        heard = list(trainers.heard)
        promised = max((applied.receipt.durable or 0 for applied in heard), default=0)
        step = -1 if checkpoint is None else checkpoint.step
        self.lost += step < promised
        if checkpoint is None:
            return
        weight: Tensor = checkpoint.state["module"]["weight"]
        count = counted(weight, checkpoint.step)
        self.repeated += count.repeated + (count.unexplained != 0)
        new = heard[self._checked :]
        self._checked = len(heard)
        self._safe |= {key.number for key in new if self._durable_in(key.receipt, key.step, new[-1].receipt, step)}
        self.forgotten += sum(bool(weight[number] != -1) for number in self._safe)
        self.durable = step

    @staticmethod
    def _durable_in(receipt: StepReceipt, at: int, last: StepReceipt, step: int) -> bool:
        """Whether an answer came from the killed server, and the checkpoint includes its step."""
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
        "a crash at every write, fsync and rename of a checkpoint",
        f"{runs}",
        "the old checkpoint or the new one, complete",
        f"{bad} other states",
        not bad,
    )


def _save(disk: CrashingDisk, keep: int) -> int:
    """Save four steps until the disk crashes. Return the last step whose save() returned."""
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
    """Step of the newest checkpoint: 0 without one, -1 if its parts have different steps."""
    checkpoint = store.load_newest(UID)
    if checkpoint is None:
        return 0
    state = checkpoint.state
    steps = {checkpoint.step, state["steps"], checkpoint.extra["keys"][0], *state["w"].long().tolist()}
    return checkpoint.step if len(steps) == 1 else -1
