"""The remote mixture has the gradients of the one computed here, and the proof would see it if it had not."""

from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("grpc", reason="the act needs the extra `experts`")

from weft.demo import machines_proof
from weft.demo.machines_model import digit_expert, mixture
from weft.demo.machines_proof import LIMIT, largest_difference
from weft.experts.client import Connections
from weft.experts.expert import ExpertBackend
from weft.experts.mixture import RemoteSwitchMixtureOfExperts


def test_all_gradients_are_those_of_the_mixture_computed_here() -> None:
    state = torch.get_rng_state()
    assert largest_difference(0) < LIMIT
    assert torch.equal(state, torch.get_rng_state())


def test_a_mixture_that_asks_other_experts_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_expert(connections: Connections, **options: object) -> RemoteSwitchMixtureOfExperts:
        made = mixture(connections, width=12, dtype=torch.float64)
        made.terms = replace(made.terms, k_best=1)
        return made

    monkeypatch.setattr(machines_proof, "mixture", one_expert)
    assert largest_difference(0) > 1e-3


def test_experts_that_step_otherwise_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def decaying(uid: str, seed: int) -> ExpertBackend:
        return digit_expert(12, seed, double=True).backend(uid, partial(torch.optim.SGD, lr=1.0, weight_decay=0.1))

    monkeypatch.setattr(machines_proof, "_expert", decaying)
    assert largest_difference(0) > 1e-3
