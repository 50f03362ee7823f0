"""Work for ranks: models with an ordinary forward() over processes, compared with the model itself."""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchweft as weft
from tests.pipeline.split.test_changing_lengths import LENGTHS, WIDTH, Labelled, Padding
from tests.pipeline.split.zoo import HUGGING, UNet, ids, text
from torchweft.core.errors import SpecError
from torchweft.pipeline.microbatch import split
from torchweft.pipeline.processes import process_pipe, split_model
from torchweft.pipeline.processes.loans import Loans
from torchweft.pipeline.processes.ownership import plan_loans
from torchweft.pipeline.split import program_cache
from torchweft.pipeline.weights import map_tensors

ROWS = (8, 7, 3, 1, 8)


def _squares(output: Any) -> Tensor:
    """Sum of squares of all outputs, which is a sum over rows."""
    leaves = [output.logits] if hasattr(output, "logits") else [output["logits"], output["deep"][0]]
    return sum((leaf.double().square().sum() for leaf in leaves), start=torch.zeros(()))


def _without_labels(inputs: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
    return lambda rows: {key: value for key, value in inputs(rows).items() if key != "labels"}


def _t5_pairs(rows: int) -> dict[str, Any]:
    return {
        "input_ids": ids(rows),
        "attention_mask": torch.ones(rows, 12, dtype=torch.long),
        "decoder_input_ids": ids(rows, 7),
    }


Family = tuple[Callable[[], nn.Module], Callable[[int], dict[str, Any]], list[str]]
FAMILIES: dict[str, Family] = {
    "unet": (lambda: UNet().eval(), lambda n: {"x": torch.randn(n, 3, 9, 9), "scale": 2.0}, ["middle", "up1"]),
    "gpt2": (HUGGING["gpt2"].make, _without_labels(text), ["transformer.h.1", "transformer.h.3"]),
    "llama": (HUGGING["llama"].make, _without_labels(text), ["model.layers.1", "model.layers.3"]),
    "t5": (HUGGING["t5"].make, _t5_pairs, ["encoder.block.2", "decoder.block.1"]),
    "mixtral": (
        HUGGING["mixtral"].make,
        _without_labels(HUGGING["mixtral"].inputs),
        ["model.layers.1", "model.layers.3"],
    ),
}


@contextmanager
def double() -> Iterator[None]:
    """Create modules and tensors in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def on_meta(model: nn.Module) -> nn.Module:
    """Move the parameters of the model to the meta device. Tied parameters stay tied."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                empty = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                module._parameters[key] = moved.setdefault(id(parameter), empty)
    return model


def load_own(pipe: Any, weights: dict[str, Tensor]) -> None:
    """Replace the parameters of this rank, which are on the meta device, by their values."""
    names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    map_tensors(pipe.module, lambda x: nn.Parameter(weights[names[id(x)]].detach().clone()) if id(x) in names else x)


@double()
def train_beside_plain(name: str, schedule: str, sampled: bool = False, meta: bool = False) -> dict[str, Any]:
    """The worst difference of losses and gradients from the model itself, relative to the largest."""
    make, inputs, split = FAMILIES[name]
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = make()
    split = [f"transformer.h.{k}" for k in (1, 2, 3)] if schedule == "interleaved" else split[: size - 1]
    # The loss that balances the experts of Mixtral is not a mean over rows.
    inside: dict[str, Any] = {"loss_reduction": "mean", "verify": False} if name == "mixtral" else {}
    if schedule != "gpipe":
        inside = {"loss": lambda output, _: _squares(output), "loss_reduction": "sum"}
    sample = inputs(2) if sampled else None
    model = on_meta(copy.deepcopy(plain)) if meta else copy.deepcopy(plain)
    theirs = dict(plain.named_parameters(remove_duplicate=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # e.g. about a sample that is not used
        warnings.filterwarnings("ignore", ".*spread unevenly over the ranks")
        settings: dict[str, Any] = {"split": split, "schedule": schedule, "sample": sample, **inside}
        pipe = weft.Pipe(model, chunks=4, group=dist.group.WORLD, **settings)
    if meta:
        load_own(pipe, theirs)
    assert isinstance(pipe, type(plain)) and inspect.signature(pipe.forward) == inspect.signature(plain.forward)
    worst = 0.0
    for rows in ROWS:
        call = inputs(rows)
        pipe.zero_grad()
        plain.zero_grad()
        arguments = call if rank == 0 else {}
        if schedule != "gpipe":
            loss = pipe(**arguments, target=torch.zeros(rows) if rank == size - 1 else None)
        else:
            loss = _squares(pipe(**arguments))
        loss.backward()
        expected = _squares(plain(**call))
        expected.backward()
        worst = max(worst, float((loss - expected).abs() / expected.abs()))
        for key, parameter in pipe.named_parameters():
            gradient, other = parameter.grad, theirs[key].grad
            assert (gradient is None) == (other is None), key
            if gradient is not None:
                worst = max(worst, float((gradient - other).abs().max() / (1 + other.abs().max())))
    keys = [key for key, _ in pipe.named_parameters()]
    return {"worst": worst, "keys": keys, "all": [key for key, _ in plain.named_parameters()]}


class Glue(nn.Module):
    """Code between blocks that reads parameters and buffers of several stages, and writes into a block's result."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))
        self.third.register_buffer("offset", torch.linspace(0, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x) + self.third.offset  # a buffer of a later stage
        x += self.scale
        x = x.to(self.third.weight.device)
        x = self.second(x) + self.third.bias * self.scale  # a parameter of a later stage
        return self.third(x.tanh()).to(self.first.weight.device) @ self.first.weight.t()


class InPlace(nn.Module):
    """A block adds a parameter to its input in place, and the input is read again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), AddsInPlace(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.second(x)
        return self.third(x + y) + y[:, :1]


class AddsInPlace(nn.Module):
    """Writes into its input, and returns a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        x += self.bias
        return x.view(-1, 3, 2).flatten(1)


class Branches(nn.Module):
    """Branches on its data between blocks, and on a parameter of the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = y.tanh() if bool((x > 0).all()) else y.sigmoid() * 2
        if float(self.third.bias.detach().sum()) < 1e6:
            y = y + 1
        return self.third(self.second(y).tanh())


class Reordered(nn.Module):
    """Registers its blocks in another order than it calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.third, self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).tanh()).tanh())


class Keeping(nn.Module):
    """A block that keeps a number and a tensor, which the code around it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), Remembers(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        return self.third(y) + self.second.kept * self.second.factor


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.kept, self.factor = self.inner(x).tanh(), 2.0
        return self.kept + x


class Scales(nn.Module):
    """Code between blocks that reads six scales in every stage, so that all but the first stage borrow them."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.tensor(0.7 + k / 10) for k in range(6)])
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.first, self.second, self.third):
            x = block(x)
            for k, scale in enumerate(self.scales):
                x = (x * scale + k).tanh()
        return x


MODELS: dict[str, type[nn.Module]] = {
    "scales between blocks": Scales,
    "parameters between blocks": Glue,
    "writes into an input": InPlace,
    "branches": Branches,
    "another order": Reordered,
    "attributes of a block": Keeping,
}


def _inputs(rows: int, positive: bool = False) -> Tensor:
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))
    return x.abs() if positive else x


@double()
def compare_small(name: str, checkpoint: str = "never", output: str = "all") -> dict[str, Any]:
    """Compare a small model with the model itself. Its stages begin at `second` and `third`."""
    torch.manual_seed(0)
    plain = MODELS[name]()
    size, last = dist.get_world_size(), dist.get_rank() == dist.get_world_size() - 1
    points = ["second", "third"][3 - size :]
    settings: Any = {"chunks": 3, "checkpoint": checkpoint, "output": output, "group": dist.group.WORLD}
    pipe = weft.Pipe(copy.deepcopy(plain), split=points, **settings)
    worst = 0.0
    theirs = dict(plain.named_parameters())
    for step in range(4):
        x = _inputs(6 - step, positive=step % 2 == 1)
        pipe.zero_grad()
        plain.zero_grad()
        result = pipe(x if dist.get_rank() == 0 else None)
        expected = torch.cat([plain(piece) for piece in split(x, 3)])
        if output == "all" or last:
            worst = max(worst, float((result - expected).detach().abs().max()))
        result.square().sum().backward()
        expected.square().sum().backward()
        worst = max([worst, *(float((p.grad - theirs[key].grad).abs().max()) for key, p in pipe.named_parameters())])
    with torch.no_grad():
        x = _inputs(5)
        seen = pipe(x if dist.get_rank() == 0 else None)
        expected = torch.cat([plain(piece) for piece in split(x, 3)])
    if output == "all" or last:
        worst = max(worst, float((seen - expected).abs().max()))
    assert not seen.requires_grad
    return {
        "worst": worst,
        "recordings": pipe.statistics()["recordings"],
        "keys": sorted(pipe.state_dict()),
        "all": sorted(plain.state_dict()),
        "buffers": {key: buffer.tolist() for key, buffer in pipe.named_buffers()},
        "calls": {key: buffer.tolist() for key, buffer in plain.named_buffers()},
    }


class Settable(nn.Module):
    """Branches on attributes and rows between blocks, and on an iterator with a state that no recording sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.shift, self.rise, self.swap, self.counter = 0.0, 0.0, False, iter([])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * (1 + self.rise) if bool((x > 0).all()) else self.first(x) + self.shift
        x = self.third(x) if self.swap else x.tanh()
        return self.third(self.second(x)) + next(self.counter, 0.0)


def borrow_wrongly(wrong: str) -> list[tuple[str, str]]:
    """The errors of two first steps, of a pipe with split points and of one with tied layers, in which numbers of the
    loans belong to other parameters: on the ranks that borrow, or on the owner."""

    def plan_wrongly(*args: Any) -> Loans:
        loans = plan_loans(*args)
        if wrong == "borrower":
            places = {
                stage: [(number, other) for (number, _), (_, other) in zip(x, x[::-1], strict=True)]
                for stage, x in loans.places.items()
            }
            return Loans(loans._loans, places, dist.get_rank())
        pairs = zip(loans._loans, reversed(loans._loans), strict=True)
        return Loans([loan._replace(place=other.place) for loan, other in pairs], loans.places, dist.get_rank())

    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    for key in ("weight", "bias"):
        setattr(model[2], key, getattr(model[0], key))
    errors: list[tuple[str, str]] = []
    pipes: list[weft.Pipe] = []  # kept, because the other rank can still be reading the error when a pipe is freed
    with patch.object(split_model, "plan_loans", plan_wrongly), patch.object(process_pipe, "plan_loans", plan_wrongly):
        for layers, cut in ((Scales(), {"split": ["second"]}), (model, {"balance": [2, 1]})):
            pipes.append(weft.Pipe(layers, chunks=2, group=dist.group.WORLD, **cut))  # type: ignore[arg-type]
            try:
                pipes[-1](_inputs(4))
            except Exception as error:
                errors.append((type(error).__name__, str(error)))
    return errors


def fail_apart(kind: str) -> tuple[str, str, float]:
    """The error of a call with ranks that differ, or a model with hidden state. The next call succeeds."""
    torch.manual_seed(0)
    plain, rank = Settable(), dist.get_rank()
    loss: Any = {"loss": lambda output, _: output.square().sum(), "loss_reduction": "sum"}
    pipe: Any = weft.Pipe(copy.deepcopy(plain), chunks=2, split=["second"], group=dist.group.WORLD)
    x, targets = _inputs(4), {}
    if kind == "hidden":
        pipe.module.counter = iter([float(k) for k in range(100)])
    elif kind == "late":  # on one rank, after a step that all ranks did alike
        pipe(x)
        pipe.module.shift = float(rank)
    elif kind == "rise":  # the same, in the path of the second micro-batch
        pipe = weft.Pipe(copy.deepcopy(plain), chunks=2, split=["second"], group=dist.group.WORLD, **loss)
        x, targets = torch.cat([-x[:2].abs(), x[2:].abs()]), {"target": torch.zeros(4)}
        pipe(x, **targets), pipe(x, **targets)  # the second step compares again with the plain forward
        pipe.module.rise = float(rank)
    else:
        setattr(pipe.module, kind, rank)
    try:
        pipe(x, **targets)
        error: BaseException = AssertionError("no error")
    except Exception as caught:
        error = caught
    pipe.module.shift, pipe.module.rise, pipe.module.swap, pipe.module.counter = 0.0, 0.0, False, iter([])
    x = _inputs(4)
    return type(error).__name__, str(error), float((pipe(x) - plain(x)).detach().abs().max())


@double()
def load_where_the_sample_fails() -> dict[str, Any]:
    """The code branches on a parameter on the meta device, so that the order of registration is used."""
    torch.manual_seed(0)
    plain = Branches()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = on_meta(copy.deepcopy(plain))
        pipe: Any = weft.Pipe(model, chunks=2, split=["second"], sample=_inputs(2), group=dist.group.WORLD)
    try:
        pipe(_inputs(4))
        error = ""
    except Exception as failed:
        error = str(failed)
    load_own(pipe, dict(plain.named_parameters()))
    worst = float((pipe(_inputs(4)) - plain(_inputs(4))).detach().abs().max())
    return {"words": [str(warning.message) for warning in caught], "error": error, "worst": worst}


@double()
def cut_automatically() -> tuple[list[str], float]:
    """The split points that ranks agree on, and the difference from the model."""
    torch.manual_seed(0)
    plain = Reordered()
    pipe: Any = weft.Pipe(copy.deepcopy(plain), chunks=2, split="auto", sample=_inputs(2), group=dist.group.WORLD)
    again = copy.deepcopy(pipe)
    x = _inputs(4)
    return pipe.split, float(sum((model(x) - plain(x)).detach().abs().max() for model in (pipe, again)))


class Counts(nn.Module):
    """Branches on a counter of calls in the buffer of a block. With `early`, the first stage branches too."""

    def __init__(self, early: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third, self.early = nn.Linear(6, 6), nn.Linear(6, 6), Counter(), early

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x + self.third.seen if self.early else x)
        y = self.second(y)
        return self.third(y * 2 if float(self.third.seen) > 5 else y)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.inner(x).tanh()


@double()
def count_in_a_buffer() -> tuple[float, int]:
    """Steps of changing length, so that programs are recorded after the owner of the buffer has changed it."""
    torch.manual_seed(0)
    plain = Counts()
    pipe: Any = weft.Pipe(copy.deepcopy(plain), chunks=1, split=["second"], group=dist.group.WORLD)
    worst = 0.0
    for rows in range(1, 11):
        x = _inputs(rows)
        worst = max(worst, float((pipe(x) - plain(x)).detach().abs().max()))
    return worst, pipe.statistics()["recordings"]


def own_unevenly() -> list[str]:
    """Warnings for a model with most of its modules registered before the split point, without and with a sample."""
    words: list[str] = []
    for sample in (None, _inputs(2)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = Reordered()  # registers the last module first
            weft.Pipe(model, chunks=2, split=["second"], sample=sample, group=dist.group.WORLD)
        words += [str(warning.message) for warning in caught]
    return words


def share_a_counter() -> str:
    """A buffer that the last stage writes to, and the first one reads."""
    pipe: Any = weft.Pipe(Counts(early=True), chunks=1, split=["second"], group=dist.group.WORLD)
    try:
        pipe(_inputs(2))
    except SpecError as error:
        return str(error)
    return "no error"


class ReadsThenCounts(nn.Module):
    """The code between blocks reads a buffer, and then writes to it."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * (self.seen * 1)
        self.seen += 1
        return self.second(x)


def read_then_count() -> str:
    pipe: Any = weft.Pipe(ReadsThenCounts(), chunks=2, split=["second"], group=dist.group.WORLD)
    try:
        pipe(torch.randn(4, 8))
    except weft.errors.InPlaceError as error:
        return str(error)
    return "no error"


@double()
def drop_programs() -> list[tuple[float, int, int]]:
    """Difference, recordings and kept programs of each call, for more kinds of calls than kept programs."""
    torch.manual_seed(0)
    plain = Reordered()
    pipe: Any = weft.Pipe(copy.deepcopy(plain), chunks=1, split=["second"], group=dist.group.WORLD)
    before, program_cache.PROGRAMS = program_cache.PROGRAMS, 2
    results: list[tuple[float, int, int]] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for rows in (1, 2, 3, 4, 1):
                x = _inputs(rows)
                worst = float((pipe(x) - plain(x)).detach().abs().max())
                results.append((worst, pipe.statistics()["recordings"], len(pipe._layout._split_model._by_number)))
    finally:
        program_cache.PROGRAMS = before
    return results


@double()
def train_on_lengths(block: str) -> tuple[float, int]:
    """The largest difference from the model in steps of several lengths, and the number of recordings."""
    torch.manual_seed(0)
    plain = Labelled(nn.Tanh() if block == "tanh" else Padding(halves=False))
    pipe: Any = weft.Pipe(copy.deepcopy(plain), chunks=4, split=["second"], group=dist.group.WORLD)
    worst = 0.0
    for length in LENGTHS:
        x, labels = torch.randn(8, length, WIDTH), torch.randint(-1, 2, (8, length))
        expected, result = plain(x, labels), pipe(x, labels)
        for net, loss in ((plain, expected), (pipe, result)):
            net.zero_grad()
            loss.backward()
        gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
        worst = max(worst, float((expected - result).detach().abs()))
        for name, parameter in pipe.named_parameters():
            worst = max(worst, float((parameter.grad - gradients[name]).abs().max()))
    return worst, pipe.statistics()["recordings"]


@double()
def replace_parameters() -> float:
    """A parameter that another stage reads is replaced by another tensor between steps."""
    torch.manual_seed(0)
    plain = Glue()
    pipe: Any = weft.Pipe(copy.deepcopy(plain), chunks=2, split=["second", "third"][:1], group=dist.group.WORLD)
    pipe(_inputs(4))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1.5)
    load_own(pipe, dict(plain.named_parameters()))
    with torch.inference_mode():
        return float((pipe(_inputs(4)) - plain(_inputs(4))).abs().max())


@double()
def raise_in_a_block() -> tuple[str, str, float]:
    """A block of the second rank raises while all ranks record."""
    torch.manual_seed(0)
    plain = Reordered()
    pipe: Any = weft.Pipe(copy.deepcopy(plain), chunks=2, split=["second"], sample=_inputs(2), group=dist.group.WORLD)
    handle = pipe.module.second.register_forward_pre_hook(_raise)
    try:
        pipe(_inputs(4))
        error: BaseException = AssertionError("no error")
    except Exception as caught:
        error = caught
    handle.remove()
    return type(error).__name__, str(error), float((pipe(_inputs(4)) - plain(_inputs(4))).detach().abs().max())


def _raise(module: nn.Module, args: Any) -> None:
    raise ArithmeticError("a poisoned row")
