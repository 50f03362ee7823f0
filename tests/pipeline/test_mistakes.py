"""Mistakes of a first hour: each is an error or a warning that says what was meant."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchweft as weft
from tests.type_checks import without_type_checks
from torchweft.core.errors import WeftError

X, Y = torch.randn(8, 8), torch.randint(4, (8,))
CPU = torch.device("cpu")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is meant")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


NET = Net()


def layers(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), *more, nn.Linear(8, 4))


def make(model: nn.Module | None = None, **options: Any) -> weft.Pipe:
    with without_type_checks():
        return weft.Pipe(model or layers(), **{"chunks": 4, "devices": ["cpu", "cpu"], **options})


def one_argument(output: torch.Tensor) -> torch.Tensor:
    return output.sum()


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "class as loss": (lambda: make(loss=nn.CrossEntropyLoss), "is the class CrossEntropyLoss; give .*Loss()"),
    "loss of one argument": (
        lambda: make(loss=one_argument),
        r"one_argument\(output.*but it is called as loss\(output, target\)",
    ),
    "devices gpu": (lambda: make(devices="gpu:0"), r"did you mean devices=\['cuda:0'\]\?"),
    "devices list": (lambda: make(devices=["GPU 0", "1"]), r"did you mean devices=\['cuda:0', 'cuda:1'\]\?"),
    "devices text": (lambda: make(devices="cpu,cpu"), r"did you mean devices=\['cpu', 'cpu'\]\?"),
    "no devices": (lambda: make(devices=[]), r"it is \[\]; give at least one"),
    "zero devices": (lambda: make(devices=0), r"it is \[\]; give at least one, as in devices=\['cuda:0'\]"),
    "a bool": (lambda: make(devices=True), r"devices\[0\] is True"),
    "split text": (lambda: make(NET, split="blocks.2"), r"did you mean split=\['blocks.2'\]\?"),
    "split of a list": (lambda: make(NET, split="blocks"), r"did you mean split=\['blocks.2'\]\?"),
    "split typo": (lambda: make(NET, split="autom"), "did you mean split='auto'"),
    "split module": (lambda: make(NET, split=NET.blocks[1]), r"did you mean split=\['blocks.1'\]\?"),
    "split modules": (lambda: make(NET, split=[NET.blocks[1], "blocks.3"]), r"=\['blocks.1', 'blocks.3'\]\?"),
    "split of another": (lambda: make(NET, split=[nn.Linear(1, 1)]), "the model has no such module"),
    "split dict": (lambda: make(NET, split={"blocks.2": "cuda:1"}), r"did you mean split=\['blocks.2'\]\?"),
    "split number": (lambda: make(NET, split=2), "did you mean split='auto', devices=2"),
    "split nothing": (lambda: make(NET, split=[]), r"such as split=\['blocks.3'\]"),
    "split strange": (lambda: make(NET, split="layers"), r"such as split=\['blocks.3'\]"),
    "SplitPoint": (lambda: make(NET, split={"first": SplitPoint.BEGINNING}), r"mean split=\['first'\]\?"),
    "SplitPoint.END": (lambda: make(NET, split={"first": SplitPoint.END}), "the name of the module after it"),
    "Schedule1F1B": (lambda: make(schedule="Schedule1F1B"), "did you mean '1f1b'"),
    "Schedule1F1B class": (lambda: make(schedule=Schedule1F1B), "did you mean '1f1b'"),
    "n_microbatches": (lambda: make(n_microbatches=4), "did you mean 'chunks'"),
    "loss_fn": (lambda: make(loss_fn=functional.cross_entropy), "did you mean 'loss'"),
    "split_spec": (lambda: make(split_spec={}), "did you mean 'split'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_error_says_what_was_meant(mistake: str) -> None:
    make_mistake, words = MISTAKES[mistake]
    with pytest.raises(WeftError, match=words):
        make_mistake()


@without_gpu
@pytest.mark.parametrize("move", [nn.Module.cuda, lambda pipe: pipe.to("cuda")], ids=["cuda", "to"])
@pytest.mark.parametrize("options", [{}, {"split": ["1"]}], ids=["layers", "split"])
def test_cuda_on_a_machine_without_it_is_explained(move: Callable[[nn.Module], object], options: Any) -> None:
    with pytest.raises(WeftError, match=r"cannot be moved to CUDA: .*CUDA.*devices="):
        move(make(**options))


@without_gpu
def test_number_of_devices_and_auto_are_accepted() -> None:
    assert make(devices=2).devices == make(devices="auto").devices == [CPU, CPU]
    assert make(NET, devices=3, split=["blocks.1", "blocks.2"]).devices == [CPU] * 3


def test_number_of_devices_means_the_first_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is too large names the GPUs that are absent. With a group it is the number of this rank's GPU."""
    monkeypatch.setattr("torchweft.pipeline.devices.cuda_devices", lambda: [torch.device("cuda:0")])
    requested = weft.pipeline.devices.requested_devices
    assert requested(2, grouped=False) == ["cuda:0", "cuda:1"]
    assert requested(1, grouped=True) == 1 and requested("auto", grouped=True) is None


