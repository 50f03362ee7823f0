"""Work for two ranks: uses of a pipe over processes, compared with the serial pipe.

Each case returns both pipes, and a function that calls one of them and returns its result. `run_case` compares the
results, the gradients and the buffers bit by bit.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchweft as weft

mse = nn.MSELoss()


def net(*extra: nn.Module, drop: float = 0.0) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(drop), *extra, nn.Tanh(), nn.Linear(6, 6)).double()


def data(rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, y = (torch.randn(rows, 6, generator=generator).double() for _ in range(2))
    return x, y


def pair(model: nn.Sequential, balance: list[int] | None = None, **settings: Any) -> list[weft.Pipe]:
    """The serial pipe, and the pipe over the ranks."""
    balance = balance or [2, len(model) - 2]
    settings = {"chunks": 4, "balance": balance, **settings}
    return [
        weft.Pipe(copy.deepcopy(model), devices=["cpu"] * len(balance), executor="serial", **settings),
        weft.Pipe(copy.deepcopy(model), group=dist.group.WORLD, **settings),
    ]


def step(pipe: weft.Pipe, x: Tensor, y: Tensor) -> float:
    loss = pipe(x, target=y)
    loss.backward()
    return float(loss.detach())


def extras() -> tuple[list[weft.Pipe], Callable[[weft.Pipe], Any]]:
    def loss(output: Tensor, target: Tensor) -> Any:
        return mse(output, target), {"count": 1, "mean": (output - target).mean(), "rows": output.detach()}

    def call(pipe: weft.Pipe) -> Any:
        value, more = pipe(data()[0], target=data()[1])
        value.backward()
        return float(value.detach()), more["count"], float(more["mean"]), float(more["rows"].sum())

    return pair(net(), loss=loss, schedule="1f1b"), call


def deferred_batch_norm() -> Any:
    pipes = pair(net(nn.BatchNorm1d(6)), loss=mse, schedule="1f1b", deferred_batch_norm=True)
    return pipes, lambda pipe: step(pipe, *data())


def autocast() -> Any:
    def call(pipe: weft.Pipe) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            loss = pipe(data()[0].float(), target=data()[1].float())
        loss.backward()
        return float(loss.detach())

    return pair(net().float(), loss=mse, schedule="1f1b"), call


def accumulation() -> Any:
    return pair(net(drop=0.3), loss=mse), lambda pipe: [step(pipe, *data(rows)) for rows in (8, 5, 8)]


def two_forwards_alive() -> Any:
    def call(pipe: weft.Pipe) -> Any:
        x, y = data()
        one, other = pipe(x), pipe(2 * x)
        (mse(one, y) + mse(other, y)).backward()
        return float((one.sum() + other.sum()).detach())

    return pair(net(drop=0.3)), call


def backward_in_reverse_order() -> Any:
    def call(pipe: weft.Pipe) -> Any:
        x, y = data()
        one, other = mse(pipe(x), y), mse(pipe(2 * x), y)
        other.backward()
        one.backward()
        return float((one + other).detach())

    return pair(net(drop=0.3), checkpoint="always"), call


def retained_graph() -> Any:
    def call(pipe: weft.Pipe) -> Any:
        loss = mse(pipe(data()[0]), data()[1])
        loss.backward(retain_graph=True)
        loss.backward()
        return float(loss.detach())

    return pair(net(drop=0.3)), call


def retained_inner_loss() -> Any:
    def call(pipe: weft.Pipe) -> Any:
        loss = pipe(data()[0], target=data()[1])
        loss.backward(retain_graph=True)
        (3 * loss).backward()
        return float(loss.detach())

    return pair(net(drop=0.3), loss=mse, schedule="1f1b"), call


def evaluation() -> Any:
    def call(pipe: weft.Pipe) -> Any:
        x, y = data()
        pipe.eval()
        with torch.no_grad():
            total = float(pipe(x).sum())
        with torch.inference_mode():
            total += float(pipe(x, target=y))
        pipe.train()
        return total, step(pipe, x, y)

    return pair(net(drop=0.3), loss=mse), call


def nested_pipe() -> Any:
    inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double()
    inner_pipe = weft.Pipe(inner, chunks=2, balance=[1, 1], devices=["cpu"] * 2)
    return pair(net(inner_pipe), loss=mse), lambda pipe: step(pipe, *data())


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.linear(x) + h)
        return h, h


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = weft.Recurrent(Cell(), batch_first=True, initial=torch.zeros(6).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x[:, None].expand(-1, 3, -1))[0][:, -1]


def recurrent_stage() -> Any:
    return pair(net(Steps()), loss=mse), lambda pipe: step(pipe, *data())


def compiled_block() -> Any:
    block = torch.compile(nn.Linear(6, 6).double(), backend="aot_eager")
    return pair(net(block), loss=mse), lambda pipe: step(pipe, *data())


def input_with_gradient() -> Any:
    def call(pipe: weft.Pipe) -> Any:
        x = data()[0].requires_grad_()
        pipe(x, target=data()[1]).backward()
        return None if x.grad is None else float(x.grad.sum())  # on the rank of the first stage only

    return pair(net(), loss=mse), call


def scaled_loss() -> Any:
    def call(pipe: weft.Pipe) -> Any:
        loss = pipe(data()[0], target=data()[1])
        (3 * loss).backward()
        return float(loss.detach())

    return pair(net(), loss=mse, schedule="1f1b", loss_scale=2.0), call


def skipped_targets() -> Any:
    """Cross entropy with ignored targets. Only the rank with the target knows the weights."""

    def call(pipe: weft.Pipe) -> Any:
        labels = torch.tensor([0, 1, -100, 2, -100, -100, 5, 0])
        return step(pipe, data()[0], labels)

    return pair(net(), loss=nn.CrossEntropyLoss(), schedule="1f1b"), call


def trainable_loss() -> Any:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((), 2.0).double())

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return mse(output * self.scale, target)

    return pair(net(), loss=Loss(), schedule="1f1b"), lambda pipe: step(pipe, *data())


def frozen_stage() -> Any:
    model = net()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    return pair(model, loss=mse, schedule="1f1b"), lambda pipe: step(pipe, *data())


def stage_without_parameters() -> Any:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double()
    return pair(model, [1, 1], loss=mse), lambda pipe: step(pipe, *data())


def nested_values() -> Any:
    class Split(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"x": x, "none": None, "flag": True, "parts": [x[:, :3], (x[:, 3:].float(), "word")]}

    class Join(nn.Module):
        def forward(self, value: Any) -> Tensor:
            first, (second, _) = value["parts"]
            return value["x"] * torch.cat([first, second.double()], 1)

    model = nn.Sequential(nn.Linear(6, 6), Split(), Join(), nn.Linear(6, 6)).double()
    return pair(model, loss=mse), lambda pipe: step(pipe, *data())


class ConvNextBlock(nn.Module):
    """A block whose result is permuted: its channels are last in memory. A path of whole rows is dropped."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.narrow(nn.functional.gelu(self.wide(y))).permute(0, 3, 1, 2)
        return y * nn.functional.dropout(torch.ones_like(y[:, :1, :1, :1]), 0.3, self.training) + x


