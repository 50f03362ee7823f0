"""Training with tensors that move between the devices of two stages has the results of the CPU.

cpu-cpu          everywhere: shows that the comparisons work
cuda:0-cpu ...   with one GPU: values move
cuda:0-cuda:1    with two GPUs, otherwise skipped
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pipeline.pipe_cases import Early, Late, chain, rows
from torchweft import NoChunk, Pipe
from torchweft.core.pytree import flatten, unflatten
from torchweft.core.segment import detached_leaf
from torchweft.pipeline import pipe_runtime as engine
from torchweft.pipeline.pipeline_plan import PipelinePlan, staged_plan
from torchweft.pipeline.routing import Message, StageDevice

EXECUTORS = ("serial", "threads", "auto", "graph")
TOLERANCE = 1e-9
Places = tuple[str, str]


@pytest.fixture
def two_gpus(request: pytest.FixtureRequest) -> Places:
    """The names of two GPUs with peer access. Without them, the test is skipped."""
    if (count := torch.cuda.device_count()) < 2:
        pytest.skip(f"{request.node.name}: needs two GPUs, and the number of GPUs is {count}")
    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip(f"{request.node.name}: needs two GPUs with peer access")
    return "cuda:0", "cuda:1"


class CopyingDevice(StageDevice):
    """CPU device of a stage that copies every received tensor, as if it came from another device."""

    def receive(self, message: Message) -> Any:
        leaves, structure = flatten(super().receive(message))
        copies = [detached_leaf(x.detach().clone(), x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]
        return unflatten(structure, copies)

    uploads = 0

    def upload(self, tensor: Tensor) -> Tensor:
        CopyingDevice.uploads += 1
        return tensor.detach().clone()


def plan_with_copies(*args: Any, **options: Any) -> PipelinePlan:
    """The plan of a pipe on the CPU whose stages copy what they receive."""
    plan = staged_plan(*args, **options)
    return replace(plan, places=tuple(CopyingDevice(stage.device) for stage in plan.stages))


@pytest.fixture(
    params=[
        "cpu-cpu",
        "copies",
        *(pytest.param(name, marks=pytest.mark.cuda) for name in ("cuda:0-cpu", "cpu-cuda:0", "cuda:0-cuda:1")),
    ]
)
def places(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Places:
    """The devices of the first and the second stage."""
    if request.param == "copies":
        monkeypatch.setattr(engine, "staged_plan", plan_with_copies)
        return "cpu", "cpu"
    first, _, second = request.param.partition("-")
    return request.getfixturevalue("two_gpus") if second == "cuda:1" else (first, second)


every_executor = pytest.mark.parametrize("executor", EXECUTORS)
every_cut_executor = pytest.mark.parametrize("executor", EXECUTORS[:3])


def assert_same(seen: Any, expected: Any, name: str) -> None:
    """Compare up to rounding, on the CPU."""
    seen = seen.detach().cpu() if isinstance(seen, Tensor) else seen
    torch.testing.assert_close(seen, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{name}: {text}")


def assert_same_gradients(model: nn.Module, plain: nn.Module, places: Places) -> None:
    """Check that all parameters have the gradients of the plain model, each on its own device."""
    for (name, parameter), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert str(parameter.device) in places
        assert parameter.grad is not None and parameter.grad.device == parameter.device, name
        assert_same(parameter.grad, expected.grad, name)


def assert_trains_alike(
    model: nn.Module,
    places: Places,
    call: Callable[[nn.Module, int, str], Tensor],
    *,
    plain: nn.Module | None = None,
    steps: int = 3,
    **options: Any,
) -> nn.Module:
    """Compare SGD steps of a pipe on these devices with those of the plain model on the CPU. `call` returns the loss of
    a step, with inputs on the given device. Returns the trained plain model."""
    plain = copy.deepcopy(model) if plain is None else plain
    pipe = Pipe(model, **{"chunks": 3, "devices": [*places], **options})
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in (model, plain)]
    for step in range(steps):
        loss, expected = call(pipe, step, places[0]), call(plain, step, "cpu")
        assert str(loss.device) == options.get("devices", places)[-1]
        loss.backward()
        expected.backward()
        assert_same(loss, expected.detach(), f"the loss of step {step}")
        assert_same_gradients(model, plain, places)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return plain


def squares(model: nn.Module, step: int, device: str) -> Tensor:
    """The mean square of the outputs of 7 rows."""
    return model(rows(7, 4, seed=step).to(device)).square().mean()


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_a_mini_batch_is_copied_once(monkeypatch: pytest.MonkeyPatch, executor: Any) -> None:
    """And not once per micro-batch, except for a tensor that every micro-batch gets whole."""
    monkeypatch.setattr(engine, "staged_plan", plan_with_copies)
    monkeypatch.setattr(CopyingDevice, "uploads", 0)
    options: Any = {"chunks": 3, "devices": ["cpu", "cpu"], "balance": [1, 1], "executor": executor}
    pipe = Pipe(nn.Sequential(Scaled(), nn.Linear(4, 4)).double(), loss=nn.functional.mse_loss, **options)
    x = rows(7, 4).requires_grad_()
    pipe(x, NoChunk(torch.ones(4).double()), target=rows(7, 4)).backward()
    assert CopyingDevice.uploads == 2 and x.grad is not None  # the input and the target


class Scaled(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale


@every_executor
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_parameters_train_alike(places: Places, executor: Any, checkpoint: Any) -> None:
    assert_trains_alike(chain(4, 8, 8, 2), places, squares, executor=executor, checkpoint=checkpoint)


@every_executor
def test_input_gets_its_gradient_on_its_device(places: Places, executor: Any) -> None:
    """The input is on the second device, so that it moves to the first, and its gradient moves back."""
    model = chain(4, 8, 2)
    plain, x = copy.deepcopy(model), rows(7, 4).requires_grad_()
    moved = x.detach().to(places[1], copy=True).requires_grad_()
    output = Pipe(model, chunks=3, devices=[*places], executor=executor)(moved)
    output.square().sum().backward()
    expected = plain(x)
    expected.square().sum().backward()
    assert str(output.device) == places[1] and moved.grad is not None and moved.grad.device == moved.device
    assert_same(output, expected.detach(), "output")
    assert_same(moved.grad, x.grad, "gradient of the input")


@every_executor
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_skip_passes_the_stage_between(places: Places, executor: Any, checkpoint: Any) -> None:
    """The skip leads from the first device past the second back to the first, and its gradient too."""
    one, two, three = nn.Linear(4, 4).double(), nn.Linear(4, 4).double(), nn.Linear(4, 2).double()
    model = nn.Sequential(one, Early(), two, nn.Tanh(), Late(), three)
    plain = copy.deepcopy(nn.ModuleList([one, two, three]))

    def call(run: nn.Module, step: int, device: str) -> Tensor:
        x = rows(7, 4, seed=step).to(device)
        if run is not plain:
            return run(x).square().mean()
        early = one_(x)
        return three_(early + torch.tanh(two_(early))).square().mean()

    one_, two_, three_ = plain
    options = {"balance": [2, 2, 2], "devices": [*places, places[0]], "checkpoint": checkpoint}
    assert_trains_alike(model, places, call, plain=plain, executor=executor, **options)


class Branches(nn.Module):
    """Returns a nested value, parts of which need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"kept": self.linear(x), "mask": x > 0, "size": (4, None)}


