"""Mini-batch of a mixture: for each expert that was called, the gradients that wait for `commit`; and the commit.

    backward ── A: added   B: added ────┐
    backward ── A: added   C: failed ───┼── commit: A and B step at once; C lacks rows, and is never applied
    backward ── raised ─────────────────┘── then none of it is whole: discard, and run it again

The sum of each expert has a name of its own, and lives at its server, which is told of those that are given up. A
commit bears that name as its idempotency key: sent again, it steps no second time.
"""

import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch

from weft.core.errors import listed
from weft.experts.client.stub import OpenMiniBatch
from weft.experts.errors import CommitError, GradientError, MixtureCommitError, StepError
from weft.experts.mixture.fanout import ExpertCall, FanOut, GridClient, faults_of
from weft.experts.wire import Received

_GONE = (CommitError, GradientError, StepError)
"""After these the server has the sum no more."""


class MixtureMiniBatch:
    """The open mini-batches of a mixture's experts. ``broken``: what a backward raised. Thread-safe."""

    def __init__(self, accumulates: bool) -> None:
        self.accumulates = accumulates
        self.broken: BaseException | None = None
        self._lock = threading.Lock()
        self._open: dict[str, OpenMiniBatch] = {}

    def open(self, uid: str) -> OpenMiniBatch:
        """The mini-batch of an expert, which from now on is touched."""
        with self._lock:
            if uid not in self._open:
                self._open[uid] = OpenMiniBatch(uid)
            return self._open[uid]

    def touched(self) -> dict[str, OpenMiniBatch]:
        """The mini-batches that a commit would apply, by expert."""
        with self._lock:
            return dict(self._open)

    @contextmanager
    def backward(self) -> Generator[None]:
        """One backward: an error out of it breaks the mini-batch."""
        try:
            yield
        except BaseException as error:
            if self.accumulates:
                with self._lock:
                    self.broken = self.broken or error
            raise

    def end(self, ended: Mapping[str, OpenMiniBatch]) -> None:
        """These were committed, or are given up."""
        with self._lock:
            for uid, each in ended.items():
                if self._open.get(uid) is each:
                    del self._open[uid]

    def discard(self) -> dict[str, OpenMiniBatch]:
        """Give all up, and return them."""
        with self._lock:
            given_up, self._open, self.broken = self._open, {}, None
            return given_up

    def commit(self, client: GridClient) -> dict[str, bool]:
        """See `RemoteMixtureOfExperts.commit`."""
        touched, broken = self.touched(), self.broken
        wanted = client.options.steps_wanted(len(touched))
        whole, incomplete = _parted(touched)
        if broken is not None or len(whole) < wanted:
            why = "" if broken is None else f" A backward of it ended with {type(broken).__name__}."
            head = (
                f"a mini-batch of a mixture is not whole, and no expert was told to step.{why} Of {len(touched)} "
                f"experts {len(incomplete)} lack a part of their gradients. Call discard(), and run it again."
            )
            raise _error(head, incomplete) from broken
        failed = _send(client, touched, whole)
        for uid, fault in failed.items():
            if isinstance(fault, _GONE):
                touched[uid].failed(fault)
        faults = {**incomplete, **failed}
        stepped = {uid: each for uid, each in touched.items() if uid not in faults}
        self.end(stepped)
        if len(stepped) < wanted:
            head = (
                f"commit of a mixture: {len(faults)} of {len(touched)} experts are not known to have stepped. Call "
                "discard(), to go on without them; or commit() again, which steps none of the others twice."
            )
            raise _error(head, faults)
        self.end(touched)
        client.discard({uid: touched[uid] for uid in faults})
        client.counters.count("left_out", len(faults))
        return {uid: uid in stepped for uid in touched}

    def __deepcopy__(self, memo: object) -> "MixtureMiniBatch":
        return MixtureMiniBatch(self.accumulates)


def commit_parts(client: GridClient, parts: Mapping[str, OpenMiniBatch]) -> None:
    """One step of each expert that was called several times in a backward which does not accumulate.

    One that lacks a part does not step. Raises ``MixtureCommitError`` for one that has all, and does not step either.
    """
    whole, incomplete = _parted(parts)
    failed = _send(client, parts, whole)
    client.discard({uid: parts[uid] for uid in (*incomplete, *failed)})
    if failed:
        head = f"backward of a mixture, sent in parts: {len(failed)} experts are not known to have stepped with it:"
        raise _error(head, failed)


def _send(
    client: GridClient, touched: Mapping[str, OpenMiniBatch], whole: Mapping[str, int]
) -> dict[str, BaseException]:
    """Commit those that are whole, at these incarnations, all at once. Returns faults by expert."""
    if not whole:
        return {}

    def called(number: int, uid: str) -> ExpertCall:
        token = client.resolver(uid).token()
        call = client.requests.commit(uid, touched[uid].name, whole[uid], token)

        def accept(answer: Received) -> None:
            client.accept(uid, answer)

        return ExpertCall(call, torch.tensor([number], device="cpu"), accept)  # each call has its own sample

    calls = [called(number, uid) for number, uid in enumerate(whole)]
    needed = torch.ones(len(calls), dtype=torch.int64, device="cpu")
    FanOut(client, calls, needed, deadline=time.monotonic() + client.options.backward_timeout).run()
    faults = faults_of(calls)
    client.counters.fanned_out("commit", len(calls), 0, faults.values())
    return faults


def _parted(touched: Mapping[str, OpenMiniBatch]) -> tuple[dict[str, int], dict[str, BaseException]]:
    """The incarnations of the mini-batches that are whole, and what is wrong with the others."""
    whole: dict[str, int] = {}
    incomplete: dict[str, BaseException] = {}
    for uid, each in touched.items():
        if why := each.fault:
            incomplete[uid] = CommitError(why)
        elif (incarnation := each.ready()) is not None:
            whole[uid] = incarnation
        else:
            incomplete[uid] = CommitError("its backward has not come to an end")
    return whole, incomplete


def _error(head: str, faults: Mapping[str, BaseException]) -> MixtureCommitError:
    lines = [f"{uid}: {type(error).__name__}: {error}" for uid, error in faults.items()]
    return MixtureCommitError(listed(head, lines), faults)
