"""Weights that an optimizer has made NaN or infinite are neither served nor saved, and no client is blamed."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.experts.expert_cases import Formula, X, answered, backward, fussy_backend, rows, send_step, weights
from torchweft.experts import ExpertBackend, Guards
from torchweft.experts.checkpoint import FolderCheckpointStore
from torchweft.experts.client import RemoteExpert
from torchweft.experts.errors import GradientError, NotFiniteError
from torchweft.experts.server import Server

HUGE = partial(torch.optim.SGD, lr=1e306)
"""The gradients are finite, and the weights are infinite after one step."""


def spoiled(optimizer: object = HUGE, **options: object) -> ExpertBackend:
    backend = fussy_backend(optimizer=optimizer, **options)
    x = rows(2, 0)
    answered(backend, backend.backward_pool.submit_task(x, torch.full_like(x, 1e4)))
    return backend


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_spoiled_weights_are_not_served(kind: str) -> None:
    backend = spoiled()
    assert backend.steps == 1
    (answer,) = answered(
        backend, backend.forward_pool.submit_task(rows(2, 0)) if kind == "forward" else backward(backend)
    )
    assert isinstance(answer, NotFiniteError) and backend.steps == 1
    assert "of expert 'fussy' hold NaN or infinity, seen after step 1. No client is at fault" in str(answer)


def test_weights_spoiled_between_checks_are_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every step is followed by a check, but gradients are refused as NaN only if the weights are sound."""
    monkeypatch.setattr("torchweft.experts.gradients.WeightCheck.after_step", lambda self, step: None)
    backend = spoiled()
    (answer,) = answered(backend, backend.backward_pool.submit_task(rows(2, 0), rows(2, 1)))
    assert isinstance(answer, NotFiniteError)
    sound = fussy_backend()
    (answer,) = answered(sound, sound.backward_pool.submit_task(rows(2, 0), rows(2, 1) * float("nan")))
    assert isinstance(answer, GradientError)


def test_a_sound_state_ends_the_failure() -> None:
    before = fussy_backend(optimizer=HUGE).state_dict()
    backend = spoiled()
    with pytest.raises(NotFiniteError):
        backend.check_weights()
    backend.load_state_dict(before)
    assert backend.fault is None
    assert all(
        isinstance(answer, Tensor | list) for answer in answered(backend, backend.forward_pool.submit_task(rows(2, 0)))
    )


def test_spoiled_weights_are_reported_and_not_saved(tmp_path: Path) -> None:
    backend, store = fussy_backend(optimizer=HUGE), FolderCheckpointStore(tmp_path)
    server = Server([backend], checkpoints=store)
    with server, RemoteExpert("fussy", server.address) as remote:
        (remote(rows(2, 0)) * 1e4).sum().backward()
        with pytest.raises(NotFiniteError, match="No client is at fault"):
            remote(rows(2, 0))
        with pytest.raises(NotFiniteError):
            server.checkpoint()
        assert "NaN or infinity" in server.status()["failures"]["weights of fussy"]
        backend.load_state_dict(fussy_backend(optimizer=HUGE).state_dict())  # so that the server ends without an error
    assert store.steps("fussy") == [0]


def test_weights_that_began_infinite_are_accepted() -> None:
    module = Formula(lambda self, x: self.layer(x), layer=nn.Linear(4, 4, dtype=torch.float64))
    module.bound = nn.Parameter(torch.tensor([float("-inf")], dtype=torch.float64))
    backend = ExpertBackend("f", module, partial(torch.optim.SGD, lr=0.1), args_schema=(X,))
    before = weights(backend)
    send_step(backend)
    backend.check_weights()
    assert backend.fault is None and weights(backend) != before


def test_no_check_without_finite_guards() -> None:
    assert spoiled(guards=Guards(finite=False)).fault is None