def permuted_values(schedule: str, balance: list[int]) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 6, 2, 2), *(ConvNextBlock(6) for _ in range(3))).double()
    x = torch.randn(8, 3, 10, 14, generator=torch.Generator().manual_seed(8)).double()
    pipes = pair(model, balance, loss=lambda y, t: mse(y.mean((2, 3)), t), schedule=schedule)
    return pipes, lambda pipe: step(pipe, x, data()[1])


CASES: dict[str, Callable[[], Any]] = {
    case.__name__: case
    for case in (
        extras,
        deferred_batch_norm,
        autocast,
        accumulation,
        two_forwards_alive,
        backward_in_reverse_order,
        retained_graph,
        retained_inner_loss,
        evaluation,
        nested_pipe,
        recurrent_stage,
        compiled_block,
        input_with_gradient,
        scaled_loss,
        skipped_targets,
        trainable_loss,
        frozen_stage,
        stage_without_parameters,
        nested_values,
    )
}
CASES |= {
    f"permuted_values_{schedule}": partial(permuted_values, schedule, balance)
    for schedule, balance in (("zero_bubble", [2, 2]), ("dualpipev", [1, 1, 1, 1]))
}


def run_case(name: str) -> list[str]:
    """The differences between the two pipes of a case, in words."""
    (serial, pipe), call = CASES[name]()
    faults: list[str] = []
    results: list[Any] = []
    for net in (serial, pipe):
        torch.manual_seed(11)
        results.append(call(net))
    if results[0] != results[1] and not (name == "input_with_gradient" and results[1] is None and dist.get_rank() == 1):
        faults.append(f"results {results}")
    named = dict(serial.named_parameters())
    for key, parameter in pipe.named_parameters():
        one, other = parameter.grad, named[key].grad
        if (one is None) != (other is None) or (one is not None and not torch.equal(one, other)):
            faults.append(f"gradient of {key}")
    buffers = dict(serial.named_buffers())
    faults += [f"buffer {key}" for key, buffer in pipe.named_buffers() if not torch.equal(buffer, buffers[key])]
    return faults
