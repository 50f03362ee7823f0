"""Each unsupported use of a pipe with split= raises one error, which names the observation and the remedy."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchweft as weft
from tests.pipeline.pipe_cases import assert_close, rows
from tests.pipeline.split.test_split_pipe import Chain, cut
from torchweft.core.errors import BatchError, GuardError, PartitionError, SpecError, SplitError, UsageError

pytestmark = pytest.mark.usefixtures("double")


class Experts(nn.Module):
    """Chooses an expert for each row, and stores a loss for balance."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        self.aux, top, y = weights.square().mean(), weights.argmax(-1), x
        for number, expert in enumerate(self.experts):
            (chosen,) = torch.where(top == number)
            if len(chosen):
                y = y.index_add(0, chosen, expert(x[chosen]) * weights[chosen, number, None])
        return y


class Mixture(nn.Module):
    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), Experts()) for _ in range(2))
        self.reads = reads

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return (x, sum(block[1].aux for block in self.blocks)) if self.reads else x


def test_an_attribute_that_opens_a_block_is_named() -> None:
    """If the model reads a tensor that a block stores, the code inside this block is recorded too."""
    for count in (4, 7, 8):  # for any recording
        cut(Mixture(reads=False), "blocks.1", chunks=2)(torch.randn(count, 8))
    with pytest.raises(
        (GuardError, BatchError), match=r"reads blocks\.[01]\.1\.aux, which its block makes.*return that tensor"
    ) as seen:
        for count in range(4, 20):
            cut(Mixture(reads=True), "blocks.1", chunks=2)(torch.randn(count, 8))
    assert "submodule" not in str(seen.value)


def test_a_stored_tensor_of_a_block_can_be_read_by_the_model() -> None:
    class Storing(nn.Linear):
        norm: Any = None

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.norm = y.square().mean()
            return y

    class Model(Chain):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
            return super().forward(x), self.layers[0].norm

    model = Model()
    model.layers[0] = Storing(8, 8)
    pipe = cut(model, chunks=2)
    for shift in range(2):
        output, norm = pipe(rows(4, 8) + shift)
        assert model.layers[0].norm is norm  # as in the plain model
        assert_close((output, norm), model(rows(4, 8) + shift))


class Storing(Chain):
    """Stores the result of `value`, a function of the model, its input and its output."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value, self.kept = value, None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        self.kept = self.value(self, x, y)
        return y


def test_an_activation_stored_between_blocks_is_refused() -> None:
    for value in (lambda _, x, y: y.mean(), lambda self, x, y: self.layers[0].weight * 2):
        with pytest.raises(SplitError, match=r"forward of the model \(Storing\) stores .* 'kept'.*return it"):
            cut(Storing(value))(rows(4, 8))
    for value in (lambda _, x, y: torch.ones(3), lambda _, x, y: x > 0, lambda _, x, y: 3.0):
        assert_close(cut(model := Storing(value))(rows(4, 8)), model(rows(4, 8)))


def _checkpointing(reentrant: bool) -> nn.Module:
    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    model = Chain()
    model.layers[3] = Block(8, 8)
    return model


def test_reentrant_checkpointing_is_refused() -> None:
    """torchweft refuses it around blocks. PyTorch refuses it inside a block of a segment, with added advice."""

    class Around(Chain):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
            return checkpoint(super().forward, x, use_reentrant=True)

    with pytest.raises(SplitError, match=r":\d+: torch.*use_reentrant=True is called.*use_reentrant=False"):
        cut(Around())(rows(4, 8))
    for verify in (True, False):
        with pytest.raises(RuntimeError, match="use_reentrant=True") as seen:
            cut(_checkpointing(True), verify=verify, executor="serial")(rows(4, 8)).sum().backward()
        assert any("use use_reentrant=False" in note for note in seen.value.__notes__)
    cut(_checkpointing(True), verify=False, executor="graph")(rows(4, 8)).sum().backward()
    cut(_checkpointing(False))(rows(4, 8)).sum().backward()


def test_a_target_without_a_loss_is_refused() -> None:
    with pytest.raises(UsageError, match=r"target= was given, but the pipe has no loss.*Pipe\(\.\.\., loss=fn\)"):
        cut(Chain())(rows(4, 8), target=rows(4, 8))

    class Aiming(Chain):
        def forward(self, x: Tensor, target: Any = None) -> Tensor:
            return super().forward(x) - target

    assert_close(cut(model := Aiming())(rows(4, 8), target=rows(4, 8)), model(rows(4, 8), rows(4, 8)))


def test_a_pipe_of_a_pipe_is_refused() -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for pipe in (cut(inner, "1"), weft.Pipe(inner, chunks=2, devices=["cpu"] * 2)):
        for settings in ({"split": ["1"]}, {}):
            with pytest.raises(SpecError, match="the model is a Pipe already"):
                weft.Pipe(pipe, chunks=2, devices=["cpu"] * 2, **settings)
        outer = nn.Sequential(nn.Linear(8, 8), pipe)
        with pytest.raises(SpecError, match=r"^1 is a Pipe already"):
            cut(outer, "1.1")
        assert_close(cut(outer, "1", chunks=2)(rows(4, 8)), outer(rows(4, 8)))  # a pipe can be a block


def test_a_branch_that_was_not_recorded() -> None:
    """After the last block, all rows decide, and a block that was not recorded runs on all rows."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.other = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor, flag: Tensor) -> Tensor:
            y = self.second(self.first(x))
            by = y if flag is None else flag
            return self.other(y) if bool(by.sum() > 0) else y

    model = Branching()
    pipe = cut(model, "second", chunks=2)
    for flag in (torch.zeros(4), torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.ones(4)):
        assert_close(pipe(rows(4, 8), flag), model(rows(4, 8), flag))
    for bias in (-50.0, 50.0):
        with torch.no_grad():
            model.second.bias.fill_(bias)
        assert_close(pipe(rows(4, 8), None), model(rows(4, 8), None))


def test_devices_that_are_not_there_are_refused() -> None:
    count = torch.cuda.device_count()
    for settings in ({"split": ["1"]}, {}):
        model, devices = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), ["cpu", f"cuda:{count}"]
        with pytest.raises(UsageError, match=rf"devices\[1\] is 'cuda:{count}', but PyTorch"):
            weft.Pipe(model, chunks=2, devices=devices, **settings)


def test_devices_without_a_stage_are_refused() -> None:
    fault = r"1 split point makes 2 stages, but there are 3 devices; give 2 devices.*\['cpu'\] .*name 2 split points"
    with pytest.raises(PartitionError, match=fault):
        weft.Pipe(Chain(), chunks=2, split=["layers.2"], devices=["cpu"] * 3)
    pipe = cut(Chain())
    pipe.devices = ["cpu"] * 3
    with pytest.raises(PartitionError, match="2 stages, but there are 3 devices"):
        pipe(rows(4, 8))


@pytest.mark.parametrize("call", [lambda layer, x: layer.forward(x), lambda layer, x: x @ layer.weight.T])
def test_a_split_point_that_is_not_called_as_a_module(call: Any) -> None:
    """The error says how it was used."""

    class Direct(Chain):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
            for layer in self.layers:
                x = call(layer, x) if isinstance(layer, nn.Linear) else layer(x)
            return x

    with pytest.raises(SplitError, match=r"uses the parameters of the split points.*layer\.forward\(x\)"):
        cut(Direct())(rows(4, 8))
