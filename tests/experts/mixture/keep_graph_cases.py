"""The same work with kept graphs and without: what it found, who was called with which keys, whose graph was used."""

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
"""Something to do with a mixture, and what it found."""


def graphs(experts: Experts) -> tuple[int, int]:
    found = [server.statistics().experts[uid] for uid, server in experts.servers.items()]
    return sum(each.kept_graphs for each in found), sum(each.used_graphs for each in found)


def headers(experts: Experts, kind: Kind) -> list[Header]:
    return sorted((each for each in experts.headers if each.kind is kind), key=lambda each: each.uid)


def keys(experts: Experts, kind: Kind) -> list[str]:
    return [header.key for header in headers(experts, kind)]


def turn(mixture: RemoteMixtureOfExperts, seed: int) -> list[Tensor]:
    """Forward and backward: the output, and the gradients of the input and of the router."""
    x = numbers(16, WIDTH, seed=seed).requires_grad_()
    mixture.zero_grad()
    y = mixture(x)
    y = y[0] if isinstance(y, tuple) else y
    y.square().sum().backward()
    found = [x.grad, *(parameter.grad for parameter in mixture.parameters())]
    return [y.detach(), *(each.clone() for each in found if each is not None)]


def compared(work: Work, options: dict[str, Any], **backend: Any) -> tuple[Experts, int]:
    """Do it without kept graphs and with, at servers that keep them: what it finds, and the weights, are the same to
    the bit. The experts of the latter, whose servers have ended, and how many graphs were used.
    """
    results: list[list[Tensor]] = []
    seen: list[tuple[Experts, int]] = []
    for keep in (False, True):
        with Experts(keep_graphs=BUDGET, **backend) as experts:
            results.append(work(experts, experts.mixture(keep_graph=keep, **options)))
            results[-1] += [p.detach() for each in experts.backends.values() for p in each.module.parameters()]
            seen.append((experts, graphs(experts)[1]))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    (plain, unused), (kept, used) = seen
    assert unused == 0 and not any(header.keep for header in headers(plain, Kind.FORWARD))
    assert plain.steps() == kept.steps()
    return kept, used
