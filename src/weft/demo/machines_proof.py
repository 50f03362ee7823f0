"""A mixture of remote experts against the same mixture computed here: every gradient, in float64.

    x ──> router ──> 2 of 4 experts, over gRPC ──> weighted sum ──> loss      gradients of x, router and experts
    x ──> router ──> 2 of 4 experts, here ───────> weighted sum ──> loss      the same

The remote experts' gradients never leave their server. But it steps with plain SGD of rate 1 here, so what a step took
away from a parameter is its gradient.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn

from weft.demo.machines_model import GRID, UIDS, digit_expert, mixture
from weft.demo.stage import ProofError
from weft.experts.client import Connections
from weft.experts.directory import LocalDirectory
from weft.experts.expert import ExpertBackend
from weft.experts.server import Server

Middle = Callable[[Tensor], tuple[Tensor, Tensor]]
LIMIT = 1e-10
_WIDTH, _ROWS = 12, 32


def largest_difference(seed: int) -> float:
    """The largest absolute difference of any gradient: of the input, the router, and all experts."""
    made = [_expert(uid, seed + number) for number, uid in enumerate(UIDS)]
    modules = [backend.module for backend in made]
    before = deepcopy(modules)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(_ROWS, _WIDTH, dtype=torch.float64, generator=generator)
    wanted = torch.randn(_ROWS, _WIDTH, dtype=torch.float64, generator=generator)
    directory = LocalDirectory()
    try:
        with Server(made, directory=directory), Connections(directory) as connections:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                middle = mixture(connections, width=_WIDTH, dtype=torch.float64)
            there = _gradients(middle, middle.proj, x, wanted)
    finally:
        directory.close()
    here = _gradients(partial(_computed_here, middle.proj, before), middle.proj, x, wanted)
    for now, then in zip(modules, before, strict=True):
        for a, b in zip(now.parameters(), then.parameters(), strict=True):
            there.append((b - a).detach())
            here.append(torch.zeros_like(b) if b.grad is None else b.grad)
    return max(float((a - b).abs().max()) for a, b in zip(there, here, strict=True))


def _expert(uid: str, seed: int) -> ExpertBackend:
    return digit_expert(_WIDTH, seed, double=True).backend(uid, partial(torch.optim.SGD, lr=1.0))


def _gradients(middle: Middle, router: nn.Linear, x: Tensor, wanted: Tensor) -> list[Tensor]:
    """Of the input and the router."""
    router.zero_grad()
    given = x.clone().requires_grad_()
    y, balance = middle(given)
    ((y - wanted).square().sum() + balance).backward()
    return [_known(each.grad).clone() for each in (given, router.weight, router.bias)]


def _computed_here(router: nn.Linear, experts: Sequence[nn.Module], x: Tensor) -> tuple[Tensor, Tensor]:
    """Plain PyTorch, as a textbook has it: all experts on all rows, with weights of 0 for those not chosen."""
    rows, columns = router(x).split(GRID, dim=1)
    probabilities = (rows[:, :, None] + columns[:, None, :]).flatten(1).softmax(1)  # experts in the order of UIDS
    chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(2, dim=1).indices, 1.0)
    answers = torch.stack([expert(x) for expert in experts], 2)
    balance = len(experts) * (chosen.mean(0) / 2 * probabilities.mean(0)).sum()
    return (answers * (probabilities * chosen)[:, None, :]).sum(2), balance


def _known(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        raise ProofError("a gradient of the mixture did not arrive")
    return gradient
