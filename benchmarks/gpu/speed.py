"""Memory and time on one GPU, compared with plain PyTorch. Each measurement is a function that yields its rows.

    python -m benchmarks.gpu.speed NAME PLACE SECONDS FILE     runs one; a row is a line of JSON in FILE

Candidates do the same work. They run in turn, and medians over the rounds are reported. A sample is the wall time
between two synchronisations. Each candidate first warms up, and results of recurrent networks are compared.
"""

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import torchweft as weft
from benchmarks.gpu.checks import peak_memory
from benchmarks.gpu.kernels import barriers, kernels
from benchmarks.gpu.pipelines import time_ranks, time_rows
from benchmarks.gpu.timing import Work, race, recorded, synchronize
from benchmarks.recurrent.cells import GRUCell, LSTMCell, by_torch, by_torchweft, eager, with_weights_of
from benchmarks.recurrent.work import distance, training
from benchmarks.table import Row

Measurement = Callable[[str, float], Iterator[Row]]


# -- stages ---------------------------------------------------------------------------------------------------------


def memory(place: str, seconds: float) -> Iterator[Row]:
    """Peak memory of a model of 16 blocks in four stages on one GPU, with width 1024 and 4096 rows."""
    if place == "cpu":
        return
    for checkpoint in ("never", "always"):
        for autocast in (False, True):
            for executor in ("serial", "threads"):
                for chunks in (1, 2, 8, 16):
                    active, allocated = peak_memory((place, place), chunks, checkpoint, autocast, executor)
                    yield {
                        "checkpoint": checkpoint,
                        "dtype": "bf16 autocast" if autocast else "float32",
                        "executor": executor,
                        "chunks": str(chunks),
                        "active MiB": f"{active / 2**20:.1f}",
                        "allocated MiB": f"{allocated / 2**20:.1f}",
                    }


def training_step(model: Callable[[Tensor], Tensor], parameters: Sequence[nn.Parameter], x: Tensor) -> Work:
    """Forward and backward of the mean square, with new gradients."""

    def work() -> None:
        for parameter in parameters:
            parameter.grad = None
        model(x).square().mean().backward()

    return work


def stages(place: str, seconds: float) -> Iterator[Row]:
    """Four stages on one GPU and 8 micro-batches, forward and backward, compared with the plain model."""
    chunks, count = 8, 4
    shapes = [(64, 256), (1024, 1024), (8192, 2048)] if place != "cpu" else [(64, 32)]
    for checkpoint in ("never", "always"):
        for rows, width in shapes:
            torch.manual_seed(0)
            blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2 * count)]
            model, x = nn.Sequential(*blocks).to(place), torch.randn(rows, width, device=place)

            def in_micro_batches(x: Tensor, model: nn.Module = model) -> Tensor:
                return torch.cat([model(piece) for piece in x.chunk(chunks)])

            models: dict[str, Callable[[Tensor], Tensor]] = {"plain": model, "micro-batches": in_micro_batches}
            for executor in ("serial", "threads", "graph", "auto"):
                models[executor] = weft.Pipe(
                    model,
                    chunks=chunks,
                    devices=[place] * count,
                    balance=[2] * count,
                    checkpoint=checkpoint,
                    executor=executor,
                )
            parameters = list(model.parameters())
            candidates = {name: training_step(forward, parameters, x) for name, forward in models.items()}
            for _ in range(30):
                candidates["auto"]()  # "auto" chooses its executor within these steps
            found = race(candidates, place, seconds / (2 * len(shapes)))
            for name, took in found.items():
                extra = (took - found["micro-batches"]) / (chunks * count)
                yield {
                    "checkpoint": checkpoint,
                    "rows x width": f"{rows} x {width}",
                    "run by": name,
                    "ms": f"{took * 1e3:.3f}",
                    "of plain": f"{took / found['plain']:.2f}",
                    "us per micro-batch and stage": "" if name in ("plain", "micro-batches") else f"{extra * 1e6:.1f}",
                }


# -- recurrent networks ---------------------------------------------------------------------------------------------


