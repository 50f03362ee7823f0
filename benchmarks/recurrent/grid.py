"""Cells that a user wrote against the networks that ship with PyTorch, over a grid of sizes.

The plan does not depend on the length of the sequence. So it is made, and the time of the long points is foreseen, on
the shortest sequence; a point whose round takes half a minute is run once.
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
WANTED = {"LSTM": 1.2, "GRU": 1.0}
WANTED_MEDIAN = {"LSTM": 1.1, "GRU": 1.0}
WANTED_SMALL = {"LSTM": 1.2, "GRU": 1 / 1.5}
"""For batches of at most `SMALL`."""
SMALL = 16
LOOPED = (200, 16)
"""The eager loop is raced too where the steps are so many and the batch is no larger."""
SHORT = 50
WEFT, EAGER = "torchweft", "eager loop"


@dataclass(frozen=True)
class Point:
    """Where on the grid; ratios by number of threads are added as they are found."""

    cell: str
    batch: int
    width: int
    steps: int
    races: dict[int, Race] = field(default_factory=dict[int, Race])

    @property
    def wanted(self) -> float:
        """The largest ratio that holds."""
        return (WANTED_SMALL if self.batch <= SMALL else WANTED)[self.cell]


def run(quick: bool) -> Table:
    """Seconds of a hand-written cell over those of nn.LSTM and nn.GRU."""
    steps, batches, widths = ((20, SHORT), (1,), (32,)) if quick else (STEPS, BATCHES, WIDTHS)
    points: list[Point] = []
    for cell, batch, width in product(WANTED, batches, widths):
        points += _points(cell, batch, width, steps, 0.0 if quick else 2.0)
    rows = [_row(each) for each in points]
    title = "forward and backward of a hand-written cell, as a share of the time of nn.LSTM and nn.GRU"
    notes = [
        f"  {line}" for line in ("1 is as fast as PyTorch's own; less is faster; the worse of the threads is judged",)
    ]
    return Table(title, [*rows, *_summary(points)], notes)


def _points(cell: str, batch: int, width: int, steps: tuple[int, ...], seconds: float) -> list[Point]:
    """All lengths of one kind of sequence."""
    torch.manual_seed(0)
    peer = {"LSTM": nn.LSTM, "GRU": nn.GRU}[cell](width, width)
    own = with_weights_of(peer, {"LSTM": LSTMCell, "GRU": GRUCell}[cell](width, width))
    net = Recurrent(own)
    agree(_candidates(net, peer, batch, min(SHORT, *steps), looped=True))
    points = [Point(cell, batch, width, each) for each in steps]
    for point, count in product(points, THREADS):
        progress(f"{cell}, batch {batch}, width {width}, {point.steps} steps, {count} thread(s)")
        with intra_op_threads(count):
            point.races[count] = _race(net, peer, point, seconds)
    return points


def _race(net: Recurrent, peer: nn.RNNBase, point: Point, seconds: float) -> Race:
    looped = point.steps <= LOOPED[0] and point.batch <= LOOPED[1]
    short = _candidates(net, peer, point.batch, min(SHORT, point.steps), looped=looped)
    foreseen = race_for(short, 0.0, most=1)
    expected = {name: foreseen.median(name) * point.steps / SHORT for name in short}
    candidates = _candidates(net, peer, point.batch, point.steps, looped=looped)
    long = sum(expected.values()) > LONG
    return race_for(candidates, seconds, expected=expected if long else None)


def _candidates(net: Recurrent, peer: nn.RNNBase, batch: int, steps: int, *, looped: bool) -> dict[str, Work]:
    x = torch.randn(steps, batch, peer.hidden_size, requires_grad=True)
    state = tuple([torch.randn(batch, peer.hidden_size, requires_grad=True) for _ in range(_states(peer))])
    given = state if len(state) > 1 else state[0]
    seeds = [torch.randn(steps, batch, peer.hidden_size), *map(torch.randn_like, state)]
    weights = [net.cell.of_input, net.cell.of_state]
    ours = [x, *state, *(weight for each in weights for weight in each.parameters())]
    theirs = [x, *state, peer.weight_ih_l0, peer.bias_ih_l0, peer.weight_hh_l0, peer.bias_hh_l0]
    found = {
        WEFT: training(by_torchweft(net, x, given), ours, seeds),
        f"nn.{peer.mode}": training(by_torch(peer, x, given), theirs, seeds),
    }
    return found | ({EAGER: training(eager(net.cell, x, given), ours, seeds)} if looped else {})


def _states(peer: nn.RNNBase) -> int:
    return 2 if isinstance(peer, nn.LSTM) else 1


def _row(point: Point) -> Row:
    peer, row = f"nn.{point.cell}", {}
    for count, race in point.races.items():
        at = f"x{count}"
        row[f"{at} torchweft ms"] = f"{race.median(WEFT) * 1e3:.2f}"
        row[f"{at} peer ms"] = f"{race.median(peer) * 1e3:.2f}"
        row[f"{at} eager"] = f"{race.ratio(EAGER, peer):.1f}" if EAGER in race.seconds else ""
        row[f"{at} ratio"] = f"{race.ratio(WEFT, peer):.2f}"
    worst = max(race.ratio(WEFT, peer) for race in point.races.values())
    notes = "; ".join(dict.fromkeys(race.note() for race in point.races.values()))
    head = {"cell": point.cell, "T": f"{point.steps}", "batch": f"{point.batch}", "width": f"{point.width}"}
    return {**head, **row, **_judged(worst, point.wanted), "rounds": notes}


def _summary(points: list[Point]) -> Iterator[Row]:
    for cell, limit in WANTED.items():
        of_cell = [each for each in points if each.cell == cell]
        found = {n: [each.races[n].ratio(WEFT, f"nn.{cell}") for each in of_cell] for n in THREADS}
        for name, pick, wanted in (("largest", max, limit), ("median", median, WANTED_MEDIAN[cell])):
            ratios = {f"x{count} ratio": f"{pick(each):.2f}" for count, each in found.items()}
            yield {"cell": f"{cell} {name}", **ratios, **_judged(max(map(pick, found.values())), wanted)}


def _judged(value: float, wanted: float) -> Row:
    return {**at_most(value, wanted), "wanted": f"<= {wanted:.2f}"}
