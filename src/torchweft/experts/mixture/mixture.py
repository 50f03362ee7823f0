"""Mixtures of remote experts as ordinary layers: a local router, and for each sample k remote experts.

    x ── router (proj) ──> scores ── top k of the living experts ──> chosen    routing.py: no remote call
    x, chosen ── rows by expert ── one call each ──> answers                   mixture_function.py, fanout.py
    answers ── weights ── weighted mean ──> y                                  routing.py: plain autograd

A sum over `RemoteExpert` layers would fail with the first expert that fails. Here experts that fail or are late get
weight zero, in forward and in backward, as long as each sample has its ``k_min`` answers. The contract and the rule of
waiting are those of hivemind's mixture (Ryabinin and Gusev, 2020). The second class follows Fedus, Zoph and Shazeer,
"Switch Transformers" (2021).
"""

import time
from collections.abc import Sequence
from functools import partial
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.core.autograd import apply_as_node, graph_break
from torchweft.core.context import is_checkpointing, is_recomputing
from torchweft.core.errors import SpecError, UsageError
from torchweft.core.validation import Validator, is_number
from torchweft.experts.client.connections import Connections
from torchweft.experts.client.layer import RemoteLayer
from torchweft.experts.client.remote import choose_anchor, reject_tangents
from torchweft.experts.client.retry import Retry
from torchweft.experts.client.stub import IdempotencyKey, RequestBuilder
from torchweft.experts.compression import Policy
from torchweft.experts.mixture import routing
from torchweft.experts.mixture.fanout import CachedCall, ExpertPool, MixtureCall, MixtureOptions, MixtureStatistics
from torchweft.experts.mixture.mixture_function import MixtureCommit, MixtureFunction
from torchweft.experts.mixture.routing import Dispatch

RETRY = Retry(attempts=3)  # The default rule. It is short, because a mixture can continue with other experts.


