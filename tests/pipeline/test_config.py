"""Arguments of a Pipe: one error lists all faults of a check, and defaults are derived."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.type_checks import without_type_checks
from torchweft import Pipe
from torchweft.core.errors import PartitionError, ScheduleError, SpecError, UsageError
from torchweft.core.validation import Validator
from torchweft.pipeline.config import (
    check_schedule,
    check_settings,
    checkpoint_rules,
    layers_of,
    never_recomputes,
    reduction_of,
    resolve_layout,
    sizes_of,
)
from torchweft.pipeline.devices import places_of
from torchweft.pipeline.schedule import Schedule, gpipe

CPU = torch.device("cpu")
MODES = st.sampled_from(["always", "except_last", "never"])


def linears(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


def fault_lines(caught: pytest.ExceptionInfo[Exception]) -> list[str]:
    return [line.removeprefix("  - ") for line in str(caught.value).splitlines()[1:]]


# --- the module


def test_layers_keep_their_names_and_order() -> None:
    model = nn.Sequential()
    first, second = nn.Linear(2, 2), nn.Tanh()
    model.add_module("zeta", first)
    model.add_module("alpha", second)
    model.add_module("again", first)
    assert layers_of(model) == [("zeta", first), ("alpha", second), ("again", first)]


def shadowed() -> nn.Sequential:
    model = linears(2, 2)
    model.forward = lambda input: -input
    return model


class Reversed(nn.Sequential):
    def forward(self, input):
        for layer in reversed(list(self)):
            input = layer(input)
        return input


@pytest.mark.parametrize(
    ("module", "word"),
    [
        (nn.Linear(2, 2), "this is a Linear"),
        (nn.ModuleList([nn.Linear(2, 2)]), "ModuleList"),
        (Reversed(nn.Tanh()), "its own forward"),
        (shadowed(), "its own forward"),
        (nn.Sequential(), "empty"),
        (nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), r"run the model once(.|\n)*  - 1\.weight\n  - 1\.bias$"),
        (nn.Sequential(nn.LazyBatchNorm1d(affine=False)), r"  - 0\.running_mean"),
    ],
)
def test_only_a_plain_sequential_with_layers_can_be_cut(module: nn.Module, word: str) -> None:
    with pytest.raises(SpecError, match=word):
        layers_of(module)


def test_extra_state_of_a_sequential_is_refused() -> None:
    """The pipe would lose parameters and hooks of the Sequential itself."""
    model = linears(2, 2)
    model.register_parameter("absent", None)
    assert len(layers_of(model)) == 1
    model.scale = nn.Parameter(torch.ones(1))
    model.register_buffer("steps", torch.zeros(1))
    hooks = [
        model.register_forward_hook(lambda *_: None),
        model.register_forward_pre_hook(lambda *_: None),
        model.register_full_backward_hook(lambda *_: None),
        model.register_state_dict_post_hook(lambda *_: None),
        model.register_load_state_dict_pre_hook(lambda *_: None),
    ]
    with pytest.raises(SpecError, match="would be lost") as caught:
        layers_of(model)
    assert [fault.split(";")[0] for fault in fault_lines(caught)] == [
        "parameter or buffer 'scale'",
        "parameter or buffer 'steps'",
        "backward_hooks",
        "forward_hooks",
        "forward_pre_hooks",
        "state_dict_hooks",
        "load_state_dict_pre_hooks",
    ]
    for hook in hooks:
        hook.remove()
    del model.scale, model.steps
    assert len(layers_of(model)) == 1


# --- checkpoint


@given(mode=MODES, stages=st.integers(1, 4), micro_batches=st.integers(1, 6))
def test_mode_selects_the_recomputed_micro_batches(mode: str, stages: int, micro_batches: int) -> None:
    for stage, rule in enumerate(checkpoint_rules(mode, stages)):
        seen = [rule(stage, index, micro_batches) for index in range(micro_batches)]
        recomputed = {"always": micro_batches, "except_last": micro_batches - 1, "never": 0}[mode]
        assert seen == [True] * recomputed + [False] * (micro_batches - recomputed)


@given(st.lists(MODES, min_size=1, max_size=4))
def test_a_list_gives_every_stage_its_own_mode(modes: list[str]) -> None:
    rules = checkpoint_rules(modes, len(modes))
    expected = {"always": (True, True), "except_last": (True, False), "never": (False, False)}
    assert [(rule(0, 0, 2), rule(0, 1, 2)) for rule in rules] == [expected[mode] for mode in modes]
    assert never_recomputes(modes) == (set(modes) == {"never"})


def test_a_function_decides_as_it_likes() -> None:
    rules = checkpoint_rules(lambda stage, micro_batch, micro_batches: stage == micro_batch, 3)
    assert [[rule(s, i, 3) for i in range(3)] for s, rule in enumerate(rules)] == torch.eye(3).bool().tolist()
    assert not never_recomputes(lambda stage, micro_batch, micro_batches: False)


def test_all_invalid_modes_are_listed() -> None:
    with pytest.raises(UsageError, match="always, except_last, never") as caught:
        checkpoint_rules(["always", "maybe", 3], 2)
    assert fault_lines(caught) == ["it has 3 entries for 2 stages", "entry 1 is 'maybe'", "entry 2 is 3"]
    for wrong, fault in (
        ("sometimes", "entry 0 is 'sometimes'"),
        (["always", ["never"]][1:], "entry 0 is ['never']"),
        (5, "it is 5"),
        (None, "it is None"),
        (True, "it is True"),
    ):
        with pytest.raises(ValueError, match="checkpoint is one of") as caught:
            checkpoint_rules(wrong, 1)
        assert fault_lines(caught) == [fault]


# --- chunks, executor, loss


def faults(*settings: Any) -> list[str]:
    """The faults that `check_settings` lists, without the expected values."""
    check = Validator("")
    check_settings(check, 0, *settings)
    return [fault.split(";")[0].split(", wanted")[0] for fault in check.faults]


def test_all_faults_of_the_plain_arguments_are_listed() -> None:
    assert faults(0, "warp", 3, "most", ["gpipe"], "never", "no") == [
        "chunks is 0",
        "executor is 'warp'",
        "loss is int",
        "loss_reduction is 'most'",
        "schedule is of type list",
        "deferred_batch_norm is 'no'",
    ]
    assert not faults(1, "auto", None, None, "gpipe", "never", False)


@pytest.mark.parametrize("chunks", [2.0, "2", True])
def test_fractional_chunks_are_one_fault_among_others(chunks: Any) -> None:
    assert faults(chunks, "warp", None, None, "gpipe", "never") == [f"chunks is {chunks!r}", "executor is 'warp'"]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reduction_is_the_argument_or_the_loss_s_or_mean(reduction: str) -> None:
    assert reduction_of(nn.MSELoss(reduction=reduction), None) == reduction
    assert reduction_of(nn.MSELoss(reduction="sum"), reduction) == reduction
    assert reduction_of(lambda output, target: output, None) == "mean"
    bound = partial(nn.functional.mse_loss, reduction=reduction)
    assert reduction_of(bound, None) == reduction
    assert reduction_of(partial(nn.functional.mse_loss, reduction="none"), reduction) == reduction
    with pytest.raises(UsageError, match="'none'"):
        reduction_of(nn.MSELoss(reduction="none"), None)
    assert reduction_of(None, None) == "mean"
    with pytest.raises(UsageError, match="there is no loss"):
        reduction_of(None, reduction)


def test_a_weight_is_for_means_only() -> None:
    assert reduction_of(nn.MSELoss(), None, len) == "mean"
    with pytest.raises(UsageError, match=r"loss_weight is 3; give a function target -> number, the denominator"):
        reduction_of(nn.MSELoss(), None, 3)
    for loss, reduction in ((nn.MSELoss(), "sum"), (nn.MSELoss(reduction="sum"), None)):
        with pytest.raises(UsageError, match=r"leave it out for losses that are added up"):
            reduction_of(loss, reduction, len)
    with pytest.raises(UsageError, match=r"loss_weight is .* there is no loss"):
        reduction_of(None, None, len)


# --- schedule


def test_only_a_schedule_that_splits_goes_without_a_loss() -> None:
    check_schedule("gpipe", 3, 4, None)
    check_schedule(gpipe(3, 4), 3, 4, None)
    check_schedule("1f1b", 3, 4, nn.MSELoss())
    with pytest.raises(UsageError, match=r"'1f1b' starts backward before all forwards have ended.*loss=fn"):
        check_schedule("1f1b", 3, 4, None)
    with pytest.raises(UsageError, match="'this table'"):
        check_schedule(Schedule.parse("0F0,0B0,0F1,0B1"), 1, 2, None)


def test_a_table_of_another_size_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"2 stages, but 3 are needed(.|\n)*2 micro-batches, but 4 are needed"):
        check_schedule(gpipe(2, 2), 3, 4, None)


# --- balance and devices


def test_devices_may_repeat_and_may_be_one() -> None:
    assert resolve_layout(linears(1, 2, 3), [1, 1], ["cpu", "cpu"], None) == ([1, 1], [CPU, CPU])
    assert resolve_layout(linears(1, 2, 3), None, "cpu", None) == ([2], [CPU])
    assert resolve_layout(linears(1, 2, 3), [1, 1], [CPU, "cpu:0"], None) == ([1, 1], [CPU, CPU])
    assert resolve_layout(linears(1, 2, 3), [1, 1], ["cpu:0", "cpu:0"], None) == ([1, 1], [CPU, CPU])


@pytest.mark.parametrize(
    ("wrong", "stages"),
    [(5, []), ("23", []), ({2: 0, 3: 0}, []), ({2, 3}, []), ([2.7, 2.6], [0, 1]), ([True, 4], [0]), ([4, None], [1])],
)
def test_balance_must_be_a_sequence_of_ints(wrong: Any, stages: list[int]) -> None:
    with pytest.raises(PartitionError, match="each an int; but") as caught:
        sizes_of(wrong)
    assert fault_lines(caught) == [f"that of stage {stage} is {wrong[stage]!r}" for stage in stages]
    assert stages or repr(wrong) in str(caught.value)


def test_a_balance_may_be_any_row_of_whole_numbers() -> None:
    for right in ([2, 3], (2, 3), torch.tensor([2, 3]), iter([2, 3])):
        assert sizes_of(right) == [2, 3]


def test_all_invalid_devices_are_listed() -> None:
    assert places_of(CPU) == places_of("cpu") == [CPU]
    with pytest.raises(UsageError, match="'cuda:1'") as caught:
        places_of(["cpu", "gpu", None, 2.5])
    assert fault_lines(caught) == ["devices[1] is 'gpu'", "devices[2] is None", "devices[3] is 2.5"]
    with pytest.raises(UsageError, match=r"it is 3\.5"):
        places_of(3.5)


@pytest.mark.parametrize(
    ("cuda", "count", "words"),
    [
        (None, 0, "is a build for the CPU (torch.version.cuda is None); install one with CUDA"),
        ("13.0", 0, "sees no CUDA device (torch.cuda.device_count() is 0); look at nvidia-smi"),
        ("13.0", 2, "sees 2 (torch.cuda.device_count()); give numbers below 2"),
    ],
)
def test_cuda_devices_that_are_absent_are_explained(
    cuda: str | None, count: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(UsageError) as caught:
        Pipe(nn.Sequential(nn.ReLU(), nn.ReLU()), chunks=1, devices=["cuda:2", "cuda:3"])
    (fault,) = fault_lines(caught)
    assert fault.startswith("devices[0] is 'cuda:2' and devices[1] is 'cuda:3', but PyTorch ") and words in fault
    assert fault.endswith(", or give devices=['cpu', 'cpu']")


@pytest.mark.parametrize(("wrong", "right"), [("1F1B", "1f1b"), ("zero-bubble", "zero_bubble"), ("gPipe", "gpipe")])
def test_a_misspelt_schedule_is_corrected(wrong: str, right: str) -> None:
    with pytest.raises(ScheduleError, match=f"no schedule '{wrong}'; did you mean '{right}'"):
        Pipe(nn.Sequential(nn.ReLU(), nn.ReLU()), chunks=1, schedule=wrong)


@pytest.mark.parametrize(("wrong", "right"), [("chunk", "chunks"), ("device", "devices"), ("Schedule", "schedule")])
def test_a_misspelt_argument_is_corrected(wrong: str, right: str) -> None:
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{wrong}'; did you mean '{right}'\?"):
        Pipe(nn.Sequential(nn.ReLU()), **{wrong: 1})


def test_routes_of_a_sequential_pipe_are_explained() -> None:
    pipe = Pipe(nn.Sequential(nn.ReLU(), nn.ReLU()), chunks=1, devices=["cpu", "cpu"])
    with pytest.raises(AttributeError, match=r"cut by split=.*the output of each stage goes to the next one"):
        _ = pipe.routes


def test_devices_of_untested_types_are_rejected() -> None:
    """The error names each type once, with the supported types."""
    with pytest.raises(UsageError, match="devices are names") as caught:
        Pipe(nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU()), chunks=1, devices=["mps", "xpu:1", "mps"])
    why = "is not supported: nothing was tested there; use 'cpu' or 'cuda'"
    assert fault_lines(caught) == [f"device 'mps' {why}", f"device 'xpu:1' {why}"]


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:1"], None], ids=["named", "default"])
@pytest.mark.parametrize("options", [{}, {"split": ["1"]}, {"balance": [1, 1]}], ids=["plain", "split", "balance"])
def test_gpus_without_peer_access_are_rejected(devices: Any, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes a pair in which only one GPU can read the memory of the other."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one.index, other.index) == (0, 1))
    with pytest.raises(
        UsageError, match="cuda:0 and cuda:1 have no peer access, which torchweft is not tested without"
    ):
        Pipe(linears(1, 2), chunks=1, devices=devices, **options)
    assert places_of(["cuda:1", "cuda:1", "cpu"]) == [torch.device("cuda:1"), torch.device("cuda:1"), CPU]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the default is the GPUs")
def test_default_devices_are_cpus_in_the_length_of_the_balance() -> None:
    """Without devices and balance, there are two stages on the CPU."""
    assert resolve_layout(linears(1, 2, 3, 4), None, None, None)[1] == [CPU, CPU]
    assert resolve_layout(linears(1, 2), None, None, None) == ([1], [CPU])
    assert resolve_layout(linears(1, 2, 3, 4), [1, 1, 1], None, None) == ([1, 1, 1], [CPU] * 3)


def test_default_balance_spreads_parameters_evenly() -> None:
    """A device without a layer stays idle."""
    assert resolve_layout(linears(1, 2, 3), None, ["cpu"] * 5, None) == ([1, 1], [CPU, CPU])
    assert resolve_layout(linears(1, 1, 1, 1, 100), None, ["cpu", "cpu"], None)[0] == [3, 1]
    assert resolve_layout(linears(100, 1, 1, 1, 1), None, ["cpu", "cpu"], None)[0] == [1, 3]


class Loops(nn.Module):
    """Slow layer without parameters."""

    def forward(self, x):
        for _ in range(3000):
            x = x + 0
        return x


def test_with_a_sample_measured_time_is_spread_evenly() -> None:
    model = nn.Sequential(Loops(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    assert resolve_layout(model, None, ["cpu", "cpu"], None)[0] != [1, 3]
    assert resolve_layout(model, None, ["cpu", "cpu"], torch.ones(2, 4))[0] == [1, 3]


def test_no_fault_hides_another_one() -> None:
    wrong: dict[str, Any] = {
        "chunks": 0,
        "executor": "thread",
        "balance": [1, 3],
        "checkpoint": "nevr",
        "schedule": "zigzag",
        "loss_reduction": "sum",
    }
    with without_type_checks(), pytest.raises(UsageError) as caught:
        Pipe(linears(1, 2, 3), devices=["cpu", "cpu"], **wrong)
    for words in ("chunks is 0", "'thread'", "balance [1, 3] places 4", "'nevr'", "'zigzag'", "there is no loss"):
        assert words in str(caught.value)
    with without_type_checks(), pytest.raises(PartitionError, match=r"is 'one'(?s:.)*is 'two'"):
        Pipe(linears(1, 2, 3), chunks=2, balance=["one", "two"])
    pipe = Pipe(linears(1, 2, 3), chunks=2, balance=[1, 1], devices=["cpu", "cpu"])
    pipe.executor, pipe.balance, pipe.checkpoint = wrong["executor"], [2, 2], wrong["checkpoint"]
    with without_type_checks(), pytest.raises(UsageError, match=r"'thread'(?s:.)*balance \[2, 2\](?s:.)*'nevr'"):
        pipe(torch.ones(2, 1))


def test_all_faults_of_the_layout_are_listed() -> None:
    with pytest.raises(PartitionError) as caught:
        resolve_layout(linears(1, 2, 3, 4), [4, 0], ["cpu"], None)
    assert fault_lines(caught) == [
        "stage 1 has 0 layers, but needs at least one",
        "balance [4, 0] places 4 layers, but the module has 3",
        "balance has 2 stages, but there are 1 devices; give one per stage, which may repeat, "
        "as in devices=['cpu'] * 2",
    ]