class Joined(nn.Module):
    """Reads the result of `Branches`."""

    def forward(self, value: dict[str, Any]) -> Tensor:
        return (value["kept"] * value["mask"]).sum(1) / value["size"][0]


@every_executor
def test_nested_values_move(places: Places, executor: Any) -> None:
    assert_trains_alike(nn.Sequential(Branches(), Joined()), places, squares, executor=executor)


class Tied(nn.Module):
    """Model whose embedding and head share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.middle, self.head = nn.Embedding(20, 6), nn.Linear(6, 6), nn.Linear(6, 20, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embed(ids))))


@every_executor
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_tied_weight_of_a_split_model(places: Places, executor: Any, checkpoint: Any) -> None:
    def call(run: nn.Module, step: int, device: str) -> Tensor:
        ids = torch.randint(20, (7, 5), generator=torch.Generator().manual_seed(step))
        return run(ids.to(device)).square().mean()

    assert_trains_alike(Tied(), places, call, split=["head"], executor=executor, checkpoint=checkpoint)


@every_executor
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("at", [0, 1], ids=["target-on-first", "target-on-last"])
def test_loss_with_a_target_on_either_device(places: Places, executor: Any, schedule: str, at: int) -> None:
    """Rows of class -100 do not count, so the denominators of the micro-batches differ."""
    loss = nn.CrossEntropyLoss()

    def call(run: nn.Module, step: int, device: str) -> Tensor:
        x, target = rows(7, 4, seed=step), torch.tensor([0, 1, -100, 2, -100, -100, step % 3])
        if isinstance(run, Pipe):
            return run(x.to(device), target=target.to(places[at]))
        return loss(run(x), target)

    assert_trains_alike(chain(4, 8, 3), places, call, loss=loss, schedule=schedule, executor=executor)


@every_cut_executor
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_dropout_draws_the_same_numbers(places: Places, executor: Any, checkpoint: Any) -> None:
    """The gradients are bit-equal to those of one thread without recomputation."""
    gradients: list[list[Tensor]] = []
    for how in ({"executor": "serial", "checkpoint": "never"}, {"executor": executor, "checkpoint": checkpoint}):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5)).double()
        pipe = Pipe(model, chunks=3, devices=[*places], balance=[2, 2], **how)
        for seed in range(3):
            torch.manual_seed(seed)
            pipe(rows(7, 4, seed=seed).to(places[0])).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) == 4
    assert all(map(torch.equal, *gradients))


@every_executor
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_deferred_statistics_are_those_of_all_rows(places: Places, executor: Any, checkpoint: Any) -> None:
    """This includes the second stage, whose inputs are normalised micro-batches."""
    pipe = Pipe(
        nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4)).double(),
        chunks=3,
        devices=[*places],
        balance=[1, 1],
        executor=executor,
        checkpoint=checkpoint,
        deferred_batch_norm=True,
    )
    plain, later = nn.BatchNorm1d(4).double(), nn.BatchNorm1d(4).double()
    for step in range(3):
        x = rows(7, 4, seed=step)
        pipe(x.to(places[0])).square().sum().backward()
        parts = [nn.functional.batch_norm(part, None, None, training=True) for part in x.tensor_split(3)]
        plain(x)
        later(torch.cat(parts))
    state = {name: value for name, value in pipe.state_dict().items() if "running" in name}
    assert len(state) == 4
    for name, value in state.items():
        norm = plain if name.startswith("0.") else later
        assert str(value.device) == places[0 if norm is plain else 1]
        assert_same(value, getattr(norm, name.rpartition(".")[2]), name)


def test_graph_has_gradients_of_gradients(places: Places) -> None:
    model = chain(4, 8, 2)
    plain, x = copy.deepcopy(model), rows(7, 4)
    pipe = Pipe(model, chunks=3, devices=[*places], executor="graph")
    for run, inputs in ((pipe, x.to(places[0], copy=True)), (plain, x.clone())):
        leaf = inputs.requires_grad_()
        (first,) = torch.autograd.grad(run(leaf).square().sum(), leaf, create_graph=True)
        first.square().sum().backward()
    assert_same_gradients(model, plain, places)


@every_executor
@pytest.mark.parametrize("inside", [False, True], ids=["loss-outside", "loss-inside"])
def test_gradients_accumulate_over_steps(places: Places, executor: Any, inside: bool) -> None:
    """Three backward calls without an optimizer step between them add up."""
    model = chain(4, 8, 2)
    plain = copy.deepcopy(model)
    options = {"loss": nn.MSELoss(), "schedule": "1f1b"} if inside else {}
    pipe = Pipe(model, chunks=3, devices=[*places], executor=executor, **options)
    for step in range(3):
        x, target = rows(7, 4, seed=step), rows(7, 2, seed=step + 9)
        on_first = x.to(places[0])
        loss = pipe(on_first, target=target) if inside else (pipe(on_first) - target.to(places[1])).square().mean()
        (loss * (step + 1)).backward()
        ((plain(x) - target).square().mean() * (step + 1)).backward()
    assert_same_gradients(model, plain, places)
