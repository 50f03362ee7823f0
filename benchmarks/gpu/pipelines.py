"""Pipelines of GPT blocks over GPUs: in one process by every executor, and over ranks compared with torch's schedules.

    python -m benchmarks.gpu.pipelines RANK RANKS FOLDER JOB ARGUMENTS     one rank; JSON lines in FOLDER/RANK

A stage gets as many blocks as take about the wanted time for forward and backward of one micro-batch, which is then
measured: T. With S stages on as many GPUs, the ideal of m micro-batches is (m + S - 1) T. On one GPU it is m S T.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import torchweft as weft
from benchmarks.gpu.jobs import ROOT
from benchmarks.gpu.timing import race, synchronize
from benchmarks.pipeline.rank_steps import Candidates
from benchmarks.table import Row
from torchweft.errors import WeftError

WANTED = (2.0, 8.0, 30.0)
"""Milliseconds of forward and backward of one micro-batch on one stage."""
EXECUTORS = ("serial", "threads", "cuda_graph")
KINDS = ("1f1b", "interleaved x2")
STEPS = 100
"""Steps whose bits are compared."""


class Sizes(NamedTuple):
    """The blocks of a stage (an even number, for two stages per rank), and a micro-batch."""

    blocks: int
    width: int
    length: int
    rows: int = 1


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attend, self.project = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_of_mlp, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.heads = max(1, width // 64)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2) for part in self.attend(self.norm(x)).chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(functional.gelu(self.wide(self.norm_of_mlp(x))))


def gpt(blocks: int, width: int) -> nn.Sequential:
    """Blocks with the same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(blocks)])


def seconds_of(sizes: Sizes, place: str) -> float:
    """Seconds of forward and backward of one stage, launched by plain PyTorch."""
    layers, x = gpt(sizes.blocks, sizes.width).to(place), batch(sizes, 1, place)

    def work() -> None:
        layers(x).square().mean().backward()

    return race({"stage": work}, place, 2.0)["stage"]


