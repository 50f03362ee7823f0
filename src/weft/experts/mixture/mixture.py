"""Mixtures of remote experts as ordinary layers: a router here, and for each sample k experts out there.

    x ── router (proj) ──> scores ── top k of those that live ──> chosen       routing.py: no remote call
    x, chosen ── rows by expert ── one call each ──> answers                   mixture_function.py, fanout.py
    answers ── weights ── weighted mean ──> y                                  routing.py: plain autograd

Experts that fail or are late get weight zero, in forward and in backward, as long as each sample has its ``k_min``. The
contract, and the way of waiting, are those of hivemind's mixture (Ryabinin and Gusev, "Towards Crowdsourced Training
of Large Neural Networks using Decentralized Mixture-of-Experts", 2020); the second is after Fedus, Zoph and Shazeer,
"Switch Transformers" (2021).
"""

import time
from collections.abc import Sequence
from functools import partial
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.autograd import apply, graph_break
from weft.core.context import is_checkpointing, is_recomputing
from weft.core.errors import SpecError, UsageError
from weft.core.validation import Validator, is_number
from weft.experts.client.remote_function import RemoteLayer, forbid_tangents
from weft.experts.client.retry import Retry
from weft.experts.client.stub import IdempotencyKey, RequestBuilder
from weft.experts.client.transport import Connections
from weft.experts.compression import Policy
from weft.experts.mixture import routing
from weft.experts.mixture.fanout import CachedCall, ExpertPool, MixtureCall, MixtureOptions, MixtureStatistics
from weft.experts.mixture.mixture_function import MixtureCommit, MixtureFunction
from weft.experts.mixture.routing import Dispatch

RETRY = Retry(attempts=3)
"""A mixture has other experts to go on with, so it does not retry one for long."""


