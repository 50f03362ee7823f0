"""Tensors and modules of unusual kinds are refused by name where they come in."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.experts.expert_cases import WIDTH, X, rows
from weft.core.errors import SpecError, UsageError
from weft.experts import ExpertBackend, Runtime


def nested(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the strided ones a prototype
        return torch.nested.nested_tensor([rows(2, 0), rows(3, 1)], layout=layout)


ODD: dict[str, tuple[Callable[[], Tensor], str]] = {
    "strided nested": (lambda: nested(torch.strided), "nested"),
    "jagged nested": (lambda: nested(torch.jagged), "nested"),
    "sparse": (lambda: rows(3, 0).to_sparse(), r"torch\.sparse_coo"),
    "meta": (lambda: rows(3, 0).to("meta"), "meta"),
}


class Gives(nn.Module):
    """Returns something odd where its input is not all zeros, or always."""

    def __init__(self, odd: Tensor, *, always: bool) -> None:
        super().__init__()
        self.odd, self.always = [odd], always

    def forward(self, x: Tensor) -> Tensor:
        return self.odd[0] if self.always or x.any() else x * 2


@pytest.mark.parametrize("kind", ODD)
def test_a_task_of_an_odd_tensor_is_refused_with_all_its_faults(kind: str) -> None:
    make, word = ODD[kind]
    backend = ExpertBackend("e", Pair(), args_schema=(X, X))
    with pytest.raises(SpecError, match=rf"- args\[0\] is a {word} tensor.*\n  - args\[1\] has dtype"):
        backend.forward_pool.submit_task(make(), rows(3, 0).float())


class Pair(nn.Module):
    """Takes two."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


@pytest.mark.parametrize("kind", ODD)
def test_a_module_that_returns_an_odd_tensor_is_told_by_name(kind: str) -> None:
    make, word = ODD[kind]
    backend = ExpertBackend("e", Gives(make(), always=False), args_schema=(X,))
    with Runtime([backend]), pytest.raises(SpecError, match=f"output is a {word} tensor"):
        backend.forward_pool.submit_task(rows(3, 0)).result(30)
    assert backend.statistics().forward_batches == 0


@pytest.mark.parametrize("kind", ["strided nested", "jagged nested"])
def test_neither_a_schema_nor_the_first_output_may_be_nested(kind: str) -> None:
    odd = ODD[kind][0]()
    for make in (
        lambda: ExpertBackend("e", nn.Identity(), args_schema=(odd,)),
        lambda: ExpertBackend("e", Gives(odd, always=True), args_schema=(X,)),
    ):
        with pytest.raises(SpecError, match="a nested tensor has no spec"):
            make()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.parametrize("inner", [False, True])
def test_modules_of_torch_script_are_refused_with_what_to_do(how: str, inner: bool) -> None:
    jit: Any = torch.jit
    scripted = getattr(jit, how)(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), *[rows(2, 0)] * (how == "trace"))
    module = nn.Sequential(nn.Tanh(), scripted) if inner else scripted
    with pytest.raises(UsageError, match=f"module was made by torch.jit.* {'1' if inner else 'itself'}; give"):
        ExpertBackend("e", module, args_schema=(X,))
