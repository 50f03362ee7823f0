"""Random models: for any code between blocks, the pipe equals the undivided model, or raises an error."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torchweft as weft
from tests.pipeline.pipe_cases import assert_close
from torchweft.core.errors import WeftError
from torchweft.core.pytree import flatten

WIDTH = 3
KINDS = ("linear", "norm", "inplace", "double", "route")
GLUE = (
    *("block", "block", "block", "add", "add", "add_", "scale_", "assign", "cat", "view_write", "parameter", "buffer"),
    *("count", "mask", "shape", "stack", "detach", "alias", "flip"),
)
Op = tuple[str, int, int]


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        if self.kind == "norm":
            self.seen += 1
            return y / (1 + y.square().mean(-1, keepdim=True))
        if self.kind == "inplace":
            return torch.relu_(y)
        if self.kind == "double":
            return {"main": y.tanh(), "gate": [torch.sigmoid(x), None]}
        if self.kind == "route":
            return y if bool(self.linear.bias.sum() > 0) else y.cos()
        return y


class Random(nn.Module):
    """Interprets a list of operations over the earlier values."""

    def __init__(self, kinds: list[str], ops: list[Op], nested: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for kind in kinds)
        self.ops, self.nested = ops, nested
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("table", torch.randn(WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        values = [x]
        for name, i, j in self.ops:
            a, b = values[i % len(values)], values[j % len(values)]
            if name == "block":
                result = self.blocks[j % len(self.blocks)](a)
                values += [result["main"], result["gate"][0]] if isinstance(result, dict) else [result]
            elif name == "add":
                values.append(a + b)
            elif name == "add_":
                values[i % len(values)] = a
                a += b
            elif name == "scale_":
                a.mul_(0.5)
            elif name == "assign":
                c = a.clone()
                c[..., 0] = b[..., 1]
                values.append(c)
            elif name == "cat":
                values.append(torch.cat([a, b], -1)[..., 1 : 1 + WIDTH])
            elif name == "view_write":
                c = a * 1
                c.view(-1).add_(1.0)
                values.append(c)
            elif name == "parameter":
                values.append(a + self.bias)
            elif name == "buffer":
                values.append(a * self.table)
            elif name == "count":
                self.calls += 1
                values.append(a * self.calls.sign())
            elif name == "mask":
                if mask is not None:
                    values.append(a * mask if bool(mask.all()) else a.where(mask, a * 0.5))
            elif name == "shape":
                values.append(a * 2 if len(a) % 2 else a - 1)
            elif name == "stack":
                values.append(torch.stack([a, b]).sum(0))
            elif name == "detach":
                values.append(a.detach() * b)
            elif name == "alias":
                values.append(a[..., :])
            else:
                values.append(a.flip(-1).contiguous())
        return {"last": values[-1], "more": (values[len(values) // 2] * 1, None)} if self.nested else values[-1] * 1


def trained(model: nn.Module, outputs: list[Any]) -> list[Any]:
    """Outputs, gradients, and the buffer that code between blocks writes, after a backward.

    A buffer that a block writes is written once per micro-batch, so it is not compared.
    """
    sum((x * torch.arange(1.0, 1 + x.numel()).view_as(x)).sum() for x in outputs if x is not None).backward()
    detached = [x if x is None else x.detach() for x in outputs]
    return [*detached, *(parameter.grad for parameter in model.parameters()), model.get_buffer("calls").clone()]


@pytest.mark.long
@pytest.mark.parametrize("shard", range(6))
def test_no_random_model_differs_silently(shard: int) -> None:
    counts = {"equal": 0, "refused": 0, "invalid": 0}

    @seed(shard)
    @settings(max_examples=50, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=5),
        ops=st.lists(st.tuples(st.sampled_from(GLUE), st.integers(0, 9), st.integers(0, 9)), min_size=4, max_size=16),
        nested=st.booleans(),
        masked=st.sampled_from((None, "ones", "some")),
        way=st.sampled_from((("serial", "never"), ("threads", "always"), ("graph", "never"), ("threads", "never"))),
        picks=st.sets(st.integers(0, 4), min_size=1, max_size=3),
    )
    def check(kinds: Any, ops: Any, nested: Any, masked: Any, way: Any, picks: Any) -> None:
        calls = [("block", i, i) for i in range(len(kinds))]  # so that every block is called
        torch.manual_seed(len(ops))
        model = Random(kinds, [*ops[: len(ops) // 2], *calls, *ops[len(ops) // 2 :]], nested).double()
        plain = copy.deepcopy(model)
        split = sorted({f"blocks.{1 + pick % (len(kinds) - 1)}" for pick in picks})
        executor, checkpoint = way
        settings = {"executor": executor, "checkpoint": checkpoint, "devices": ["cpu"] * (len(split) + 1)}
        try:
            pipe = weft.Pipe(model, chunks=3, split=split, **settings)
            for rows in (6, 5):
                x = torch.randn(rows, 2, WIDTH, dtype=torch.float64)
                mask = None if masked is None else (torch.rand(rows, 2, 1) > 0.3) | (masked == "ones")
                inputs = {"x": x} if mask is None else {"x": x, "mask": mask}
                plain.zero_grad()
                model.zero_grad()
                try:
                    expected = trained(plain, flatten(plain(**{**inputs, "x": x.clone()}))[0])
                except RuntimeError:  # overwrites a value that autograd needs, or has no gradient
                    counts["invalid"] += 1
                    event("the plain model cannot train")
                    return
                seen = trained(model, flatten(pipe(**inputs))[0])
                assert_close(seen, expected, 1e-10)
        except WeftError as error:
            counts["refused"] += 1
            event(type(error).__name__)
            return
        counts["equal"] += 1

    check()
    assert counts["equal"] >= 12, counts