class RemoteMixtureOfExperts(RemoteLayer):
    """The weighted mean of the k best experts of a grid, for each sample.

    Args:
        in_features: size of the last axis of the first input, which the router reads.
        grid_size: places along each axis of the grid.
        uid_prefix: "ffn" for experts with names like "ffn.3.17".
        connections: to the experts, with the directory that lists the living ones. Can be shared; is not closed.
        k_best: experts for each sample, or all living experts if they are fewer.
        k_min, backward_k_min: answers that each sample needs; in backward, from experts that answered in forward.
        forward_timeout, backward_timeout: longest wait in each direction, in seconds.
        timeout_after_k_min: seconds to wait for further answers after every sample has its ``k_min`` (or
            ``backward_k_min``) answers. The remaining calls are then cancelled. None waits until the timeout.
        detect_anomalies: raise for inputs and gradients that are not finite, and treat such rows of answers as failed.
            It reads all values, which costs about as much as a copy.
        allow_zero_outputs: samples with too few answers are zero (in backward: add nothing to the inputs' gradients)
            instead of an error.
        retry: rule for retries. None: a call is sent at most three times.
        compression, client, keep_graph: see `weft.RemoteExpert`.
        accumulate: gradients of backward add up at the experts until `commit`, which is one optimizer step of each.
        device, dtype: of the router.

    In every backward the experts that it reaches take an optimizer step (or add to their sums), even if no input
    requires a gradient, but not under `torch.no_grad`. Autograd reaches the experts through the parameter ``anchor``, a
    single zero, which is in `parameters`, not in `state_dict`. Freezing it freezes the experts, unless an input
    requires a gradient; freezing ``proj`` freezes the router. A copy shares the connections, but not the open
    mini-batch.

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
            self._check_arguments(check)
        self.grid = routing.Grid(uid_prefix, grid_size)
        self.in_features, self.keep_graph = in_features, keep_graph
        self.proj = nn.Linear(in_features, sum(self.grid.sizes), device=device, dtype=dtype)
        self.make_anchor(self.proj.weight)
        requests = RequestBuilder(client, compression or Policy())
        self._client = ExpertPool(self.grid, connections, retry or RETRY, requests, options)
        self._batch = MixtureCommit(accumulate)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The weighted mean of the experts' results, with their nesting. Each tensor is samples x ....

        ``input`` and all other arguments go to the experts; axis 0 is the batch. The router reads ``input`` (samples x
        ... x in_features), averaged over the axes in between.
        """
        return graph_break(self._forward, (input, *args), kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call, flat = self._prepare_call(args, kwargs)
        scores = self._router_scores(self._gating_input(args[0]))
        # A recomputation keeps the choice of its forward: the router can round otherwise, and experts can have come or
        # gone.
        places, sizes, cached, k = call.live.places.to(scores.device), self.grid.sizes, call.cached, self.options.k_best
        chosen = routing.choose_experts(scores, places, sizes, k) if cached is None else cached.chosen
        answers, alive = self._call_experts(call, flat, chosen)
        weights = routing.weights_of_answered(routing.chosen_scores(scores, places, sizes, chosen), alive)
        return call.signature.outputs.pack([routing.weighted_mean(answer, weights) for answer in answers])

    def _check_arguments(self, check: Validator) -> None:
        """Check the arguments of a subclass, which has set them before."""

    @property
    def options(self) -> MixtureOptions:
        return self._client.options

    @property
    def accumulates(self) -> bool:
        return self._batch.accumulates

    def commit(self) -> dict[str, bool]:
        """Take one optimizer step of every expert that has gradients. Returns by uid whether it stepped.

        An expert steps with its complete sum or not at all. The sum is incomplete if one of its backwards failed or was
        late, or if its server was restarted in between. A mixture that allows missing answers (``backward_k_min`` below
        ``k_best``, or ``allow_zero_outputs``) continues without experts whose sum is incomplete, or that do not commit
        in time. Their result is False and their sums are dropped. One must step, unless ``backward_k_min`` is 0 or
        zeros are allowed. Otherwise all must step.

        Raises ``MixtureCommitError`` before anything is sent if too few sums are complete or a backward raised. Call
        `discard` then. Raises it after sending if too few have stepped. Call `commit` again then, which steps none
        twice, or `discard`.
        """
        if not self._batch.accumulates:
            raise UsageError(
                f"experts {self.grid.prefix}* of this mixture step at every backward, so there is nothing to commit; "
                "make it with accumulate=True"
            )
        if self.options.steps_wanted(2) > 1:  # all must step, so all are asked before the first one does
            self.prepare_commit()
        return self.apply_commit()

    def prepare_commit(self) -> None:
        self._batch.prepare(self._client)

    def apply_commit(self) -> dict[str, bool]:
        return self._batch.commit(self._client)

    def discard(self) -> None:
        """Drop the gradients since the last commit, without waiting for the servers."""
        self._client.discard(self._batch.discard())

    @property
    def steps(self) -> dict[str, int]:
        """Optimizer steps of the experts that have answered, according to their last answers, by uid."""
        steps_by_uid = {uid: progress.steps for uid, progress in self._client.progress().items()}
        return {uid: steps for uid, steps in steps_by_uid.items() if steps is not None}

    @property
    def durable_steps(self) -> dict[str, int | None]:
        """The last step of each expert that survives a crash of its server. None: unknown, or none."""
        return {uid: progress.durable_step for uid, progress in self._client.progress().items()}

    @property
    def steps_lost(self) -> dict[str, int]:
        """Steps that were lost by restarts of servers. Each loss is reported by a `StepsLostWarning`."""
        return {uid: lost.steps_lost for uid, lost in self._client.progress().items() if lost.steps_lost}

    def statistics(self) -> MixtureStatistics:
        return self._client.counters.statistics(len(self._client.live_experts()))

    def extra_repr(self) -> str:
        sizes = " x ".join(map(str, self.grid.sizes))
        return f"{self.grid.prefix}*, grid {sizes}, k_best={self.options.k_best}, k_min={self.options.k_min}"

    def _prepare_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[MixtureCall, list[Tensor]]:
        client, deadline = self._client, time.monotonic() + self.options.forward_timeout
        live = client.live_experts()
        signature = client.signature(live, deadline)
        flat = signature.flatten_call(args, kwargs)
        cached = client.cache.pop_match(flat) if is_recomputing() else None
        if cached is None and not len(live) and not self.options.allow_zero_outputs:
            raise client.no_experts_error()
        return MixtureCall(signature, live if cached is None else cached.live, deadline, cached), flat

    def _gating_input(self, x: Tensor) -> Tensor:
        # The mean over all axes in between, in the dtype and on the device of the router's weights.
        if x.dim() < 2 or x.shape[-1] != self.in_features or not x.is_floating_point():
            raise SpecError(
                f"the router of this mixture reads samples x ... x {self.in_features} floating-point numbers, but the "
                f"input is {tuple(x.shape)} of {x.dtype}"
            )
        if x.dim() > 2:
            x = x.mean(dim=tuple(range(1, x.dim() - 1)))
        return x.to(self.proj.weight.device, self.proj.weight.dtype)

    def _router_scores(self, x: Tensor) -> Tensor:
        # Not under autocast: with few bits, scores that are nearly equal would select other experts.
        with torch.autocast(x.device.type, enabled=False):
            return self.proj(x)

    def _call_experts(
        self, call: MixtureCall, flat: Sequence[Tensor], chosen: Tensor, capacity: int | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """Return the flat outputs (each samples x k x ...), and the mask of answers (samples x k)."""
        client, experts = self._client, f"experts {self.grid.prefix}*"
        dispatch = Dispatch(chosen.cpu(), capacity=capacity, most=call.signature.max_batch_size)
        if capacity is not None and call.cached is None:
            client.counters.add("dropped", chosen.numel() - len(dispatch.rows))
        reject_tangents(experts, flat)
        anchor = choose_anchor(self.anchor, f"{experts} are", call.signature.trained, flat)
        leaves = [anchor, *flat]
        # In a checkpoint, backward goes through the recomputed forward, so a graph kept for this one would be wasted.
        needs_graph = torch.is_grad_enabled() and not is_checkpointing() and any(x.requires_grad for x in leaves)
        make_key = partial(IdempotencyKey, self.keep_graph and needs_graph, not self.training)
        keys = {span: make_key() for span in dispatch.spans} if call.cached is None else call.cached.keys
        function = MixtureFunction(client, self._batch, call, dispatch, keys, flat, anchor)
        outputs = list(apply_as_node(function, leaves))
        if is_checkpointing():
            answers = [x.detach() for x in outputs]
            client.cache.store(flat, CachedCall(call.live, chosen, function.alive, answers, keys))
        return outputs, function.alive.to(chosen.device)


class RemoteSwitchMixtureOfExperts(RemoteMixtureOfExperts):
    """Like `RemoteMixtureOfExperts`, but the weight of an answer is its probability among all living experts.

    Args:
        jitter_eps: in training mode, the router's input is multiplied by uniform random numbers from 1 - eps to
            1 + eps. The experts receive the input itself.
        capacity_factor: an expert gets at most ``capacity_factor * samples * k / experts`` rows (rounded up) of a
            batch. Further choices are dropped, last choices first. None drops nothing.
        options: all arguments of `RemoteMixtureOfExperts`. Different defaults: ``k_best`` is 1, ``k_min`` and
            ``backward_k_min`` are 0, ``allow_zero_outputs`` is True. A sample is zero if its expert fails, so this is
            for a residual layer, ``x + mixture(x)[0]``.

    Example:
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> with weft.Server([weft.ExpertBackend("ffn.0", nn.Linear(8, 8), args_schema=rows)]) as server:
        ...     connections = weft.Connections({"ffn.0": server.address})
        ...     sizes = {"in_features": 8, "grid_size": [3], "uid_prefix": "ffn"}
        ...     outputs, loss = weft.RemoteSwitchMixtureOfExperts(**sizes, connections=connections)(torch.randn(4, 8))
    """

    def __init__(self, *, jitter_eps: float = 1e-2, capacity_factor: float | None = None, **options: Any) -> None:
        self.jitter_eps, self.capacity_factor = jitter_eps, capacity_factor  # first, for `_check_arguments`
        options = {"k_best": 1, "k_min": 0, "backward_k_min": 0, "allow_zero_outputs": True, **options}
        super().__init__(**options)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        """The weighted results, and the load-balancing loss, to be added with a factor of about 0.01."""
        return super().forward(input, *args, **kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Tensor]:
        call, flat = self._prepare_call(args, kwargs)
        live, cached = call.live, call.cached
        x = self._gating_input(args[0])
        if self.training and self.jitter_eps:
            x = x * torch.empty_like(x).uniform_(1 - self.jitter_eps, 1 + self.jitter_eps)
        scores = routing.all_scores(self._router_scores(x), live.places.to(x.device), self.grid.sizes)
        probabilities = scores.softmax(1)
        best = scores.detach().topk(min(self.options.k_best, len(live)), dim=1)
        chosen = best.indices if cached is None else cached.chosen
        capacity = None
        if self.capacity_factor is not None:
            capacity = max(1, ceil(self.capacity_factor * chosen.numel() / max(1, len(live))))
        answers, alive = self._call_experts(call, flat, chosen, capacity)
        weights = probabilities.gather(1, chosen) * alive
        outputs = call.signature.outputs.pack([routing.weighted_mean(answer, weights) for answer in answers])
        return outputs, routing.load_balancing_loss(probabilities, chosen)

    def _check_arguments(self, check: Validator) -> None:
        jitter, factor = self.jitter_eps, self.capacity_factor
        valid = is_number(jitter) and 0 <= jitter < 1
        check.require(valid, f"jitter_eps is {jitter!r}, wanted a number from 0 to less than 1")
        valid = factor is None or (is_number(factor) and 0 < factor < float("inf"))
        check.require(valid, f"capacity_factor is {factor!r}, wanted a positive number, or None")
