"""A mixture of remote experts as an ordinary layer: a router here, k experts for each sample out there.

    x ── router (proj) ──> scores ── top k of those that live ──> chosen       link.py, routing.py: no remote call
    x, chosen ── rows by expert ── one call each ──> answers                   dispatch.py, passage.py: one node
    answers ── softmax over those that came ── weighted mean ──> y             weighing.py: plain autograd

Who fails or is late gets weight zero, in forward and in backward, as long as each sample has its ``k_min``. The
contract, and the way of waiting, are those of hivemind's mixture (Ryabinin and Gusev, "Towards Crowdsourced Training
of Large Neural Networks using Decentralized Mixture-of-Experts", 2020).
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.ambient import is_checkpointing, is_recomputing
from weft.core.boundary import cross
from weft.core.errors import SpecError, UsageError
from weft.core.untraced import untraced
from weft.experts.client.autograd import RemoteLayer, forbid_tangents
from weft.experts.client.connections import Connections
from weft.experts.client.retry import Retry
from weft.experts.compression import Policy
from weft.experts.mixture.arguments import mixture_faults
from weft.experts.mixture.commit import Committer
from weft.experts.mixture.dispatch import Dispatch
from weft.experts.mixture.grid import Crowd, Grid
from weft.experts.mixture.layout import Layout
from weft.experts.mixture.link import Link
from weft.experts.mixture.minibatch import MiniBatch
from weft.experts.mixture.passage import Means, Passage
from weft.experts.mixture.recall import Round
from weft.experts.mixture.routing import choose, chosen_scores
from weft.experts.mixture.tally import MixtureStatistics
from weft.experts.mixture.terms import Terms, refuse
from weft.experts.mixture.weighing import gating_input, weighted_mean, weights_of_answered

RETRY = Retry(attempts=3)
"""A mixture has other experts to go on with, so it does not try one for long."""


class RemoteMixtureOfExperts(RemoteLayer):
    """The weighted mean of the k best experts of a grid, for each sample.

    Args:
        in_features: size of the last axis of the first input, which the router reads.
        grid_size: places along each axis of the grid.
        uid_prefix: "ffn" for experts that are called "ffn.3.17".
        connections: the way to the experts, with the directory that says who lives. Stays open, and may be shared.
        k_best: experts for each sample; all that live, if those are fewer.
        k_min: experts that must answer for each sample.
        forward_timeout, backward_timeout: seconds after which nobody is waited for any more, in each direction. The
            first forward also asks what the experts take, within the same time.
        timeout_after_k_min: seconds to wait for the others once every sample has its ``k_min`` (or
            ``backward_k_min``) answers; what is not there then is cancelled. None waits until the timeout.
        backward_k_min: experts that must answer in backward for each sample, of those that did in forward.
        detect_anomalies: raise on inputs and gradients that are not finite, and take rows of answers that are not
            as failed. It reads every number, which costs about as much as a copy.
        allow_zero_outputs: samples with fewer answers than they need are zero (in backward: add nothing to the
            inputs' gradients) instead of an error.
        retry: when calls that failed are sent again; None: a call is sent three times at most. A backward or commit
            bears a key, and so steps once however often.
        compression: of what is sent and answered.
        accumulate: gradients of backward add up at the experts until `commit`, which is one optimizer step of each.
            For mini-batches that are cut into micro-batches (in a `weft.Pipe`, or by hand). ``False``: every backward
            steps.
        keep_graph: ask the servers to keep the graph of a forward for its backward, where they allow that.
        client: what servers know this caller by, for quotas; a name of this mixture by default.
        device, dtype: of the router.

    Every backward makes the experts that it reaches take an optimizer step (or add to their sums), also if no input
    wants a gradient; under `torch.no_grad` there is none. What autograd finds the experts by is a parameter of one
    zero, ``anchor``: in `parameters`, not in `state_dict`. Freezing it freezes the experts, and freezing ``proj`` the
    router; ``requires_grad_(False)`` does both. Experts that are trained cannot be frozen where an input wants a
    gradient: their servers would step in that backward.

    A group of rows beyond an expert's largest batch goes in several calls. Of an expert with replicas, only the owner
    is let step, and is looked for until the timeout.

    A copy shares the connections, and has an open mini-batch of its own.

    Raises ``UsageError`` that lists all arguments that make no sense.
    """

    def __init__(
        self,
        *,
        in_features: int,
        grid_size: Sequence[int],
        uid_prefix: str,
        connections: Connections,
        k_best: int = 4,
        k_min: int = 1,
        forward_timeout: float = 30.0,
        timeout_after_k_min: float | None = None,
        backward_k_min: int = 1,
        backward_timeout: float = 30.0,
        detect_anomalies: bool = False,
        allow_zero_outputs: bool = False,
        retry: Retry | None = None,
        compression: Policy | None = None,
        accumulate: bool = False,
        keep_graph: bool = False,
        client: str = "",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        terms: dict[str, Any] = {
            "k_best": k_best,
            "k_min": k_min,
            "backward_k_min": backward_k_min,
            "forward_timeout": forward_timeout,
            "backward_timeout": backward_timeout,
            "timeout_after_k_min": timeout_after_k_min,
            "detect_anomalies": detect_anomalies,
            "allow_zero_outputs": allow_zero_outputs,
        }
        given: dict[str, Any] = {"in_features": in_features, "grid_size": grid_size, "uid_prefix": uid_prefix}
        given |= {"connections": connections, "retry": retry, "compression": compression, "client": client}
        given |= {"accumulate": accumulate, "keep_graph": keep_graph}
        refuse([*mixture_faults({**given, **terms}), *self._faults()])
        self.grid, self.terms = Grid(uid_prefix, grid_size), Terms(**terms)
        self.in_features, self.keep_graph = in_features, keep_graph
        self.proj = nn.Linear(in_features, sum(self.grid.sizes), device=device, dtype=dtype)
        self.make_anchor(self.proj.weight)
        self._link = Link(self.grid, connections, retry or RETRY, compression or Policy(), client)
        self._batch = MiniBatch(accumulate)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The mean of what the experts return, nested as they return it; each tensor is samples x ....

        ``input`` and all other arguments are what the experts take; axis 0 is the batch. The router reads ``input``
        (samples x ... x in_features), averaged over the axes between.

        Raises ``SpecError`` for arguments that the experts do not take, ``UsageError`` where trained experts are frozen
        here and an input wants a gradient, ``NoExpertsError``, ``TooFewAnswersError`` and ``AnomalyError``; see
        `weft.experts.errors`.
        """
        return untraced(self._forward, (input, *args), kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        deadline = time.monotonic() + self.terms.forward_timeout
        layout, flat, before, crowd = self._begin(args, kwargs, deadline)
        scores = self._scores(self._readable(args[0]))
        places, sizes = crowd.places.to(scores.device), self.grid.sizes
        chosen = choose(scores, places, sizes, self.terms.k_best) if before is None else before.chosen
        dispatch = Dispatch(chosen.cpu(), most=layout.most_rows)
        answers, alive = self._ask(layout, flat, dispatch, Round(crowd, chosen, dispatch.sent, ()), before, deadline)
        weights = weights_of_answered(chosen_scores(scores, places, sizes, chosen), alive)
        return layout.outputs.pack([weighted_mean(each, weights) for each in answers])

    def _faults(self) -> list[str]:
        """What is wrong with the arguments of a class that is made of this one, and has set them before."""
        return []

    @property
    def accumulates(self) -> bool:
        """Whether gradients wait for `commit`."""
        return self._batch.accumulates

    def commit(self) -> dict[str, bool]:
        """One optimizer step of every expert that was touched since the last commit: whether it stepped, by uid.

        All are asked at once, within ``backward_timeout``. An expert steps with its whole sum or not at all: it is
        torn if one of its backwards failed or was not waited for, or if its server was started again in the middle.

        A mixture that puts up with missing answers (``backward_k_min`` below ``k_best``, or ``allow_zero_outputs``)
        goes on without those that are torn, or that do not commit in time: they are False, and their sums are given
        up. Somebody must step, unless ``backward_k_min`` is 0 or zeros are allowed.
        Otherwise (``backward_k_min`` is ``k_best``) all must step, as all must answer.

        Raises ``UsageError`` without ``accumulate``. Raises ``MixtureCommitError`` (a ``CommitError``), which lists
        all that are torn, before anybody is asked: if too few sums are whole, or if a backward raised; call `discard`,
        and run the mini-batch again. Raises it also if too few have stepped; call `commit` again, which asks only the
        others, and steps none of them twice; or `discard`.
        """
        if not self._batch.accumulates:
            raise UsageError(
                f"experts {self.grid.prefix}* of this mixture step at every backward, so there is nothing to commit; "
                "make it with accumulate"
            )
        return Committer(self._link.calls, self.terms, self._link.tally, self._batch).commit()

    def discard(self) -> None:
        """Forget the gradients since the last commit. The servers are told, but not waited for; one that does not
        hear of it drops them after a while."""
        self._link.calls.discard(self._batch.discard())

    @property
    def steps(self) -> dict[str, int]:
        """Optimizer steps of the experts that have answered, as of their last answers, by uid."""
        found = {uid: each.steps for uid, each in self._link.calls.progress.copy().items()}
        return {uid: steps for uid, steps in found.items() if steps is not None}

    @property
    def durable_steps(self) -> dict[str, int | None]:
        """The last step of each that a crash of its server does not lose; None: not known, or none."""
        return {uid: each.durable_step for uid, each in self._link.calls.progress.copy().items()}

    @property
    def steps_lost(self) -> dict[str, int]:
        """Steps that servers of the experts came back without; each time there is a `StepsLostWarning`."""
        return {uid: each.steps_lost for uid, each in self._link.calls.progress.copy().items() if each.steps_lost}

    def statistics(self) -> MixtureStatistics:
        """What was done so far."""
        return self._link.tally.statistics(len(self._link.crowd()))

    def extra_repr(self) -> str:
        """What `repr` says besides the router."""
        sizes = " x ".join(map(str, self.grid.sizes))
        return f"{self.grid.prefix}*, grid {sizes}, k_best={self.terms.k_best}, k_min={self.terms.k_min}"

    def _begin(
        self, args: Sequence[Any], kwargs: dict[str, Any], deadline: float
    ) -> tuple[Layout, list[Tensor], Round | None, Crowd]:
        """The layout, the flat inputs, what is recalled if this is a recomputation, and who lives (or lived then)."""
        link = self._link
        crowd = link.crowd()
        layout = link.layout(crowd, deadline)
        flat = layout.signature.flat(args, kwargs)
        before = link.recall.take(flat) if is_recomputing() else None
        if before is None and not len(crowd) and not self.terms.allow_zero_outputs:
            raise link.nobody()
        return layout, flat, before, crowd if before is None else before.crowd

    def _readable(self, x: Tensor) -> Tensor:
        """What the router reads of the input, in the dtype and on the device of its weights."""
        if x.dim() < 2 or x.shape[-1] != self.in_features or not x.is_floating_point():
            raise SpecError(
                f"the router of this mixture reads samples x ... x {self.in_features} floating-point numbers, but the "
                f"input is {tuple(x.shape)} of {x.dtype}"
            )
        return gating_input(x).to(self.proj.weight.device, self.proj.weight.dtype)

    def _scores(self, x: Tensor) -> Tensor:
        """samples x sum(grid_size), in the router's own precision: what is nearly equal decides who is called."""
        with torch.autocast(x.device.type, enabled=False):
            return self.proj(x)

    def _ask(
        self,
        layout: Layout,
        flat: Sequence[Tensor],
        dispatch: Dispatch,
        now: Round,
        before: Round | None,
        deadline: float,
    ) -> tuple[list[Tensor], Tensor]:
        """The flat outputs, each samples x k x ..., zeros where nobody answered, and who did (samples x k, bool).

        ``before`` is what was found in the forward of which this is the recomputation, else ``now`` is begun, and
        ends by ``deadline``.
        """
        link = self._link
        who = f"experts {self.grid.prefix}*"
        forbid_tangents(who, flat)
        anchor = self.anchor_for(f"{who} are", layout.signature.trained, flat)
        reached = [anchor, *flat]
        keep_graph = self.keep_graph and any(x.requires_grad for x in reached)
        means = Means(
            link.calls, layout, self.terms, link.tally, self._batch, anchor, keep_graph, evaluation=not self.training
        )
        passage = Passage(means, now.crowd.uids, dispatch, flat, deadline, before)
        outputs = list(cross(passage, reached))
        if is_checkpointing():
            kept = [x.detach() for x in outputs]
            link.recall.put(flat, Round(now.crowd, now.chosen, passage.alive, kept, passage.keys))
        return outputs, passage.alive.to(now.chosen.device)