def batch(sizes: Sizes, count: int, place: str, seed: int = 0) -> Tensor:
    """Inputs of so many micro-batches."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(count * sizes.rows, sizes.length, sizes.width, generator=numbers).to(place)


def sizes_for(wanted: float, place: str) -> Sizes:
    """Sizes of a stage that takes about so many milliseconds."""
    if place == "cpu":
        return Sizes(2, 32, 8)
    sizes = Sizes(2, 1024, 512, 2)
    took = seconds_of(sizes, place) * 1e3
    return sizes._replace(blocks=2 * max(1, round(wanted / took)))


def places_of(stages: int, place: str) -> list[str]:
    """As many GPUs as stages, or else one for all."""
    several = place != "cpu" and torch.cuda.device_count() >= stages
    return [f"cuda:{number}" for number in range(stages)] if several else [place] * stages


def stage_counts(place: str) -> list[int]:
    """2, 4 and 8 if there are so many GPUs, or else two stages on one device."""
    return [count for count in (2, 4, 8) if place != "cpu" and torch.cuda.device_count() >= count] or [2]


def ideal(took: float, stages: int, chunks: int, places: list[str]) -> float:
    """The least seconds of a step. Stages on the CPU have a core each, and those on one GPU share it."""
    apart = len(set(places)) > 1 or places[0] == "cpu"
    return took * (chunks + stages - 1 if apart else chunks * stages)


def time_rows(place: str, seconds: float) -> Iterator[Row]:
    """GPT blocks in one process, 1F1B with four micro-batches per stage, by every executor against the ideal."""
    counts = stage_counts(place)
    for stages in counts:
        places, chunks = places_of(stages, place), 4 * stages
        for wanted in WANTED if place != "cpu" else WANTED[:1]:
            sizes = sizes_for(wanted, place)
            took = seconds_of(sizes, place)
            best = ideal(took, stages, chunks, places)
            x, target = batch(sizes, chunks, places[0]), batch(sizes, chunks, places[-1], 1)
            common = {"stages": f"{stages} on {len(set(places))}", "T ms": f"{took * 1e3:.2f}"}
            reference: list[Tensor] = []
            for executor in EXECUTORS:
                pipe = weft.Pipe(
                    gpt(stages * sizes.blocks, sizes.width),
                    chunks=chunks,
                    balance=[sizes.blocks] * stages,
                    devices=places,
                    schedule="1f1b",
                    loss=functional.mse_loss,
                    executor=executor,
                )
                work = step_of(pipe, x, target)
                try:
                    for _ in range(4):
                        work()
                    begun = time.process_time()
                    step = race({executor: work}, place, seconds / (3 * len(counts) * len(WANTED)))[executor]
                    host = time.process_time() - begun
                except (WeftError, RuntimeError) as error:
                    yield {**common, "run by": executor, "notes": str(error)[:150]}
                    continue
                gradients = [p.grad.cpu() for p in pipe.parameters() if p.grad is not None]
                same = all(map(torch.equal, gradients, reference or gradients))
                reference = reference or gradients
                yield {
                    **common,
                    "run by": executor,
                    "ms": f"{step * 1e3:.2f}",
                    "of ideal": f"{step / best:.3f}",
                    "beyond ideal, us per micro-batch and stage": f"{(step - best) / chunks / stages * 1e6:.0f}",
                    "bits": "equal" if same and len(gradients) == len(reference) else "DIFFER",
                    "notes": f"{pipe.statistics().get('cuda_graph', '')}"[:100] or f"{host:.1f} s of processor time",
                }


def step_of(pipe: weft.Pipe, x: Tensor, target: Tensor) -> Callable[[], Tensor]:
    """A training step without an optimizer, with new gradients."""

    def work() -> Tensor:
        pipe.zero_grad()
        loss = pipe(x, target=target)
        loss.backward()
        return loss.detach()

    return work


# -- over ranks -----------------------------------------------------------------------------------------------------


def time_ranks(place: str, seconds: float) -> Iterator[Row]:
    """GPT blocks over processes: 1F1B and interleaved, torch's schedules, the bits of 100 steps, a killed rank."""
    alone, two = (digests(count, place) for count in (1, 2))
    bits = "equal" if {*alone, *two} == {alone[0]} else "DIFFER"
    yield {"measure": f"bits of {STEPS} losses", "case": "1 rank, 2 ranks", "value": bits}
    killed = run_ranks(2, "kill", place)
    times = {record["rank"]: record for of_rank in killed for record in of_rank}
    if {0, 1} <= times.keys():
        after = (times[0]["at"] - times[1]["at"]) * 1e3
        yield {"measure": "killed rank is known, ms", "case": times[0]["error"], "value": f"{after:.0f}"}
    else:
        yield {"measure": "killed rank is known, ms", "case": str(killed)[:150], "value": "FAILED"}
    counts = stage_counts(place)
    for count in counts:
        places, chunks = places_of(count, place), 4 * count
        for wanted in WANTED if place != "cpu" else WANTED[:1]:
            sizes = sizes_for(wanted, place)
            took = seconds_of(sizes, place)
            best = ideal(took, count, chunks, places)
            budget = seconds / len(counts) / len(WANTED)
            found: dict[str, float] = {}
            for of_rank in run_ranks(
                count, "time", place, json.dumps(sizes), str(chunks), str(budget), seconds=3 * budget + 60
            ):
                for record in of_rank:
                    if "seconds" in record:  # a step ends with its last rank
                        found[record["name"]] = max(found.get(record["name"], 0.0), record["seconds"])
                    else:
                        yield {"measure": "step", "case": record["name"], "value": record["error"]}
            for name, step in found.items():
                yield {
                    "measure": f"step of {count} ranks on {len(set(places))}, T {took * 1e3:.2f} ms",
                    "case": name,
                    "value": f"{step * 1e3:.2f} ms",
                    "of ideal": f"{step / best:.3f}",
                    "exposed, us per micro-batch and stage": f"{(step - best) / chunks / count * 1e6:.0f}",
                }


def digests(count: int, place: str) -> list[str]:
    """The digest of all losses of a run, as each rank saw them."""
    found = [record["digest"] for of_rank in run_ranks(count, "bits", place) for record in of_rank]
    return found if len(found) == count else ["a rank failed"]


