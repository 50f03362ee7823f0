"""A stage runs its layers as one function, passes the skips that cross its borders, and describes its layers."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.pipeline.pipe_cases import rows
from torchweft import pop, skippable, stash
from torchweft.core.context import ExecutionContext, set_phase
from torchweft.core.errors import SkipError
from torchweft.core.rng import RandomUse, RngStreams, generators_of
from torchweft.core.segment import MicroBatchContext
from torchweft.pipeline.batchnorm import convert_deferred_batch_norm
from torchweft.pipeline.stage import CallArguments, Stage

CPU = torch.device("cpu")


def stage_of(*layers: nn.Module, index: int = 0, popped: Any = (), stashed: Any = ()) -> Stage:
    named = [(str(number), layer) for number, layer in enumerate(layers)]
    return Stage(index, named, CPU, popped=popped, stashed=stashed)


def context(stages: int = 1) -> MicroBatchContext:
    return MicroBatchContext(
        0,
        ExecutionContext.capture(["cpu"]),
        RngStreams({k: RandomUse(generators_of([CPU])) for k in range(stages)}, dict.fromkeys(range(stages), 0)),
    )


@skippable(stash=["a", "b"])
class Source(nn.Module):
    def forward(self, x):
        yield stash("a", x * 2)
        yield stash("b", None)
        return x + 1


@skippable(pop=["a", "b"])
class Reader(nn.Module):
    def forward(self, x):
        a = yield pop("a")
        b = yield pop("b")
        assert b is None
        return x + a


A, B = (None, "a"), (None, "b")


def test_crossing_skips_are_values_in_the_order_of_routes() -> None:
    source = stage_of(Source(), stashed=[B, A])
    main, b, a = source(context(), torch.ones(2))
    assert main.tolist() == [2, 2] and a.tolist() == [2, 2] and b is None
    reader = stage_of(Reader(), popped=[A, B])
    assert reader(context(), main, a, None)[0].tolist() == [4, 4]
    (result,) = stage_of(Source(), nn.Identity(), Reader())(context(), torch.ones(2))
    assert result.tolist() == [4, 4]


def test_a_skip_that_was_not_brought_is_named() -> None:
    with pytest.raises(SkipError, match="'a'") as caught:
        stage_of(Reader())(context(), torch.ones(2))
    assert "layer '0'" in "\n".join(caught.value.__notes__)


def test_a_call_unpacks_for_the_first_layer_only() -> None:
    class Takes(nn.Module):
        def forward(self, x, y, *, z):
            return x + y + z

    assert stage_of(Takes(), nn.Identity())(context(), CallArguments((1, 2), {"z": 3})) == (6,)


class StoresInput(nn.Module):
    """Identity that stores its input."""

    def forward(self, x):
        self.stored = x
        return x


@pytest.mark.parametrize(
    ("layers", "copies"),
    [
        ([nn.ReLU(inplace=True)], True),
        ([nn.Flatten(), nn.ReLU(inplace=True)], True),
        ([nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))], True),
        ([nn.ReLU()], False),
        ([nn.Linear(2, 2), nn.ReLU(inplace=True)], False),
    ],
)
def test_input_is_copied_only_if_a_layer_can_write_to_it(layers: list[nn.Module], copies: bool) -> None:
    first = StoresInput()
    x = -torch.ones(1, 2)
    stage_of(first, *layers)(context(), x)
    assert (first.stored is not x) == copies
    assert torch.equal(x, -torch.ones(1, 2))
    first.inplace = copies
    stage_of(first)(context(), {"x": [x], "n": 3})
    assert (first.stored["x"][0] is not x) == copies and first.stored["n"] == 3


def test_scan_lists_trainable_and_misplaced_tensors_once() -> None:
    shared = nn.Linear(2, 2)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    away = nn.Linear(2, 2, device="meta")
    scan = stage_of(shared, frozen, shared, away).scan()
    assert list(map(id, scan.parameters)) == list(map(id, (*shared.parameters(), *away.parameters())))
    assert scan.misplaced == ["3.weight is on meta, stage 0 on cpu", "3.bias is on meta, stage 0 on cpu"]


def test_configuration_depends_on_training_and_probabilities() -> None:
    dropout = nn.Dropout(0.5)
    stage = stage_of(nn.Linear(2, 2), dropout)
    seen = [stage.scan().configuration]
    dropout.eval()
    seen.append(stage.scan().configuration)
    dropout.train()
    dropout.p = 0.25
    seen.append(stage.scan().configuration)
    assert len(set(seen)) == 3
    dropout.p = 0.5
    assert stage.scan().configuration == seen[0]


def test_deferred_norms_are_found_wherever_they_are() -> None:
    layer = convert_deferred_batch_norm(nn.Sequential(nn.Sequential(nn.BatchNorm1d(2)), nn.BatchNorm1d(2)))
    assert stage_of(layer).scan().deferred == [layer[0][0], layer[1]]


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True)])
def test_recomputation_writes_neither_statistics_nor_buffers(norm: nn.Module) -> None:
    stage = stage_of(norm.double())
    stage.scan()
    x, forward = rows(4, 2, 3), context()
    with set_phase("checkpointing"):
        stage(forward, x)
    before = {name: (buffer, buffer.clone(), buffer._version) for name, buffer in norm.named_buffers()}
    with set_phase("recomputing"):
        stage(forward, x)
    for name, buffer in norm.named_buffers():
        kept, value, version = before[name]
        assert buffer is kept and torch.equal(buffer, value) and buffer._version == version
    stage(context(), x)
    assert not torch.equal(norm.running_mean, before["running_mean"][1])


def test_an_error_names_the_layer_and_the_stage() -> None:
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("gone")

    with pytest.raises(KeyError) as caught:
        stage_of(nn.Identity(), Fails(), index=3)(context(4), torch.ones(1))
    assert caught.value.__notes__ == ["torchweft: in layer '1' (Fails) of stage 3"]
