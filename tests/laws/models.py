"""Small models for the laws. Each is described by plain data, and built twice from it.

    ModelPlan --+--> sequential(...)   layers for a Pipe, with `weft.skippable` around those with skips
                +--> Plain(...)        the same layers without torchweft, with the skips in a dict

Both use the same `Block` objects or copies of them, so they compute the same function. All values are float64 and rows
are independent, so a mini-batch and its micro-batches must agree to rounding.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from torchweft import Pipe, pop, skippable, stash

WIDTH = 3


@dataclass(frozen=True)
class LayerPlan:
    """One layer: its operation, the form of its result, and the skips that it writes and reads."""

    op: str = "linear"
    form: str = "tensor"
    stashes: tuple[tuple[str, str], ...] = ()
    """(name, kind): the main result itself, the unchanged input, a new tensor, an integer tensor, or None."""
    pops: tuple[tuple[str, bool], ...] = ()
    """(name, whether it is used)."""
    frozen: bool = False


@dataclass(frozen=True)
class ModelPlan:
    """All layers, their number per stage, and the layers that share the weight of the first one."""

    layers: tuple[LayerPlan, ...]
    balance: tuple[int, ...]
    tied: tuple[int, ...] = ()
    input_form: str = "tensor"
    input_tracked: bool = True
    seed: int = 0


def floats(value: Any) -> list[Tensor]:
    """The tensors of a nested value that carry a gradient."""
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor) and x.is_floating_point()]


def total(value: Any) -> Tensor:
    """The input of a layer as one tensor: a single tensor unchanged, otherwise a weighted sum."""
    if isinstance(value, Tensor):
        return value
    return torch.stack([x * (k + 1) for k, x in enumerate(floats(value))]).sum(0)


def formed(y: Tensor, form: str) -> Any:
    """The result of a layer, nested in one of several forms."""
    if form == "pair":
        return y, y.sin()
    if form == "twice":
        return y, y
    if form == "integers":
        return [y, (y > 0).long()]
    if form == "nested":
        return {"first": [y, None, (y.cos(), 7)], "name": "rest", "last": y * 0.5}
    return y


class Block(nn.Module):
    """One layer of a plan."""

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__()
        self.plan = plan
        shape = (1, WIDTH) if plan.op in ("bias", "inplace") else (WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.float64), requires_grad=not plan.frozen)

    def compute(self, value: Any, skips: Mapping[str, Tensor | None]) -> tuple[Any, dict[str, Tensor | None]]:
        """The output and the stashed skips, from the input and the popped skips."""
        h = total(value)
        for name, used in self.plan.pops:
            skip = skips[name]
            if used and skip is not None:
                h = h + 0.3 * skip
        if self.plan.op == "linear":
            y = (h @ self.weight).tanh()
        elif self.plan.op == "bias":
            y = h + self.weight
        elif self.plan.op == "dropout":
            y = functional.dropout(h @ self.weight, 0.5, self.training)
        elif self.plan.op == "inplace":
            y = (h * self.weight).tanh_()
        else:
            y = h
        values = {"main": y, "input": total(value), "fresh": y.sin(), "integer": (y > 0).long(), "none": None}
        output = value if self.plan.op == "same" and not self.plan.pops else formed(y, self.plan.form)
        return output, {name: values[kind] for name, kind in self.plan.stashes}

    def forward(self, value: Any) -> Any:
        return self.compute(value, {})[0]


class Yielding(nn.Module):
    """The same layer as a generator, which yields its skips."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, value: Any) -> Any:
        skips = {}
        for name, _ in self.block.plan.pops:
            skips[name] = yield pop(name)
        output, stashed = self.block.compute(value, skips)
        for name, skip in stashed.items():
            yield stash(name, skip)
        return output


def blocks(plan: ModelPlan) -> nn.ModuleList:
    """The layers, with weights from the plan's seed."""
    torch.manual_seed(plan.seed)
    layers = nn.ModuleList([Block(layer) for layer in plan.layers])
    for index in plan.tied:
        layers[index].weight = layers[0].weight
    return layers


def sequential(layers: nn.ModuleList) -> nn.Sequential:
    """The model for a Pipe, on these layers."""
    wrapped: list[nn.Module] = []
    for block in layers:
        assert isinstance(block, Block)
        names = [name for name, _ in block.plan.stashes], [name for name, _ in block.plan.pops]
        skips = any(names)
        wrapped.append(skippable(stash=names[0], pop=names[1])(Yielding)(block) if skips else block)
    return nn.Sequential(*wrapped)


def piped(plan: ModelPlan, layers: nn.ModuleList, **settings: Any) -> Pipe:
    """The model on the CPU, in the stages of the plan."""
    return Pipe(sequential(layers), devices=["cpu"] * len(plan.balance), balance=plan.balance, **settings)


class Plain(nn.Module):
    """The plain model: the layers one after another, skips in a dict, one graph."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, value: Any) -> Any:
        skips: dict[str, Tensor | None] = {}
        for block in self.layers:
            value, stashed = block.compute(value, skips)
            skips.update(stashed)
        return value


def mini_batch(plan: ModelPlan, rows: int) -> Any:
    """An input for the plan, with rows on axis 0. Its leaves require a gradient if `plan.input_tracked`."""
    generator = torch.Generator().manual_seed(plan.seed + rows)
    x = torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator)
    value = pytree.tree_map(lambda y: y.clone() if isinstance(y, Tensor) else y, formed(x, plan.input_form))
    for leaf in floats(value):
        leaf.requires_grad_(plan.input_tracked)
    return value


def objective(value: Any) -> Tensor:
    """A scalar of an output: a different function of each of its tensors, the mean over rows."""
    return torch.stack([(x * (k + 1)).sin().sum(1).mean() for k, x in enumerate(floats(value))]).sum()


def twin(layers: nn.ModuleList, value: Any) -> tuple[nn.ModuleList, Any]:
    """Copies of layers and input, with separate gradients."""
    copied = pytree.tree_map(
        lambda x: x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x, value
    )
    return deepcopy(layers), copied


def gradients(layers: nn.Module, value: Any) -> list[tuple[str, Tensor | None]]:
    """The gradients of parameters and inputs after a backward, by name."""
    named = [(name, p.grad) for name, p in layers.named_parameters()]
    return named + [(f"input {k}", x.grad) for k, x in enumerate(floats(value))]


def difference(a: Sequence[tuple[str, Tensor | None]], b: Sequence[tuple[str, Tensor | None]]) -> list[str]:
    """Descriptions of the differences of two lists of gradients, beyond rounding."""
    faults: list[str] = []
    for (name, x), (other, y) in zip(a, b, strict=True):
        assert name == other
        if (x is None) != (y is None):
            faults.append(f"{name}: {x}, expected {y}")
        elif x is not None and y is not None and not torch.allclose(x, y, rtol=1e-10, atol=1e-10):
            faults.append(f"{name}: off by {(x - y).abs().max():.1e}")
    return faults
