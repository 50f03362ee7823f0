"""An expert on the CPU holds the large gradients of its last batch, no earlier ones; sparse ones may come too."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from weft.experts import ExpertBackend, Runtime, TensorSpec

LARGE = (2**9, 2**9)  # a weight of 1 MB; its bias is small


class Watch(torch.optim.SGD):
    """Sees every gradient that it steps with, and keeps none."""

    def __init__(self, parameters: Any, seen: list["list[weakref.ref[Tensor]]"]) -> None:
        super().__init__(parameters, lr=0.1)
        self._seen = seen

    def step(self, closure: Any = None) -> None:
        self._seen.append([weakref.ref(p.grad) for group in self.param_groups for p in group["params"]])
        super().step(closure)


def test_large_gradients_are_held_until_the_next_ones_are_there() -> None:
    seen: list[list[weakref.ref[Tensor]]] = []

    def living() -> list[list[torch.Size]]:
        return [[found.shape for ref in each if (found := ref()) is not None] for each in seen]

    spec = TensorSpec((None, LARGE[0]), torch.float32)
    backend = ExpertBackend("e", nn.Linear(*LARGE), lambda given: Watch(given, seen), args_schema=(spec,))
    with Runtime([backend]):
        for _ in range(3):
            backend.backward_pool.submit_task(torch.randn(2, LARGE[0]), torch.randn(2, LARGE[1])).result(30)
    assert living() == [[], [], [LARGE]]


def test_sparse_gradients_step_as_dense_ones_do() -> None:
    table = torch.randn(5, 4, dtype=torch.float64)
    words, gradient = torch.tensor([3, 1, 3]), torch.randn(3, 4, dtype=torch.float64)
    stepped: list[Tensor] = []
    for sparse in (False, True):
        module = nn.Embedding.from_pretrained(table.clone(), freeze=False, sparse=sparse)
        sgd = torch.optim.SGD(module.parameters(), lr=0.5)
        backend = ExpertBackend("e", module, sgd, args_schema=(TensorSpec((None,), torch.int64),))
        with Runtime([backend]):
            backend.backward_pool.submit_task(words, gradient).result(30)
        stepped.append(module.weight.detach())
    assert not torch.equal(stepped[0], table)
    torch.testing.assert_close(*stepped, rtol=0, atol=1e-12)  # word 3 is there twice: its gradients are added elsewhere
