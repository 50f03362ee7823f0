"""Rows of different length: ours with `lengths=`, nn.LSTM on a PackedSequence, and nn.LSTM over the padding as well.

    t ->  . . . . . . . . . .        lengths are drawn evenly from T/4 to T
          . . . . . . _ _ _ _        packed: no work for _, but another batch wherever a row ends
          . . . _ _ _ _ _ _ _        padded: works on _ too, and gives another last state

The packed sequence is made beforehand, and the gradients of the padding are zeros for all three, so that the packed
one and ours do the same work.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from benchmarks.harness import intra_op_threads, progress
from benchmarks.recurrent.cells import LSTMCell, by_torch, ends_of, with_weights_of
from benchmarks.recurrent.racing import race_for
from benchmarks.recurrent.work import THREADS, Forward, Work, distance, training
from benchmarks.table import Row, Table
from torchweft.recurrent import Recurrent

POINTS = ((200, 16), (200, 64), (500, 8), (1000, 8))
"""Steps and batch."""
WIDTH = 128
WANTED = {200: 2.5, 500: 10.0, 1000: 10.0}
WANTED_PADDED = 1.3
WANTED_EQUAL = 1e-6
WEFT, PACKED, PADDED = "torchweft", "packed", "padded"


def run(quick: bool) -> Table:
    """Seconds of nn.LSTM over ours, by length and batch."""
    points, width, seconds = (((20, 4),), 16, 0.0) if quick else (POINTS, WIDTH, 4.0)
    rows = [_row(steps, batch, width, count, seconds) for steps, batch in points for count in THREADS]
    title = f"variable lengths, forward and backward, width {width}: nn.LSTM's time over ours"
    notes = [
        "  apart: outputs and last states from the packed ones, absolute in float32; gradients in float64, relative",
    ]
    return Table(title, rows, notes)


def _row(steps: int, batch: int, width: int, count: int, seconds: float) -> Row:
    progress(f"{steps} steps, batch {batch}, {count} thread(s)")
    with intra_op_threads(count):
        single, double = (_Job(steps, batch, width, dtype) for dtype in (torch.float32, torch.float64))
        outputs, gradients = single.outputs_apart(), double.gradients_apart()
        candidates = single.candidates()
        for work in candidates.values():
            work()
        found = race_for(candidates, seconds)
    packed, padded = found.ratio(PACKED, WEFT), found.ratio(WEFT, PADDED)
    wanted = WANTED.get(steps, 0.0)
    holds = packed >= wanted and padded <= WANTED_PADDED and max(outputs, gradients) <= WANTED_EQUAL
    return {
        "T": f"{steps}",
        "batch": f"{batch}",
        "threads": f"{count}",
        **{f"{name} ms": f"{found.median(name) * 1e3:.2f}" for name in candidates},
        "packed/torchweft": f"{packed:.1f}",
        "torchweft/padded": f"{padded:.2f}",
        "outputs apart": f"{outputs:.0e}",
        "gradients apart": f"{gradients:.0e}",
        "wanted": f">= {wanted:g}, <= {WANTED_PADDED:g}, <= {WANTED_EQUAL:.0e}",
        "verdict": "holds" if holds else "falls short",
        "rounds": found.note(),
    }


class _Job:
    """One batch of rows, and the three ways through it."""

    def __init__(self, steps: int, batch: int, width: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.peer = nn.LSTM(width, width, dtype=dtype)
        self.cell = with_weights_of(self.peer, LSTMCell(width, width).to(dtype))
        self.net = Recurrent(self.cell)
        self.lengths = torch.randint(steps // 4, steps + 1, (batch,))
        self.lengths[0] = steps  # so that padding ends where the longest row does
        self.x = torch.randn(steps, batch, width, dtype=dtype, requires_grad=True)
        self.state = tuple([torch.randn(batch, width, dtype=dtype, requires_grad=True) for _ in range(2)])
        counts = (torch.arange(steps)[:, None] < self.lengths)[..., None]
        self.seeds = [torch.randn_like(self.x) * counts, *map(torch.randn_like, self.state)]
        self.weights = [self.peer.weight_ih_l0, self.peer.bias_ih_l0, self.peer.weight_hh_l0, self.peer.bias_hh_l0]

    def candidates(self) -> dict[str, Work]:
        """Each with its gradients to inputs, initial states and weights."""
        packed = self._packed(self.x.detach())
        data = packed.data.requires_grad_()
        ready = packed._replace(data=data)
        seeds = [self._packed(self.seeds[0]).data, *self.seeds[1:]]
        theirs = [*self.state, *self.weights]
        return {
            WEFT: training(self._ours, [self.x, *self.state, *self.cell.parameters()], self.seeds),
            PACKED: training(self._by_packed(ready), [data, *theirs], seeds),
            PADDED: training(by_torch(self.peer, self.x, self.state), [self.x, *theirs], self.seeds),
        }

    def outputs_apart(self) -> float:
        """The largest difference between our outputs and last states, and those of the packed sequence."""
        with torch.no_grad():
            outputs, *last = self._by_packed(self._packed(self.x))()
            padded = self._padded(outputs)
            return max(
                float((one - other.view_as(one)).abs().max())
                for one, other in zip(self._ours(), [padded, *last], strict=True)
            )

    def gradients_apart(self) -> float:
        """The largest difference of a gradient from the packed sequence's, of its largest value."""
        ways = self.candidates()
        ours, (data, *theirs) = ways[WEFT](), ways[PACKED]()
        return distance([self._padded(data), *theirs], ours)

    def _ours(self) -> Sequence[Tensor]:
        result = self.net(self.x, self.state, lengths=self.lengths)
        return ends_of(result.outputs, result.last)

    def _by_packed(self, packed: PackedSequence) -> Forward:
        state = tuple([each[None] for each in self.state])

        def forward() -> Sequence[Tensor]:
            outputs, last = self.peer(packed, state)
            return ends_of(outputs.data, last)

        return forward

    def _packed(self, padded: Tensor) -> PackedSequence:
        return pack_padded_sequence(padded, self.lengths, enforce_sorted=False)

    def _padded(self, data: Tensor) -> Tensor:
        """From the order of the packed sequence back to T x N x ...."""
        return pad_packed_sequence(self._packed(self.x.detach())._replace(data=data))[0]
