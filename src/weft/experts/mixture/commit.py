"""One optimizer step of all experts that a mini-batch touched: they are asked at once, under one deadline.

    touched ── whole? ──┬── yes ── commit, sent again by the rule ──┬── stepped
                        └── no: torn, never applied                 └── failed
    too few whole, or too few stepped ──> MixtureCommitError, which names all that are not

A commit bears the name of its mini-batch, which is its idempotency key: sent again, it steps no second time.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weft.core.errors import listed
from weft.experts.client.stub import OpenMiniBatch
from weft.experts.errors import CommitError, GradientError, MixtureCommitError, StepError
from weft.experts.mixture.calls import Calls, Request
from weft.experts.mixture.gathering import Patience, gather
from weft.experts.mixture.minibatch import MiniBatch
from weft.experts.mixture.tally import Tally
from weft.experts.mixture.terms import Terms
from weft.experts.wire import Received

_GONE = (CommitError, GradientError, StepError)
"""After these the server has the sum no more."""


@dataclass(frozen=True)
class Committer:
    """What a commit works with."""

    calls: Calls
    terms: Terms
    tally: Tally
    batch: MiniBatch

    def commit(self) -> dict[str, bool]:
        """See `RemoteMixtureOfExperts.commit`."""
        touched, broken = self.batch.touched(), self.batch.broken
        wanted = self.terms.steps_wanted(len(touched))
        whole, torn = _parted(touched)
        if broken is not None or len(whole) < wanted:
            raise _not_whole(len(touched), torn, broken) from broken
        failed = self._ask(whole)
        for uid, fault in failed.items():
            if isinstance(fault, _GONE):
                touched[uid].failed(whole[uid][0], fault)
        faults = {**torn, **failed}
        stepped = {uid: each for uid, each in touched.items() if uid not in faults}
        self.batch.end(stepped)
        if len(stepped) < wanted:
            raise _not_stepped(len(touched), faults)
        self.batch.end(touched)
        self.calls.discard({uid: touched[uid] for uid in faults})
        self.tally.count("left_out", len(faults))
        return {uid: uid in stepped for uid in touched}

    def commit_parts(self, sums: Mapping[str, OpenMiniBatch]) -> None:
        """One step of each expert that was called several times in a backward which does not accumulate.

        One that lacks a part does not step, as one whose only call failed. Raises ``MixtureCommitError`` for one that
        does not step although it has all parts.
        """
        whole, torn = _parted(sums)
        failed = self._ask(whole)
        self.calls.discard({uid: sums[uid] for uid in (*torn, *failed)})
        if failed:
            head = f"backward of a mixture, sent in parts: {len(failed)} experts are not known to have stepped with it:"
            raise MixtureCommitError(_named(head, failed), failed)

    def _ask(self, whole: Mapping[str, tuple[str, int]]) -> dict[str, BaseException]:
        """Commit these names, at these incarnations. What went wrong, by expert."""
        if not whole:
            return {}
        uids, many = list(whole), len(whole)
        deadline = time.monotonic() + self.terms.backward_timeout
        requests = [
            Request(self.calls.requests.commit(uid, *whole[uid], self.calls.token(uid)), deadline) for uid in uids
        ]

        def accept(index: int, answer: Received) -> None:
            self.calls.accept(uids[index], answer)

        samples = [torch.tensor([index], device="cpu") for index in range(many)]  # for `gather`: each call has its own
        one = torch.ones(many, dtype=torch.int64, device="cpu")
        patience = Patience(deadline, None, lenient=True)
        gathered = gather(self.calls, requests, samples, one, patience, accept)
        self.tally.passed("commit", many, 0, gathered.faults.values())
        return {uids[index]: fault for index, fault in gathered.faults.items()}


def _parted(touched: Mapping[str, OpenMiniBatch]) -> tuple[dict[str, tuple[str, int]], dict[str, BaseException]]:
    """The names and incarnations of the sums that are whole, and what is wrong with the others."""
    whole: dict[str, tuple[str, int]] = {}
    torn: dict[str, BaseException] = {}
    for uid, each in touched.items():
        why = each.fault
        ready = None if why is not None else each.ready()
        if ready is None:
            torn[uid] = CommitError(why or "its backward has not come to an end")
        else:
            whole[uid] = ready
    return whole, torn


def _not_whole(touched: int, torn: Mapping[str, BaseException], broken: BaseException | None) -> MixtureCommitError:
    why = "" if broken is None else f" A backward of it ended with {type(broken).__name__}."
    head = (
        f"a mini-batch of a mixture is not whole, and nobody was asked to step.{why} Of {touched} experts {len(torn)} "
        "lack a part of their gradients. Call discard(), and run the mini-batch again."
    )
    return MixtureCommitError(_named(head, torn), torn)


def _not_stepped(touched: int, faults: Mapping[str, BaseException]) -> MixtureCommitError:
    again = "Call commit() again, which asks only those, and steps none of them twice; or discard(), to"
    advice = "Call discard(), to" if all(isinstance(each, _GONE) for each in faults.values()) else again
    head = (
        f"commit of a mixture: {len(faults)} of {touched} experts are not known to have stepped. {advice} go on "
        "without them."
    )
    return MixtureCommitError(_named(head, faults), faults)


def _named(head: str, faults: Mapping[str, BaseException]) -> str:
    lines = [f"{uid}: {type(error).__name__}: {error}" for uid, error in faults.items()]
    return listed(head, lines) if lines else head
