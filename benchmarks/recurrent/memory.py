"""Bytes that a sequence takes, forward and backward, and the cost in time of keeping less.

    inputs, weights, seeds  |  a tiny call: the plan is made  |  two steps of training
                                                             baseline               high-water mark

Each way runs in a fresh process. The baseline is the resident memory after idle buffers were given back; the mark is
the kernel's own (VmHWM), set back at the baseline, so that it knows nothing of tracing and compiling. `ru_maxrss`
would: it cannot be set back, and begins with that of the process which started this one. Outputs and gradients count,
inputs and weights do not. The forecast is the memory plan's prediction of a call with its backward.
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
WAYS: tuple[Memory, ...] = ("full", "states", "sqrt", 128 * MB)
LONG = ((100_000, 1, 128 * MB), (100_000, 8, 1024 * MB))
"""Steps, batch, and the bytes that it must do with."""
PEER = "nn.LSTM"
WANTED_SHARE, WANTED_TIME, WANTED_OFF = 1 / 3, 1.25, 0.1


def run(quick: bool) -> Table:
    """Peak bytes by way of keeping, their forecast, and the time."""
    size = (50, 4, 32) if quick else (STEPS, BATCH, WIDTH)
    ways = ("states",) if quick else WAYS
    race = _race(size, ways, 0.0 if quick else 20.0)
    peaks = {way: _peak(way, *size) for way in (*ways, PEER)}
    rows = [_row(way, size, peaks, race) for way in peaks]
    rows += [_long_row(*each, width=WIDTH) for each in (((2000, 1, 16 * MB),) if quick else LONG)]
    notes = [f"  {count} thread(s): {each.note()}" for count, each in race.items()]
    return Table("peak of one step of training of an LSTM, in MB of 1000000 bytes", rows, notes)


def _race(size: tuple[int, int, int], ways: tuple[Memory, ...], seconds: float) -> dict[int, Race]:
    torch.manual_seed(0)
    steps, batch, width = size
    peer = nn.LSTM(width, width)
    x = torch.randn(steps, batch, width, requires_grad=True)
    state = tuple([torch.zeros(batch, width) for _ in range(2)])
    seeds = [torch.randn_like(x)]
    weights = [peer.weight_ih_l0, peer.bias_ih_l0, peer.weight_hh_l0, peer.bias_hh_l0]
    candidates: dict[str, Work] = {PEER: training(by_torch(peer, x, state), [x, *weights], seeds)}
    for way in ways:
        cell = with_weights_of(peer, LSTMCell(width, width))
        net = Recurrent(cell, memory=way)
        candidates[f"{way}"] = training(by_torchweft(net, x, state), [x, *cell.parameters()], seeds)
    agree(candidates)
    found: dict[int, Race] = {}
    for count in THREADS:
        progress(f"{', '.join(candidates)}, {count} thread(s)")
        with intra_op_threads(count):
            found[count] = race_for(candidates, seconds)
    return found


def _peak(way: Memory, steps: int, batch: int, width: int) -> Peak:
    progress(f"peak of {steps} steps, batch {batch}: {way}")
    return in_a_fresh_process(peak_of, way, steps, batch, width).value


def _row(way: Memory, size: tuple[int, int, int], peaks: dict[Memory, Peak], race: dict[int, Race]) -> Row:
    peak, of_peer = peaks[way], peaks[PEER]
    share = peak.measured / of_peer.measured
    ratios = {f"time x{count}": each.ratio(f"{way}", PEER) for count, each in race.items()}
    row = _told(way, size[0], size[1], peak)
    row |= {"of nn.LSTM": f"{share:.2f}", **{name: f"{each:.2f}" for name, each in ratios.items()}}
    if way in ("states", "sqrt"):
        holds = share <= WANTED_SHARE and max(ratios.values()) <= WANTED_TIME
        row |= {"wanted": f"<= {WANTED_SHARE:.2f}, time <= {WANTED_TIME:g}", **_verdict(holds)}
    elif isinstance(way, int):
        row |= _within(way, peak)
    return row


def _long_row(steps: int, batch: int, budget: int, width: int) -> Row:
    return _told(budget, steps, batch, peak := _peak(budget, steps, batch, width)) | _within(budget, peak)


def _told(way: Memory, steps: int, batch: int, peak: Peak) -> Row:
    ours = peak.forecast is not None
    return {
        "memory": f"{way / MB:g} MB" if isinstance(way, int) else way,
        "T": f"{steps}",
        "batch": f"{batch}",
        "peak MB": f"{peak.measured / MB:.1f}",
        "forecast": f"{peak.forecast / MB:.1f}" if ours else "",
        "off": f"{_off(peak):+.1%}" if ours else "",
        "kept": peak.kept,
        "s": f"{peak.seconds:.2f}",
        "trains": "yes" if peak.trains else "NO",
    }


def _within(budget: int, peak: Peak) -> Row:
    holds = peak.measured <= budget and abs(_off(peak)) <= WANTED_OFF and peak.trains
    return {"wanted": f"<= {budget / MB:g} MB, off <= {WANTED_OFF:.0%}", **_verdict(holds)}


def _off(peak: Peak) -> float:
    return peak.measured / peak.forecast - 1 if peak.forecast else 0.0


def _verdict(holds: bool) -> Row:
    return {"verdict": "holds" if holds else "falls short"}
