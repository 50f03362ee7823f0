"""RemoteSwitchMixtureOfExperts: Switch routing, with a loss that keeps all experts equally busy.

    probabilities   softmax over all living experts            samples x experts
    y               sum over the chosen of probability * answer
    loss            1 if all experts are equally busy, more if not; its gradient goes to the router

After Fedus, Zoph and Shazeer, "Switch Transformers" (2021). There one expert is chosen; here k may be.
"""

import time
from collections.abc import Sequence
from math import ceil
from typing import Any

from torch import Tensor

from weft.core.validation import Validator, is_number
from weft.experts.client.connections import Connections
from weft.experts.mixture.dispatch import Dispatch
from weft.experts.mixture.mixture import RemoteMixtureOfExperts
from weft.experts.mixture.router import all_scores, jittered, load_balancing_loss, weighted_mean


class RemoteSwitchMixtureOfExperts(RemoteMixtureOfExperts):
    """As `RemoteMixtureOfExperts`, but an answer's weight is its probability among all living experts.

    Args:
        k_best, k_min, backward_k_min, allow_zero_outputs: as there. By default one expert is chosen, and a sample whose
            expert fails is zero: it is to stand in a residual layer, ``x + mixture(x)[0]``.
        jitter_eps: in training mode, what the router reads is multiplied by uniform numbers from 1 - eps to 1 + eps.
            The experts get the input itself.
        capacity_factor: an expert gets at most ``capacity_factor * samples * k / experts`` rows (rounded up) of a
            batch; the choices beyond it are dropped, last choices first. None drops nothing.
        options: all other arguments of `RemoteMixtureOfExperts`.

    Raises what `RemoteMixtureOfExperts` raises.

    Example:
        >>> from weft.experts.discovery import LocalDirectory
        >>> rows, directory = (weft.TensorSpec((None, 8), torch.float32),), LocalDirectory()
        >>> experts = [weft.ExpertBackend(f"ffn.{k}", nn.Linear(8, 8), args_schema=rows) for k in range(3)]
        >>> with weft.Server(experts, directory=directory), weft.Connections(directory) as connections:
        ...     mixture = weft.RemoteSwitchMixtureOfExperts(
        ...         in_features=8, grid_size=[3], uid_prefix="ffn", connections=connections
        ...     )
        ...     outputs, balancing_loss = mixture(torch.randn(4, 8))
        >>> outputs.shape
        torch.Size([4, 8])
        >>> directory.close()
    """

    def __init__(
        self,
        *,
        in_features: int,
        grid_size: Sequence[int],
        uid_prefix: str,
        connections: Connections,
        k_best: int = 1,
        k_min: int = 0,
        backward_k_min: int = 0,
        allow_zero_outputs: bool = True,
        jitter_eps: float = 1e-2,
        capacity_factor: float | None = None,
        **options: Any,
    ) -> None:
        self.jitter_eps, self.capacity_factor = jitter_eps, capacity_factor  # first, for `_check`
        super().__init__(
            in_features=in_features,
            grid_size=grid_size,
            uid_prefix=uid_prefix,
            connections=connections,
            k_best=k_best,
            k_min=k_min,
            backward_k_min=backward_k_min,
            allow_zero_outputs=allow_zero_outputs,
            **options,
        )

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        """What the experts return, weighted, and the load-balancing loss (a scalar; see `load_balancing_loss`).

        Add the loss to that of the model with a factor of about 0.01. Raises what `RemoteMixtureOfExperts.forward`
        raises.
        """
        return super().forward(input, *args, **kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Tensor]:
        deadline = time.monotonic() + self.options.forward_timeout
        signature, flat, live, cached = self._begin(args, kwargs, deadline)
        read = self._gating_input(args[0])
        if self.training and self.jitter_eps:
            read = jittered(read, self.jitter_eps)
        scores = all_scores(self._scores(read), live.places.to(read.device), self.grid.sizes)
        probabilities = scores.softmax(1)
        best = scores.detach().topk(min(self.options.k_best, len(live)), dim=1)
        chosen = best.indices if cached is None else cached.chosen
        dispatch = Dispatch(chosen.cpu(), capacity=self._capacity(chosen, len(live)), most=signature.max_batch_size)
        if cached is None:
            self._client.counters.count("dropped", chosen.numel() - len(dispatch.rows))
        answers, alive = self._call(signature, flat, live, chosen, dispatch, cached, deadline)
        weights = probabilities.gather(1, chosen) * alive
        outputs = signature.nested([weighted_mean(each, weights) for each in answers])
        return outputs, load_balancing_loss(probabilities, chosen)

    def _check(self, check: Validator) -> None:
        check_switch(check, self.jitter_eps, self.capacity_factor)

    def _capacity(self, chosen: Tensor, experts: int) -> int | None:
        if self.capacity_factor is None:
            return None
        return max(1, ceil(self.capacity_factor * chosen.numel() / max(1, experts)))


def check_switch(check: Validator, jitter_eps: Any, capacity_factor: Any) -> None:
    """Check these arguments of `RemoteSwitchMixtureOfExperts`."""
    valid = is_number(jitter_eps) and 0 <= jitter_eps < 1
    check.that(valid, f"jitter_eps is {jitter_eps!r}, wanted a number from 0 to less than 1")
    valid = capacity_factor is None or (is_number(capacity_factor) and 0 < capacity_factor < float("inf"))
    check.that(valid, f"capacity_factor is {capacity_factor!r}, wanted a positive number, or None")
