"""The dummy run finds sizes that the module takes, or says what it tried."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.experts.expert_cases import WIDTH, X, rows
from weft.core.spec import TensorSpec
from weft.experts import ExpertBackend, Runtime

IMAGES = TensorSpec((None, 3, None, None), torch.float32)


class Folds(nn.Module):
    """Wants a batch of a multiple of so many rows."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, self.count, WIDTH).flip(1).reshape(x.shape)


PICKY: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[], Tensor]]] = {
    "a kernel of 7": (lambda: nn.Conv2d(3, 4, 7), IMAGES, lambda: torch.randn(2, 3, 12, 9)),
    "a kernel of 50": (lambda: nn.Conv2d(3, 4, 50), IMAGES, lambda: torch.randn(1, 3, 60, 51)),
    "pooled": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 7), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        IMAGES,
        lambda: torch.randn(2, 3, 12, 9),
    ),
    "an even batch": (lambda: Folds(2), X, lambda: rows(6, 0)),
    "a batch of fours": (lambda: Folds(4), X, lambda: rows(12, 0)),
    "a batch like the sample's": (lambda: Folds(7), rows(7, 0), lambda: rows(14, 0)),
}


@pytest.mark.parametrize("kind", PICKY)
@pytest.mark.parametrize("given", [False, True])
def test_a_module_that_refuses_small_sizes_is_served(kind: str, given: bool) -> None:
    make, schema, task = PICKY[kind]
    module, x = make(), task()
    found = ExpertBackend("e", module, args_schema=(schema,)).get_info()["outputs_schema"]
    backend = ExpertBackend("e", module, args_schema=(schema,), outputs_schema=found if given else None)
    with Runtime([backend]), torch.no_grad():
        wanted = module(x)
        assert torch.allclose(backend.forward_pool.submit_task(x).result(30)[0], wanted, atol=1e-6)
    assert [size for size in found.shape if size is not None] == list(wanted.shape[1:2])
    free = sum(size is None for size in found.shape)
    assert free == (3 if wanted.dim() == 4 else 1)


def test_what_runs_with_no_sizes_is_told_with_what_to_do() -> None:
    with pytest.raises(RuntimeError) as caught:
        ExpertBackend("e", Folds(7), args_schema=(X,))
    (note,) = caught.value.__notes__
    assert "in the dummy run of expert 'e' on zeros with 3 rows" in note
    assert "nor did it run with 4 or 2 rows" in note and "sample tensors" in note
