"""Generated Triton kernels on a GPU, tier by tier, compared with cuDNN and the exact loop as a CUDA graph.

kernels     each tier at several sizes and precisions, with registers and spills of its kernels
barriers    one launch in a CUDA graph, and a barrier of all programs by atomics, for a persistent grid
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any, cast

import torch
from torch import nn

from benchmarks.gpu.timing import Work, race, recorded
from benchmarks.recurrent.cells import LSTMCell, by_torch, eager, with_weights_of
from benchmarks.recurrent.work import distance, training
from benchmarks.table import Row
from torchweft.recurrent.capture import capture
from torchweft.recurrent.cpp.lowering import decomposition_table
from torchweft.recurrent.sequence_function import run_derived
from torchweft.recurrent.triton import toolchain
from torchweft.recurrent.triton.loops import Tier
from torchweft.recurrent.triton.triton_backend import TritonBackend

TIERS: tuple[Tier, ...] = ("rows", "segments")
# Name, dtype, and whether products of float32 may round their factors.
PRECISIONS = (("float32", torch.float32, False), ("TF32", torch.float32, True), ("bf16", torch.bfloat16, False))


def kernels(place: str, seconds: float) -> Iterator[Row]:
    """An LSTM by each tier, at sizes where a program has many or few rows, with cuDNN at the same precision."""
    if toolchain.why_unavailable(torch.device(place)):
        return
    on_gpu = place != "cpu"
    sizes = [(32, 64), (32, 256), (512, 64), (512, 256), (2112, 64), (2112, 256)] if on_gpu else [(2, 4)]
    steps, before = (64 if on_gpu else 2), torch.backends.cuda.matmul.allow_tf32
    for precision, dtype, rounds in PRECISIONS if on_gpu else PRECISIONS[:1]:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = rounds
        for rows, width in sizes:
            yield from _at_size(place, dtype, precision, steps, rows, width, seconds / (3 * len(sizes)))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = before


def _at_size(
    place: str, dtype: torch.dtype, precision: str, steps: int, rows: int, width: int, seconds: float
) -> Iterator[Row]:
    torch.manual_seed(0)
    peer = nn.LSTM(width, width).to(place, dtype)
    cell = with_weights_of(peer, LSTMCell(width, width).to(place, dtype))
    order = ["of_input.weight", "of_state.weight", "of_input.bias", "of_state.bias"]
    x = torch.randn(steps, rows, width, device=place, dtype=dtype, requires_grad=True)
    state = (torch.zeros(rows, width, device=place, dtype=dtype), torch.zeros(rows, width, device=place, dtype=dtype))
    seeds = [torch.randn(steps, rows, width, device=place, dtype=dtype)]
    ours = [x, *(cell.get_parameter(name) for name in order)]
    candidates: dict[str, Work] = {"cuDNN": training(by_torch(peer, x, state), [x, *peer.parameters()], seeds)}
    plans: dict[str, TritonBackend] = {}
    for tier in TIERS:
        captured = capture(cell, x[0].detach(), state, list(cell.parameters()), composed=decomposition_table())
        plan = plans[tier] = TritonBackend(captured, tier)
        candidates[tier] = training(lambda plan=plan: run_derived(plan, [x], state).outputs, ours, seeds)
    notes: dict[str, str] = {}
    loop = training(eager(cell, x, state), ours, seeds)
    if place != "cpu":
        try:
            candidates["CUDA graph of the loop"] = recorded(loop)
        except RuntimeError as error:
            notes["CUDA graph of the loop"] = str(error)[:100]
    expected = list(cast(Any, candidates["cuDNN"])())
    for name, work in candidates.items():
        notes[name] = f"differs by {distance(expected, list(cast(Any, work)())):.0e}; {notes.get(name, '')}"
    for tier, plan in plans.items():
        made = {**plan.forward_loops.compiled, **plan.backward_loops.compiled}
        used = [
            f"{name} {k.n_regs} registers, {k.n_spills} spilled" for name, k in made.items() if hasattr(k, "n_regs")
        ]
        notes[tier] += "; ".join([*used, plan.recordings.why_not])
    for name, took in (found := race(candidates, place, seconds)).items():
        yield {
            "precision": precision,
            "rows": str(rows),
            "width": str(width),
            "run by": name,
            "of cuDNN": f"{took / found['cuDNN']:.2f}",
            "us per step": f"{took / steps * 1e6:.1f}",
            "notes": notes[name],
        }


_BARRIER = """
@triton.jit
def touch(data, steps, programs):
    places = tl.program_id(0) * 64 + tl.arange(0, 64)
    tl.store(data + places, tl.load(data + places) + 1)


@triton.jit
def meet(data, count, steps, programs):
    places = tl.program_id(0) * 64 + tl.arange(0, 64)
    for step in range(steps):
        tl.store(data + places, tl.load(data + places) + 1)
        tl.debug_barrier()
        tl.atomic_add(count, 1, sem="release")
        while tl.atomic_add(count, 0, sem="acquire") < (step + 1) * programs:
            pass
        tl.debug_barrier()
"""


def barriers(place: str, seconds: float) -> Iterator[Row]:
    """Time of a small launch in a CUDA graph, and of a barrier of 32, 64 and 128 programs in a cooperative launch."""
    if place == "cpu" or toolchain.why_unavailable(torch.device(place)):
        return
    import_module("triton")
    touch, meet = toolchain.load_kernel("touch", _BARRIER), toolchain.load_kernel("meet", _BARRIER)
    steps = 1000
    for programs in (32, 64, 128):
        data, count = torch.zeros(64 * programs, device=place), torch.zeros(1, dtype=torch.int32, device=place)

        def launches(data: torch.Tensor = data, programs: int = programs) -> list[torch.Tensor]:
            for _ in range(steps):
                touch[(programs,)](data, steps, programs)
            return [data]

        def grid(
            data: torch.Tensor = data, count: torch.Tensor = count, programs: int = programs
        ) -> list[torch.Tensor]:
            count.zero_()
            meet[(programs,)](data, count, steps, programs, launch_cooperative_grid=True)
            return [data]

        candidates: dict[str, Work] = {"barriers": grid}
        notes: dict[str, str] = {}
        for name, work in (("launches, recorded", launches), ("barriers, recorded", grid)):
            try:
                candidates[name] = recorded(work)
            except RuntimeError as error:
                notes[name] = str(error)[:100]
        for name, took in race(candidates, place, seconds / 3).items():
            yield {"programs": str(programs), "by": name, "us each": f"{took / steps * 1e6:.2f}", "notes": ""}
        for name, note in notes.items():
            yield {"programs": str(programs), "by": name, "us each": "", "notes": note}
