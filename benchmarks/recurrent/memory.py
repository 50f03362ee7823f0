"""Bytes that a sequence takes, forward and backward, and the time that it costs to keep less.

    inputs, weights, seeds  |  a tiny call: the plan is made  |  two steps of training
                                                             baseline               high-water mark

Each memory mode runs in a fresh process. The baseline is the resident memory after idle buffers were released. The
mark is the kernel's VmHWM, reset at the baseline so that tracing and compiling do not count. `ru_maxrss` cannot be
reset, and starts with the value of the parent process. Outputs and gradients count, inputs and weights do not. The
forecast is the memory plan's prediction for a call with its backward.
"""

import torch
from torch import nn

from benchmarks.harness import Race, intra_op_threads, progress
from benchmarks.recurrent.apart import in_a_fresh_process
from benchmarks.recurrent.cells import LSTMCell, by_torch, by_torchweft, with_weights_of
from benchmarks.recurrent.memory_job import Peak, peak_of
from benchmarks.recurrent.racing import race_for
from benchmarks.recurrent.work import THREADS, Work, agree, training
from benchmarks.table import Row, Table
from torchweft.recurrent import Recurrent
from torchweft.recurrent.plan_backends import Memory

MB = 1_000_000
STEPS, BATCH, WIDTH = 1000, 64, 128
MODES: tuple[Memory, ...] = ("full", "states", "sqrt", 128 * MB)
LONG = ((100_000, 1, 128 * MB), (100_000, 8, 1024 * MB))
"""Steps, batch, and the budget in bytes."""
PEER = "nn.LSTM"
REQUIRED_SHARE, REQUIRED_TIME, REQUIRED_ERROR = 1 / 3, 1.25, 0.1


def run(quick: bool) -> Table:
    """Peak bytes by memory mode, their forecast, and the time."""
    size = (50, 4, 32) if quick else (STEPS, BATCH, WIDTH)
    modes = ("states",) if quick else MODES
    race = _race(size, modes, 0.0 if quick else 20.0)
    peaks = {mode: _peak(mode, *size) for mode in (*modes, PEER)}
    rows = [_row(mode, size, peaks, race) for mode in peaks]
    rows += [_long_row(*size, width=WIDTH) for size in (((2000, 1, 16 * MB),) if quick else LONG)]
    notes = [f"  {count} thread(s): {result.note()}" for count, result in race.items()]
    return Table("peak memory of a training step of an LSTM, in MB of 1000000 bytes", rows, notes)


def _race(size: tuple[int, int, int], modes: tuple[Memory, ...], seconds: float) -> dict[int, Race]:
    torch.manual_seed(0)
    steps, batch, width = size
    peer = nn.LSTM(width, width)
    x = torch.randn(steps, batch, width, requires_grad=True)
    state = tuple([torch.zeros(batch, width) for _ in range(2)])
    seeds = [torch.randn_like(x)]
    weights = [peer.weight_ih_l0, peer.bias_ih_l0, peer.weight_hh_l0, peer.bias_hh_l0]
    candidates: dict[str, Work] = {PEER: training(by_torch(peer, x, state), [x, *weights], seeds)}
    for mode in modes:
        cell = with_weights_of(peer, LSTMCell(width, width))
        net = Recurrent(cell, memory=mode)
        candidates[f"{mode}"] = training(by_torchweft(net, x, state), [x, *cell.parameters()], seeds)
    agree(candidates)
    races: dict[int, Race] = {}
    for count in THREADS:
        progress(f"{', '.join(candidates)}, {count} thread(s)")
        with intra_op_threads(count):
            races[count] = race_for(candidates, seconds)
    return races


def _peak(mode: Memory, steps: int, batch: int, width: int) -> Peak:
    progress(f"peak of {steps} steps, batch {batch}: {mode}")
    return in_a_fresh_process(peak_of, mode, steps, batch, width).value


def _row(mode: Memory, size: tuple[int, int, int], peaks: dict[Memory, Peak], race: dict[int, Race]) -> Row:
    peak, of_peer = peaks[mode], peaks[PEER]
    share = peak.measured / of_peer.measured
    ratios = {f"time x{count}": result.ratio(f"{mode}", PEER) for count, result in race.items()}
    row = _columns(mode, size[0], size[1], peak)
    row |= {"of nn.LSTM": f"{share:.2f}", **{name: f"{ratio:.2f}" for name, ratio in ratios.items()}}
    if mode in ("states", "sqrt"):
        holds = share <= REQUIRED_SHARE and max(ratios.values()) <= REQUIRED_TIME
        row |= {"required": f"<= {REQUIRED_SHARE:.2f}, time <= {REQUIRED_TIME:g}", **_verdict(holds)}
    elif isinstance(mode, int):
        row |= _budget_columns(mode, peak)
    return row


def _long_row(steps: int, batch: int, budget: int, width: int) -> Row:
    return _columns(budget, steps, batch, peak := _peak(budget, steps, batch, width)) | _budget_columns(budget, peak)


def _columns(mode: Memory, steps: int, batch: int, peak: Peak) -> Row:
    return {
        "memory": f"{mode / MB:g} MB" if isinstance(mode, int) else mode,
        "T": f"{steps}",
        "batch": f"{batch}",
        "peak MB": f"{peak.measured / MB:.1f}",
        "forecast": f"{peak.forecast / MB:.1f}" if peak.forecast is not None else "",
        "forecast error": f"{_forecast_error(peak):+.1%}" if peak.forecast is not None else "",
        "kept": peak.kept,
        "s": f"{peak.seconds:.2f}",
        "trains": "yes" if peak.trains else "NO",
    }


def _budget_columns(budget: int, peak: Peak) -> Row:
    holds = peak.measured <= budget and abs(_forecast_error(peak)) <= REQUIRED_ERROR and peak.trains
    return {"required": f"<= {budget / MB:g} MB, error <= {REQUIRED_ERROR:.0%}", **_verdict(holds)}


def _forecast_error(peak: Peak) -> float:
    return peak.measured / peak.forecast - 1 if peak.forecast else 0.0


def _verdict(holds: bool) -> Row:
    return {"verdict": "holds" if holds else "falls short"}