class RemoteMixtureOfExperts(RemoteLayer):
    """The weighted mean of the k best experts of a grid, for each sample.

    Args:
        in_features: size of the last axis of the first input, which the router reads.
        grid_size: places along each axis of the grid.
        uid_prefix: "ffn" for experts that are called "ffn.3.17".
        connections: to the experts, with the directory that lists the living ones. Stays open, and may be shared.
        k_best: experts for each sample; all that live, if they are fewer.
        k_min, backward_k_min: experts that must answer for each sample; in backward, of those that did in forward.
        forward_timeout, backward_timeout: seconds until the wait ends, in each direction.
        timeout_after_k_min: seconds to wait for the others once every sample has its ``k_min`` (or
            ``backward_k_min``) answers; what is not there then is cancelled. None waits until the timeout.
        detect_anomalies: raise on inputs and gradients that are not finite, and take rows of answers that are not
            as failed. It reads every number, which costs about as much as a copy.
        allow_zero_outputs: samples with fewer answers than they need are zero (in backward: add nothing to the
            inputs' gradients) instead of an error.
        retry: rule of retries; None: a call is sent three times at most.
        compression, client, keep_graph: as of `weft.RemoteExpert`.
        accumulate: gradients of backward add up at the experts until `commit`, which is one optimizer step of each.
        device, dtype: of the router.

    Every backward makes the experts that it reaches take an optimizer step (or add to their sums), also if no input
    wants a gradient; under `torch.no_grad` there is none. Autograd finds the experts through a parameter of one
    zero, ``anchor``: in `parameters`, not in `state_dict`. Freezing it freezes the experts, and freezing ``proj`` the
    router. Experts that are trained cannot be frozen where an input wants a gradient: their servers would step in that
    backward. A copy shares the connections, and has an open mini-batch of its own.

    Raises ``UsageError`` that lists all invalid arguments.

    Example:
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> with weft.Server([weft.ExpertBackend("ffn.0", nn.Linear(8, 8), args_schema=rows)]) as server:
        ...     connections = weft.Connections({"ffn.0": server.address})
        ...     sizes = {"in_features": 8, "grid_size": [3], "uid_prefix": "ffn"}
        ...     weft.RemoteMixtureOfExperts(**sizes, connections=connections)(torch.randn(4, 8)).sum().backward()
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
        counts, timeouts = (k_best, k_min, backward_k_min), (forward_timeout, backward_timeout, timeout_after_k_min)
        options = MixtureOptions(*counts, *timeouts, detect_anomalies, allow_zero_outputs)
        with Validator("invalid mixture options") as check:
            check.count("in_features", in_features)
            valid = routing.check_grid(check, uid_prefix, grid_size)
            check.instance("connections", connections, Connections, "Connections, made with Connections(directory)")
            options.check(check, prod(grid_size) if valid else None)
            check.instance("retry", retry, Retry, "a Retry", optional=True)
            check.instance("compression", compression, Policy, "a Policy, such as Policy('fp16')", optional=True)
            check.instance("client", client, str, "a name", optional=True)
            check.boolean("accumulate", accumulate)
            check.boolean("keep_graph", keep_graph)
            self._check(check)
        self.grid = routing.Grid(uid_prefix, grid_size)
        self.in_features, self.keep_graph = in_features, keep_graph
        self.proj = nn.Linear(in_features, sum(self.grid.sizes), device=device, dtype=dtype)
        self.make_anchor(self.proj.weight)
        requests = RequestBuilder(client, compression or Policy())
        self._client = ExpertPool(self.grid, connections, retry or RETRY, requests, options)
        self._batch = MixtureCommit(accumulate)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The mean of what the experts return, nested as they return it; each tensor is samples x ....

        ``input`` and all other arguments are what the experts take; axis 0 is the batch. The router reads ``input``
        (samples x ... x in_features), averaged over the axes between.

        Raises ``SpecError`` for arguments that the experts do not take, ``UsageError`` where trained experts are frozen
        here and an input wants a gradient, ``NoExpertsError``, ``TooFewAnswersError`` and ``AnomalyError``.
        """
        return graph_break(self._forward, (input, *args), kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call, flat = self._begin(args, kwargs)
        scores = self._scores(self._gating_input(args[0]))
        places, sizes, cached = call.live.places.to(scores.device), self.grid.sizes, call.cached
        chosen = routing.choose(scores, places, sizes, self.options.k_best) if cached is None else cached.chosen
        answers, alive = self._send(call, flat, chosen)
        weights = routing.weights_of_answered(routing.chosen_scores(scores, places, sizes, chosen), alive)
        return call.signature.outputs.pack([routing.weighted_mean(each, weights) for each in answers])

    def _check(self, check: Validator) -> None:
        """Check the arguments of a subclass, which has set them before."""

    @property
    def options(self) -> MixtureOptions:
        """How many answers are wanted, and how long they are waited for."""
        return self._client.options

    @property
    def accumulates(self) -> bool:
        """Whether gradients wait for `commit`."""
        return self._batch.accumulates

    def commit(self) -> dict[str, bool]:
        """One optimizer step of every expert that was touched since the last commit: whether it stepped, by uid.

        All are sent at once, within ``backward_timeout``. An expert steps with its whole sum or not at all: the sum is
        incomplete if one of its backwards failed or was late, or if its server was restarted in the middle.

        A mixture that allows missing answers (``backward_k_min`` below ``k_best``, or ``allow_zero_outputs``) goes on
        without those that are incomplete, or that do not commit in time: they are False, and their sums are given up.
        One must step, unless ``backward_k_min`` is 0 or zeros are allowed. Otherwise all must step.

        Raises ``UsageError`` without ``accumulate``; ``MixtureCommitError`` (a ``CommitError``), which lists all that
        are incomplete: before anything is sent, if too few sums are whole or a backward raised (then `discard`); and if
        too few have stepped: call `commit` again, which steps none of them twice; or `discard`.
        """
        if not self._batch.accumulates:
            raise UsageError(
                f"experts {self.grid.prefix}* of this mixture step at every backward, so there is nothing to commit; "
                "make it with accumulate"
            )
        return self._batch.commit(self._client)

    def discard(self) -> None:
        """Drop the gradients since the last commit, without waiting for the servers."""
        self._client.discard(self._batch.discard())

    @property
    def steps(self) -> dict[str, int]:
        """Optimizer steps of the experts that have answered, as of their last answers, by uid."""
        found = {uid: each.steps for uid, each in self._client.progress.copy().items()}
        return {uid: steps for uid, steps in found.items() if steps is not None}

    @property
    def durable_steps(self) -> dict[str, int | None]:
        """The last step of each that a crash of its server does not lose; None: unknown, or none."""
        return {uid: each.durable_step for uid, each in self._client.progress.copy().items()}

    @property
    def steps_lost(self) -> dict[str, int]:
        """Steps that servers of the experts came back without; each time there is a `StepsLostWarning`."""
        return {uid: each.steps_lost for uid, each in self._client.progress.copy().items() if each.steps_lost}

    def statistics(self) -> MixtureStatistics:
        """Figures since the mixture was made."""
        return self._client.counters.statistics(len(self._client.live()))

    def extra_repr(self) -> str:
        sizes = " x ".join(map(str, self.grid.sizes))
        return f"{self.grid.prefix}*, grid {sizes}, k_best={self.options.k_best}, k_min={self.options.k_min}"

    def _begin(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[MixtureCall, list[Tensor]]:
        """The call, and its flat inputs."""
        client, deadline = self._client, time.monotonic() + self.options.forward_timeout
        live = client.live()
        signature = client.signature(live, deadline)
        flat = signature.flat(args, kwargs)
        cached = client.cache.take(flat) if is_recomputing() else None
        if cached is None and not len(live) and not self.options.allow_zero_outputs:
            raise client.no_experts()
        return MixtureCall(signature, live if cached is None else cached.live, deadline, cached), flat

    def _gating_input(self, x: Tensor) -> Tensor:
        """What the router reads: the mean over all axes between, in the dtype and on the device of its weights."""
        if x.dim() < 2 or x.shape[-1] != self.in_features or not x.is_floating_point():
            raise SpecError(
                f"the router of this mixture reads samples x ... x {self.in_features} floating-point numbers, but the "
                f"input is {tuple(x.shape)} of {x.dtype}"
            )
        if x.dim() > 2:
            x = x.mean(dim=tuple(range(1, x.dim() - 1)))
        return x.to(self.proj.weight.device, self.proj.weight.dtype)

    def _scores(self, x: Tensor) -> Tensor:
        """samples x sum(grid_size), in the router's own precision: scores that are nearly equal decide."""
        with torch.autocast(x.device.type, enabled=False):
            return self.proj(x)

    def _send(
        self, call: MixtureCall, flat: Sequence[Tensor], chosen: Tensor, capacity: int | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """The flat outputs, each samples x k x ..., zeros without an answer, and which came (samples x k, bool)."""
        client, experts = self._client, f"experts {self.grid.prefix}*"
        dispatch = Dispatch(chosen.cpu(), capacity=capacity, most=call.signature.max_batch_size)
        if capacity is not None and call.cached is None:
            client.counters.count("dropped", chosen.numel() - len(dispatch.rows))
        forbid_tangents(experts, flat)
        anchor = self.anchor_for(f"{experts} are", call.signature.trained, flat)
        reached = [anchor, *flat]
        # A forward that will be recomputed is not the one that autograd walks back.
        wanted = torch.is_grad_enabled() and not is_checkpointing() and any(x.requires_grad for x in reached)
        key = partial(IdempotencyKey, self.keep_graph and wanted, not self.training)
        keys = {span: key() for span in dispatch.spans} if call.cached is None else call.cached.keys
        function = MixtureFunction(client, self._batch, call, dispatch, keys, flat, anchor)
        outputs = list(apply(function, reached))
        if is_checkpointing():
            answers = [x.detach() for x in outputs]
            client.cache.put(flat, CachedCall(call.live, chosen, function.alive, answers, keys))
        return outputs, function.alive.to(chosen.device)


class RemoteSwitchMixtureOfExperts(RemoteMixtureOfExperts):
    """As `RemoteMixtureOfExperts`, but an answer's weight is its probability among all living experts.

    Args:
        jitter_eps: in training mode, what the router reads is multiplied by uniform numbers from 1 - eps to 1 + eps.
            The experts get the input itself.
        capacity_factor: an expert gets at most ``capacity_factor * samples * k / experts`` rows (rounded up) of a
            batch; the choices beyond it are dropped, last choices first. None drops nothing.
        options: all arguments of `RemoteMixtureOfExperts`, of which ``k_best`` is 1 by default, ``k_min`` and
            ``backward_k_min`` are 0 and ``allow_zero_outputs`` is True: a sample whose expert fails is zero, so this is
            for a residual layer, ``x + mixture(x)[0]``.

    Example:
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> with weft.Server([weft.ExpertBackend("ffn.0", nn.Linear(8, 8), args_schema=rows)]) as server:
        ...     connections = weft.Connections({"ffn.0": server.address})
        ...     sizes = {"in_features": 8, "grid_size": [3], "uid_prefix": "ffn"}
        ...     outputs, loss = weft.RemoteSwitchMixtureOfExperts(**sizes, connections=connections)(torch.randn(4, 8))
    """

    def __init__(self, *, jitter_eps: float = 1e-2, capacity_factor: float | None = None, **options: Any) -> None:
        self.jitter_eps, self.capacity_factor = jitter_eps, capacity_factor  # first, for `_check`
        options = {"k_best": 1, "k_min": 0, "backward_k_min": 0, "allow_zero_outputs": True, **options}
        super().__init__(**options)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        """What the experts return, weighted, and the load-balancing loss: add it with a factor of about 0.01."""
        return super().forward(input, *args, **kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Tensor]:
        call, flat = self._begin(args, kwargs)
        live, cached = call.live, call.cached
        read = self._gating_input(args[0])
        if self.training and self.jitter_eps:
            read = read * torch.empty_like(read).uniform_(1 - self.jitter_eps, 1 + self.jitter_eps)
        scores = routing.all_scores(self._scores(read), live.places.to(read.device), self.grid.sizes)
        probabilities = scores.softmax(1)
        best = scores.detach().topk(min(self.options.k_best, len(live)), dim=1)
        chosen = best.indices if cached is None else cached.chosen
        capacity = None
        if self.capacity_factor is not None:
            capacity = max(1, ceil(self.capacity_factor * chosen.numel() / max(1, len(live))))
        answers, alive = self._send(call, flat, chosen, capacity)
        weights = probabilities.gather(1, chosen) * alive
        outputs = call.signature.outputs.pack([routing.weighted_mean(each, weights) for each in answers])
        return outputs, routing.load_balancing_loss(probabilities, chosen)

    def _check(self, check: Validator) -> None:
        jitter, factor = self.jitter_eps, self.capacity_factor
        valid = is_number(jitter) and 0 <= jitter < 1
        check.that(valid, f"jitter_eps is {jitter!r}, wanted a number from 0 to less than 1")
        valid = factor is None or (is_number(factor) and 0 < factor < float("inf"))
        check.that(valid, f"capacity_factor is {factor!r}, wanted a positive number, or None")
