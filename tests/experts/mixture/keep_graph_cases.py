"""Helpers that compare the same work with and without kept graphs, and inspect the calls."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.experts.mixture.commit_cases import Experts
from tests.experts.mixture.mixture_cases import WIDTH, numbers
from torchweft.experts import GraphBudget
from torchweft.experts.mixture import RemoteMixtureOfExperts
from torchweft.experts.wire import Header, Kind

BUDGET = GraphBudget(1 << 20, 600.0)
Work = Callable[[Experts, RemoteMixtureOfExperts], list[Tensor]]
"""Function that uses a mixture and returns tensors to compare."""


def graphs(experts: Experts) -> tuple[int, int]:
    """Return the numbers of kept and of used graphs."""
    counts = [server.statistics().experts[uid] for uid, server in experts.servers.items()]
    return sum(expert.kept_graphs for expert in counts), sum(expert.used_graphs for expert in counts)


def headers(experts: Experts, kind: Kind) -> list[Header]:
    return sorted((header for header in experts.headers if header.kind is kind), key=lambda header: header.uid)


def keys(experts: Experts, kind: Kind) -> list[str]:
    return [header.key for header in headers(experts, kind)]


def turn(mixture: RemoteMixtureOfExperts, seed: int) -> list[Tensor]:
    """Run forward and backward. Returns the output and the gradients of the input and the router."""
    x = numbers(16, WIDTH, seed=seed).requires_grad_()
    mixture.zero_grad()
    y = mixture(x)
    y = y[0] if isinstance(y, tuple) else y
    y.square().sum().backward()
    gradients = [x.grad, *(parameter.grad for parameter in mixture.parameters())]
    return [y.detach(), *(gradient.clone() for gradient in gradients if gradient is not None)]


def compared(work: Work, options: dict[str, Any], **backend: Any) -> tuple[Experts, int]:
    """Run ``work`` without and with kept graphs, and assert that results and weights are bitwise equal.
    Returns the experts of the second run, whose servers have stopped, and the number of used graphs.
    """
    results: list[list[Tensor]] = []
    seen: list[tuple[Experts, int]] = []
    for keep in (False, True):
        with Experts(keep_graphs=BUDGET, **backend) as experts:
            results.append(work(experts, experts.mixture(keep_graph=keep, **options)))
            results[-1] += [p.detach() for expert in experts.backends.values() for p in expert.module.parameters()]
            seen.append((experts, graphs(experts)[1]))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    (plain, unused), (kept, used) = seen
    assert unused == 0 and not any(header.keep for header in headers(plain, Kind.FORWARD))
    assert plain.steps() == kept.steps()
    return kept, used