@pytest.mark.parametrize("options", [{}, {"split": ["1"]}], ids=["layers", "split"])
def test_forgotten_target_is_a_warning(options: Any) -> None:
    """In evaluation the call is a prediction."""
    pipe = make(loss=functional.cross_entropy, **options)
    with pytest.warns(UserWarning, match=r"no target= was given.*pipe\(x, target=y\)"):
        pipe(X)
    pipe(X, target=Y).backward()
    with torch.no_grad():
        pipe(X)
    pipe.eval()(X)


@pytest.mark.parametrize("name", ["targets", "labels"])
@pytest.mark.parametrize("options", [{}, {"split": ["1"]}], ids=["layers", "split"])
def test_other_name_of_the_target_gets_a_note(name: str, options: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword") as caught:
        make(loss=functional.cross_entropy, **options)(X, **{name: Y})
    assert "did you mean target=?" in caught.value.__notes__[-1]


@pytest.mark.parametrize("options", [{}, {"split": ["1"]}], ids=["layers", "split"])
def test_batch_norm_in_micro_batches_is_a_warning(options: Any) -> None:
    """Nothing is warned of where the numbers are those of the model, or where the user has chosen."""
    with pytest.warns(UserWarning, match=r"1 and 1 more .*GroupNorm.*deferred_batch_norm=True") as caught:
        make(layers(nn.BatchNorm1d(8), nn.BatchNorm1d(8)), **options)
    assert len(caught) == 1
    make(layers(nn.BatchNorm1d(8)), chunks=1, **options)
    make(layers(nn.BatchNorm1d(8)).eval(), **options)
    make(layers(nn.BatchNorm1d(8)), deferred_batch_norm=True, **options)
    make(layers(nn.GroupNorm(2, 8)), **options)


@pytest.mark.parametrize("options", [{}, {"split": ["1"]}], ids=["layers", "split"])
def test_too_few_ranks_name_the_option_of_torchrun(process_group: None, options: Any) -> None:
    with pytest.raises(WeftError, match=r"start 2 ranks \(torchrun --nproc-per-node 2"):
        make(devices=["cpu", "cpu"], group=dist.group.WORLD, **options)


@pytest.mark.parametrize(
    ("options", "remedy"), [({}, "give the model 4 layers"), ({"split": ["1", "2"]}, "make 4 stages by split=")]
)
def test_too_many_ranks_name_the_option_of_torchrun(options: Any, remedy: str) -> None:
    """Four ranks for three layers."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with pytest.raises(WeftError, match="3 workers for 3 stages, but the group has 4 ranks") as caught:
            make(layers(nn.ReLU()), devices=None, group=dist.group.WORLD, **options)
    finally:
        dist.destroy_process_group()
    assert "start 3 ranks (torchrun --nproc-per-node 3" in str(caught.value) and remedy in str(caught.value)


class SwappedCell(nn.LSTMCell):
    def forward(self, state: Any, x: Any) -> Any:
        return super().forward(x, state)


WEIGHT, STATE = torch.randn(6, 4), torch.zeros(6)
SWAPPED: dict[str, tuple[Callable[..., object], str]] = {
    "arguments": (
        weft.Recurrent(lambda h, x: (h, h + functional.linear(x, WEIGHT)), initial=STATE),
        "cell(x, state) -> (y, new_state)",
    ),
    "arguments of PyTorch's cell": (weft.Recurrent(SwappedCell(4, 6)), "cell(x, state) -> new_state"),
    "arguments with the step": (
        weft.Recurrent(lambda t, x, h: (h, h + functional.linear(x, WEIGHT)), initial=STATE, time_step=True),
        "cell(x, state, t) -> (y, new_state)",
    ),
    "results": (weft.Recurrent(lambda x, h: (h, x), initial=STATE), "cell(x, state) -> (y, new_state)"),
    "arguments of a step net": (
        lambda x: weft.recurrent_net(lambda s, i: {"h": s["h"] + i["x"]}, {"x": x}, {"h": STATE}, {"h": "h"}),
        "step(inputs, states) -> outputs",
    ),
    "arguments of a step net with all": (
        lambda x: weft.recurrent_net(
            lambda r, t, i, s: {"h": s["h"] + i["x"]},
            {"x": x},
            {"h": STATE},
            {"h": "h"},
            references={"w": WEIGHT},
            time_step=True,
        ),
        "step(inputs, states, references, t) -> outputs",
    ),
}


@pytest.mark.parametrize("what", SWAPPED)
def test_cell_with_swapped_parts_is_told_how_it_is_called(what: str) -> None:
    """The error can be one of PyTorch, about shapes, with a note."""
    call, form = SWAPPED[what]
    with pytest.raises(Exception) as caught:
        call(torch.randn(5, 3, 4))
    assert form in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def test_package_lists_only_public_names() -> None:
    assert {name for name in dir(weft) if not name.startswith("__")} == set(weft.__all__)


def test_message_of_a_valid_pipe_is_none() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(loss=functional.cross_entropy)(X, target=Y).backward()
