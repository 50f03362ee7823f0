"""What a module returns besides tensors never travels: it is a constant, or an error that names it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.experts.expert_cases import TROUBLE, WIDTH, X, rows
from weft.core.errors import SpecError
from weft.experts import ExpertBackend, Runtime


class Talks(nn.Module):
    """Returns something beside its tensor, and a number that is always the same."""

    def __init__(self, says: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.says = says
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return self.layer(x), {"says": self.says(x), "always": 1}


STEADY: dict[str, Callable[[Tensor], Any]] = {
    "None": lambda x: None,
    "str": lambda x: "".join(["mo", "de"]),
    "a new NaN": lambda x: float("nan"),
    "complex NaN": lambda x: complex(float("nan"), 1),
    "int": lambda x: int("7" * 20),
    "a number in a list": lambda x: [1.5, (True, None)],
    "dtype": lambda x: x.dtype,
}
FICKLE: dict[str, Callable[[Tensor], Any]] = {
    "number": lambda x: x.square().sum().item(),
    "NaN or not": lambda x: float("nan") if x.any() else 0.0,
    "number or NaN": lambda x: 0.0 if x.any() else float("nan"),
    "another type": lambda x: True if x.any() else 1,
    "None or a tensor": lambda x: x[:, 0] if x.any() else None,
    "a tensor or None": lambda x: None if x.any() else x[:, 0],
    "str": lambda x: "large" if x.any() else "small",
}
BY_SIZE: dict[str, Callable[[Tensor], Any]] = {
    "rows": len,
    "bool": lambda x: len(x) > 3,
    "None for few": lambda x: None if len(x) < 4 else x,
    "None for many": lambda x: x if len(x) < 4 else None,
    "object": lambda x: object(),
    "array": lambda x: x.numpy(),
}


@pytest.mark.parametrize("kind", STEADY)
@pytest.mark.parametrize("given", [False, True])
def test_what_is_always_the_same_may_be_among_the_outputs(kind: str, given: bool) -> None:
    said = (X, {"says": STEADY[kind](rows(1, 0)), "always": 1}) if given else None
    backend = ExpertBackend("talks", Talks(STEADY[kind]), args_schema=(X,), outputs_schema=said)
    with Runtime([backend]), torch.no_grad():
        for count in (1, 2, 7):
            x = rows(count, count)
            assert torch.equal(backend.forward_pool.submit_task(x).result(30)[0], backend.module(x)[0])


@pytest.mark.parametrize("kind", FICKLE)
def test_what_changes_with_the_numbers_fails_its_batch_by_name_and_no_other(kind: str) -> None:
    backend = ExpertBackend("talks", Talks(FICKLE[kind]), args_schema=(X,))
    gradients = [torch.ones_like(rows(2, 0)), *[torch.ones(2, dtype=torch.float64)] * (kind == "a tensor or None")]
    with Runtime([backend]):
        for _ in range(2):
            for pool, more in ((backend.forward_pool, []), (backend.backward_pool, gradients)):
                with pytest.raises(SpecError, match=r"output\[1\]\['says'\] is ") as caught:
                    pool.submit_task(rows(2, 0), *more).result(30)
                assert kind == "a tensor or None" or "Return it as a tensor" in str(caught.value)
                assert pool.submit_task(torch.zeros(2, WIDTH, dtype=torch.float64), *more).result(30)


@pytest.mark.parametrize("kind", BY_SIZE)
def test_what_changes_with_the_size_is_seen_when_the_expert_is_made(kind: str) -> None:
    with pytest.raises(SpecError, match=r"expert 'talks' .*\n  - output\[1\]\['says'\] is .*wanted"):
        ExpertBackend("talks", Talks(BY_SIZE[kind]), args_schema=(X,))


def test_all_that_does_not_fit_is_told_at_once() -> None:
    def says(x: Tensor) -> Any:
        return [len(x), "same", x.sum().item()] if (x == TROUBLE).any() else [3, "same", 0.0]

    backend = ExpertBackend("talks", Talks(says), args_schema=(X,))
    with Runtime([backend]), pytest.raises(SpecError) as caught:
        backend.forward_pool.submit_task(torch.full((2, WIDTH), TROUBLE, dtype=torch.float64)).result(30)
    head, *faults = str(caught.value).splitlines()
    assert "did not return what its outputs_schema says" in head
    assert [fault.split(" is ")[0] for fault in faults] == ["  - output[1]['says'][0]", "  - output[1]['says'][2]"]
