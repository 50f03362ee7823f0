"""The mini-batch that a mixture is in the middle of: for each expert that was touched, the sum that waits for `commit`.

    backward ── A: added   B: added ────┐
    backward ── A: added   C: failed ───┼── commit: A and B step at once; C's sum lacks rows, and is never applied
    backward ── raised ─────────────────┘── then none of it is whole: discard, and run it again

Each sum has a name of its own, and lives at its expert's server, which is told of those that are given up. What is
torn, and what follows from it, is said at `RemoteMixtureOfExperts.commit`.
"""

import threading
from collections.abc import Mapping

from weft.experts.client.stub import OpenMiniBatch


class MiniBatch:
    """The open sums of a mixture. Thread-safe: its micro-batches may come from several threads.

    A copy of the mixture begins with none.
    """

    def __init__(self, accumulates: bool) -> None:
        self.accumulates = accumulates
        self._lock = threading.Lock()
        self._sums: dict[str, OpenMiniBatch] = {}
        self._broken: BaseException | None = None

    @property
    def broken(self) -> BaseException | None:
        """What a backward raised; then all sums lack what it would have added."""
        return self._broken

    def addition(self) -> "Addition":
        """For the calls of one backward."""
        return Addition(self)

    def open(self, uid: str) -> OpenMiniBatch:
        """The sum of an expert, which from now on is touched."""
        with self._lock:
            if uid not in self._sums:
                self._sums[uid] = OpenMiniBatch(uid)
            return self._sums[uid]

    def touched(self) -> dict[str, OpenMiniBatch]:
        """The sums that a commit would apply, by expert."""
        with self._lock:
            return dict(self._sums)

    def breaks(self, error: BaseException) -> None:
        """A backward was raised out of."""
        with self._lock:
            self._broken = self._broken or error

    def end(self, sums: Mapping[str, OpenMiniBatch]) -> None:
        """These were committed, or are given up."""
        with self._lock:
            for uid, each in sums.items():
                if self._sums.get(uid) is each:
                    del self._sums[uid]

    def discard(self) -> dict[str, OpenMiniBatch]:
        """All are given up; what they were."""
        with self._lock:
            given_up, self._sums, self._broken = self._sums, {}, None
            return given_up

    def __deepcopy__(self, memo: object) -> "MiniBatch":
        return MiniBatch(self.accumulates)


class Addition:
    """What the calls of one backward add to the sums, as a context manager: an error out of it breaks the mini-batch.

    Without accumulation, calls step by themselves; but several calls of one expert add to a sum of their own, in
    ``parts`` by expert, which is to be committed when they are all answered.
    """

    def __init__(self, batch: MiniBatch) -> None:
        self.parts: dict[str, OpenMiniBatch] = {}
        self._batch = batch
        self._sums: list[OpenMiniBatch | None] = []
        self._added: set[int] = set()

    def begin(self, uid: str, *, split: bool = False) -> str:
        """The name for the next call, one of several of its expert if ``split``; empty: the expert is to step."""
        one = None
        if self._batch.accumulates:
            one = self._batch.open(uid)
        elif split:
            one = self.parts.setdefault(uid, OpenMiniBatch(uid))
        self._sums.append(one)
        return "" if one is None else one.name

    def added(self, index: int, incarnation: int) -> None:
        """Call ``index`` was answered: its gradient was added at this incarnation of the server."""
        one = self._sums[index]
        if one is not None:
            one.added(one.name, incarnation)
            self._added.add(index)

    def failed(self, faults: Mapping[int, BaseException]) -> None:
        """What went wrong, by call. Of a call that was answered, it is the answer that was not to be used."""
        for index, fault in faults.items():
            one = self._sums[index]
            if one is not None and index not in self._added:
                one.failed(one.name, fault)

    def __enter__(self) -> "Addition":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._batch.accumulates:
            self._batch.breaks(error)