def run_ranks(count: int, job: str, place: str, *arguments: str, seconds: float = 90.0) -> list[list[Any]]:
    """The records of each rank. Ranks that have not ended after `seconds` are killed."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
        processes: list[Any] = []
        for rank in range(count):
            argv = ["-m", "benchmarks.gpu.pipelines", str(rank), str(count), folder, job, place, *arguments]
            environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen([sys.executable, *argv], cwd=ROOT, env=environment))
        end = time.monotonic() + seconds
        try:
            for process in processes:
                process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"ranks of {job} were killed after {seconds:.0f} s", flush=True)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        files = [Path(folder) / str(rank) for rank in range(count)]
        return [[json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [] for file in files]


def rank_main(rank: int, count: int, folder: str, job: str, place: str, *arguments: str) -> None:
    """Run one job on one rank."""
    at = places_of(count, place)[rank]
    if at != "cpu":
        torch.cuda.set_device(at)
    backend = "nccl" if len(set(places_of(count, place))) == count and at != "cpu" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", count), rank=rank, world_size=count)
    with (Path(folder) / str(rank)).open("a") as file:

        def tell(**record: Any) -> None:
            file.write(json.dumps({"rank": rank, **record}) + "\n")
            file.flush()

        jobs: dict[str, Callable[..., None]] = {"bits": tell_bits, "kill": tell_loss_of_rank, "time": tell_times}
        jobs[job](tell, at, *arguments)
    os._exit(0)  # without a farewell to ranks that are gone


def small_pipe(at: str, balance: list[int]) -> weft.Pipe:
    """Four small blocks over the ranks."""
    return weft.Pipe(
        gpt(4, 64),
        chunks=4,
        balance=balance,
        devices=at,
        schedule="1f1b",
        loss=functional.mse_loss,
        group=dist.group.WORLD,
    )


def tell_bits(tell: Any, at: str) -> None:
    """Train for `STEPS` steps, and tell the digest of the losses."""
    count = dist.get_world_size()
    pipe = small_pipe(at, [2, 2] if count == 2 else [4])
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05)
    seen = hashlib.sha256()
    for step in range(STEPS):
        x = batch(Sizes(4, 64, 16), 4, at, step)
        loss = pipe(x, target=x.square())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.update(loss.detach().double().cpu().numpy().tobytes())
    tell(digest=seen.hexdigest())


def tell_loss_of_rank(tell: Any, at: str) -> None:
    """Rank 1 kills itself after some steps. Rank 0 tells when it knows."""
    pipe, x = small_pipe(at, [2, 2]), batch(Sizes(4, 64, 16), 4, at)
    for step in range(1000):
        if dist.get_rank() and step == 5:
            tell(at=time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            pipe(x, target=x).backward()
        except Exception as error:
            return tell(at=time.monotonic(), error=type(error).__name__)


def tell_times(tell: Any, at: str, given: str, chunks: str, budget: str) -> None:
    """Tell the seconds of a step of each candidate. Ranks start and end it together."""
    sizes, count = Sizes(*json.loads(given)), dist.get_world_size()
    x, target = batch(sizes, int(chunks), at), batch(sizes, int(chunks), at, 1)
    candidates = Candidates(lambda _: gpt(count * sizes.blocks, sizes.width), x, target, int(chunks), torch.device(at))
    adders = [(f"torchweft {kind}", candidates.add_pipe, kind) for kind in KINDS]
    if at == "cpu" or dist.get_backend() == "nccl":  # gloo has no send of CUDA tensors for torch's stages
        adders += [(f"torch {kind}", candidates.add_torch_schedule, kind) for kind in KINDS]
    for name, add, kind in adders:
        try:
            add(kind)
            step = candidates.steps.pop(name)
            for _ in range(3):
                step()
            dist.barrier()
            synchronize(at)
            begun, steps = time.perf_counter(), 0
            least = torch.zeros(1, device=at)
            while not least.item():
                step()
                steps += 1
                synchronize(at)
                least.fill_(steps >= 3 and time.perf_counter() - begun > float(budget) / len(adders) / 2)
                dist.all_reduce(least)
            tell(name=name, seconds=(time.perf_counter() - begun) / steps)
        except (WeftError, RuntimeError) as error:
            tell(name=name, error=f"{type(error).__name__}: {error}"[:150])


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
