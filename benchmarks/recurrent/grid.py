"""Hand-written cells against the networks that ship with PyTorch, over a grid of sizes.

The plan does not depend on the length of the sequence. The shortest sequence is therefore used to make it, and to
estimate the times of long sequences. A point whose round takes half a minute is run once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from statistics import median

import torch
from torch import nn

from benchmarks.harness import Race, intra_op_threads, progress
from benchmarks.recurrent.cells import GRUCell, LSTMCell, by_torch, by_torchweft, eager, with_weights_of
from benchmarks.recurrent.racing import LONG, race_for
from benchmarks.recurrent.work import THREADS, Work, agree, training
from benchmarks.table import Row, Table, at_most
from torchweft.recurrent import Recurrent

STEPS, BATCHES, WIDTHS = (50, 200, 1000), (1, 16, 64), (128, 512)
REQUIRED = {"LSTM": 1.2, "GRU": 1.0}
REQUIRED_MEDIAN = {"LSTM": 1.1, "GRU": 1.0}
REQUIRED_SMALL = {"LSTM": 1.2, "GRU": 1 / 1.5}
"""Limits for batches of at most `SMALL` rows."""
SMALL = 16
LOOPED = (200, 16)
"""Largest steps and batch for which the eager loop is timed too."""
SHORT = 50
WEFT, EAGER = "torchweft", "eager loop"


@dataclass(frozen=True)
class Point:
    """A point of the grid, with one race for each number of threads."""

    cell: str
    batch: int
    width: int
    steps: int
    races: dict[int, Race] = field(default_factory=dict[int, Race])

    @property
    def required(self) -> float:
        """The largest allowed ratio."""
        return (REQUIRED_SMALL if self.batch <= SMALL else REQUIRED)[self.cell]


def run(quick: bool) -> Table:
    """Times of hand-written cells, relative to nn.LSTM and nn.GRU."""
    steps, batches, widths = ((20, SHORT), (1,), (32,)) if quick else (STEPS, BATCHES, WIDTHS)
    points: list[Point] = []
    for cell, batch, width in product(REQUIRED, batches, widths):
        points += _points(cell, batch, width, steps, 0.0 if quick else 2.0)
    rows = [_row(point) for point in points]
    title = "forward and backward of a hand-written cell, as a share of the time of nn.LSTM and nn.GRU"
    notes = ["  1 is the time of PyTorch's network; less is faster; the worse number of threads is judged"]
    return Table(title, [*rows, *_summary(points)], notes)


def _points(cell: str, batch: int, width: int, steps: tuple[int, ...], seconds: float) -> list[Point]:
    """Race all lengths of one cell, batch and width."""
    torch.manual_seed(0)
    peer = {"LSTM": nn.LSTM, "GRU": nn.GRU}[cell](width, width)
    cell_module = with_weights_of(peer, {"LSTM": LSTMCell, "GRU": GRUCell}[cell](width, width))
    net = Recurrent(cell_module)
    agree(_candidates(net, peer, batch, min(SHORT, *steps), looped=True))
    points = [Point(cell, batch, width, length) for length in steps]
    for point, count in product(points, THREADS):
        progress(f"{cell}, batch {batch}, width {width}, {point.steps} steps, {count} thread(s)")
        with intra_op_threads(count):
            point.races[count] = _race(net, peer, point, seconds)
    return points


def _race(net: Recurrent, peer: nn.RNNBase, point: Point, seconds: float) -> Race:
    looped = point.steps <= LOOPED[0] and point.batch <= LOOPED[1]
    short = _candidates(net, peer, point.batch, min(SHORT, point.steps), looped=looped)
    estimate = race_for(short, 0.0, most=1)
    expected = {name: estimate.median(name) * point.steps / SHORT for name in short}
    candidates = _candidates(net, peer, point.batch, point.steps, looped=looped)
    long = sum(expected.values()) > LONG
    return race_for(candidates, seconds, expected=expected if long else None)


def _candidates(net: Recurrent, peer: nn.RNNBase, batch: int, steps: int, *, looped: bool) -> dict[str, Work]:
    x = torch.randn(steps, batch, peer.hidden_size, requires_grad=True)
    state = tuple([torch.randn(batch, peer.hidden_size, requires_grad=True) for _ in range(_states(peer))])
    initial = state if len(state) > 1 else state[0]
    seeds = [torch.randn(steps, batch, peer.hidden_size), *map(torch.randn_like, state)]
    layers = [net.cell.of_input, net.cell.of_state]
    ours = [x, *state, *(parameter for layer in layers for parameter in layer.parameters())]
    theirs = [x, *state, peer.weight_ih_l0, peer.bias_ih_l0, peer.weight_hh_l0, peer.bias_hh_l0]
    candidates = {
        WEFT: training(by_torchweft(net, x, initial), ours, seeds),
        f"nn.{peer.mode}": training(by_torch(peer, x, initial), theirs, seeds),
    }
    return candidates | ({EAGER: training(eager(net.cell, x, initial), ours, seeds)} if looped else {})


def _states(peer: nn.RNNBase) -> int:
    return 2 if isinstance(peer, nn.LSTM) else 1


def _row(point: Point) -> Row:
    peer, row = f"nn.{point.cell}", {}
    for count, race in point.races.items():
        row[f"x{count} torchweft ms"] = f"{race.median(WEFT) * 1e3:.2f}"
        row[f"x{count} peer ms"] = f"{race.median(peer) * 1e3:.2f}"
        row[f"x{count} eager"] = f"{race.ratio(EAGER, peer):.1f}" if EAGER in race.seconds else ""
        row[f"x{count} ratio"] = f"{race.ratio(WEFT, peer):.2f}"
    worst = max(race.ratio(WEFT, peer) for race in point.races.values())
    notes = "; ".join(dict.fromkeys(race.note() for race in point.races.values()))
    head = {"cell": point.cell, "T": f"{point.steps}", "batch": f"{point.batch}", "width": f"{point.width}"}
    return {**head, **row, **_judged(worst, point.required), "rounds": notes}


def _summary(points: list[Point]) -> Iterator[Row]:
    for cell, limit in REQUIRED.items():
        of_cell = [point for point in points if point.cell == cell]
        ratios = {n: [point.races[n].ratio(WEFT, f"nn.{cell}") for point in of_cell] for n in THREADS}
        for name, reduce, required in (("largest", max, limit), ("median", median, REQUIRED_MEDIAN[cell])):
            columns = {f"x{count} ratio": f"{reduce(values):.2f}" for count, values in ratios.items()}
            yield {"cell": f"{cell} {name}", **columns, **_judged(max(map(reduce, ratios.values())), required)}


def _judged(value: float, required: float) -> Row:
    return {**at_most(value, required), "required": f"<= {required:.2f}"}