def recurrent(place: str, seconds: float) -> Iterator[Row]:
    """Recurrent networks compared with cuDNN and a CUDA graph: 32 rows, width 256, float32 without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    lengths, batch, width = ((64, 256), 32, 256) if place != "cpu" else ((16,), 4, 16)
    for make, of_torch in ((LSTMCell, nn.LSTM), (GRUCell, nn.GRU)):
        torch.manual_seed(0)
        peer = of_torch(width, width).to(place)
        cell = with_weights_of(peer, make(width, width).to(place))
        nets = {backend: weft.Recurrent(cell, backend=backend) for backend in ("python", "triton", "auto")}
        order = ["of_input.weight", "of_state.weight", "of_input.bias", "of_state.bias"]
        for steps in lengths:
            x = torch.randn(steps, batch, width, device=place, requires_grad=True)
            h = torch.zeros(batch, width, device=place)
            state = (h, h.clone()) if of_torch is nn.LSTM else h
            seeds = [torch.randn(steps, batch, width, device=place)]
            theirs, ours = [x, *peer.parameters()], [x, *(cell.get_parameter(name) for name in order)]
            candidates: dict[str, Work] = {of_torch.__name__: training(by_torch(peer, x, state), theirs, seeds)}
            loop = training(eager(cell, x, state), ours, seeds)
            candidates["loop in Python"] = loop
            notes: dict[str, str] = {}
            for backend, net in nets.items():
                candidates[backend] = training(by_torchweft(net, x, state), ours, seeds)
                begun = time.perf_counter()
                candidates[backend]()
                synchronize(place)
                launched = [line for line in net.explain().splitlines() if line.startswith(("launched", "tier"))]
                used = net.why()[0][1]
                notes[backend] = f"first call {time.perf_counter() - begun:.1f} s; {used}; {' '.join(launched)}"
            if place != "cpu":
                try:
                    candidates["CUDA graph of the loop"] = recorded(loop)
                except RuntimeError as error:
                    notes["CUDA graph of the loop"] = str(error)[:100]
            expected = list(candidates[of_torch.__name__]())
            for name, work in candidates.items():
                difference = distance(expected, list(work()))
                notes[name] = f"differs by {difference:.0e}; {notes.get(name, '')}"
            for name, took in (found := race(candidates, place, seconds / (2 * len(lengths)))).items():
                yield {
                    "cell": of_torch.__name__,
                    "T": str(steps),
                    "run by": name,
                    "ms": f"{took * 1e3:.3f}",
                    "of cuDNN": f"{took / found[of_torch.__name__]:.2f}",
                    "us per step": f"{took / steps * 1e6:.1f}",
                    "notes": notes[name],
                }


# -- experts --------------------------------------------------------------------------------------------------------


def experts(place: str, seconds: float) -> Iterator[Row]:
    """Calls per second by one client to an expert (1024 to 4096 and back, Adam), compared with the bare module.

    Inputs and results are on the CPU. "pools" is `weft.Runtime` in this process, "gRPC" a server in this process.
    """
    from torchweft.experts import ExpertBackend, FeedForward, Runtime, TensorSpec  # noqa: PLC0415  (only this measurement needs numpy)

    width = 1024 if place != "cpu" else 64
    adam = partial(torch.optim.Adam, lr=1e-3)

    def expert(name: str) -> ExpertBackend:
        torch.manual_seed(0)
        module = FeedForward(width, 4 * width).to(place)
        return ExpertBackend(name, module, adam, args_schema=(TensorSpec((None, width), torch.float32),))

    torch.manual_seed(0)
    bare = FeedForward(width, 4 * width).to(place)
    optimizer = torch.optim.Adam(bare.parameters(), lr=1e-3, fused=True)
    with ExitStack() as stack:
        pooled = expert("pooled")
        forward, backward = pooled.get_pools()
        stack.enter_context(Runtime([pooled]))
        remote: Callable[[Tensor], Tensor] | None = None
        if all(map(importlib.util.find_spec, ("grpc", "grpc_health", "pydantic", "starlette", "uvicorn"))):
            server = stack.enter_context(weft.Server([expert("served")]))
            remote = stack.enter_context(weft.RemoteExpert("served", server.address))
        for rows in (1, 32):
            x, gradient = torch.randn(rows, width), torch.randn(rows, width)

            def bare_forward(x: Tensor = x) -> object:
                with torch.no_grad():
                    return bare(x.to(place)).cpu()

            def bare_training(x: Tensor = x, gradient: Tensor = gradient) -> object:
                leaf = x.to(place).requires_grad_()
                bare(leaf).backward(gradient.to(place))
                optimizer.step()
                optimizer.zero_grad()
                return leaf.grad.cpu() if leaf.grad is not None else None

            def remote_forward(x: Tensor = x) -> object:
                assert remote is not None
                with torch.no_grad():
                    return remote(x)

            def remote_training(x: Tensor = x, gradient: Tensor = gradient) -> object:
                assert remote is not None
                leaf = x.clone().requires_grad_()
                remote(leaf).backward(gradient)
                return leaf.grad

            work: dict[str, tuple[Work, Work]] = {
                "bare": (bare_forward, bare_training),
                "pools": (
                    lambda x=x: forward.submit_task(x).result(30),
                    lambda x=x, gradient=gradient: (
                        forward.submit_task(x).result(30),
                        backward.submit_task(x, gradient).result(30),
                    ),
                ),
            }
            if remote is not None:
                work["gRPC"] = (remote_forward, remote_training)
            for number, kind in enumerate(("forward", "forward, backward, step")):
                found = race({name: calls[number] for name, calls in work.items()}, place, seconds / 4)
                for name, took in found.items():
                    yield {
                        "rows": str(rows),
                        "call": kind,
                        "by": name,
                        "calls/s": f"{1 / took:.0f}",
                        "of bare": f"{found['bare'] / took:.2f}",
                    }


MEASUREMENTS: dict[str, tuple[Measurement, float]] = {
    "memory": (memory, 40.0),
    "stages": (stages, 50.0),
    "rows": (time_rows, 60.0),
    "ranks": (time_ranks, 150.0),
    "experts": (experts, 30.0),
    "recurrent": (recurrent, 120.0),
    "kernels": (kernels, 240.0),
    "barriers": (barriers, 60.0),
}
"""Function by name, and the seconds after which its process is killed."""


def main(name: str, place: str, seconds: str, file: str) -> None:
    """Run one measurement. Its rounds take about a third of the time, the rest is for compiling and warm-up."""
    torch.set_num_threads(max(1, min(8, torch.get_num_threads())))
    with Path(file).open("a", encoding="utf-8") as rows:
        for row in MEASUREMENTS[name][0](place, float(seconds) / 3):
            rows.write(json.dumps(row) + "\n")
            rows.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
