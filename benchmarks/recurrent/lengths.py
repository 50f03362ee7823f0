"""Rows of different length: torchweft with `lengths=`, nn.LSTM on a PackedSequence, and nn.LSTM on padded rows.

    t ->  . . . . . . . . . .        lengths are uniformly distributed from T/4 to T
          . . . . . . _ _ _ _        packed: skips _, but the batch size changes wherever a row ends
          . . . _ _ _ _ _ _ _        padded: computes _ too, so that the last state differs

The packed sequence is made before the race. The gradients of padding are zeros for all candidates, so that torchweft
and the packed sequence do the same work.
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
REQUIRED = {200: 2.5, 500: 10.0, 1000: 10.0}
REQUIRED_PADDED = 1.3
REQUIRED_EQUAL = 1e-6
WEFT, PACKED, PADDED = "torchweft", "packed", "padded"


def run(quick: bool) -> Table:
    """Times of nn.LSTM relative to torchweft, by length and batch."""
    points, width, seconds = (((20, 4),), 16, 0.0) if quick else (POINTS, WIDTH, 4.0)
    rows = [_row(steps, batch, width, count, seconds) for steps, batch in points for count in THREADS]
    title = f"variable lengths, forward and backward, width {width}: nn.LSTM's time over that of torchweft"
    notes = [
        "  apart: difference from the packed sequence; outputs and states in float32, gradients relative in float64",
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
        result = race_for(candidates, seconds)
    packed, padded = result.ratio(PACKED, WEFT), result.ratio(WEFT, PADDED)
    required = REQUIRED.get(steps, 0.0)
    holds = packed >= required and padded <= REQUIRED_PADDED and max(outputs, gradients) <= REQUIRED_EQUAL
    return {
        "T": f"{steps}",
        "batch": f"{batch}",
        "threads": f"{count}",
        **{f"{name} ms": f"{result.median(name) * 1e3:.2f}" for name in candidates},
        "packed/torchweft": f"{packed:.1f}",
        "torchweft/padded": f"{padded:.2f}",
        "outputs apart": f"{outputs:.0e}",
        "gradients apart": f"{gradients:.0e}",
        "required": f">= {required:g}, <= {REQUIRED_PADDED:g}, <= {REQUIRED_EQUAL:.0e}",
        "verdict": "holds" if holds else "falls short",
        "rounds": result.note(),
    }


class _Job:
    """One batch of rows, and the candidates that process it."""

    def __init__(self, steps: int, batch: int, width: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.peer = nn.LSTM(width, width, dtype=dtype)
        self.cell = with_weights_of(self.peer, LSTMCell(width, width).to(dtype))
        self.net = Recurrent(self.cell)
        self.lengths = torch.randint(steps // 4, steps + 1, (batch,))
        self.lengths[0] = steps  # pad_packed_sequence pads to the longest row, which must have all steps
        self.x = torch.randn(steps, batch, width, dtype=dtype, requires_grad=True)
        self.state = tuple([torch.randn(batch, width, dtype=dtype, requires_grad=True) for _ in range(2)])
        counts = (torch.arange(steps)[:, None] < self.lengths)[..., None]
        self.seeds = [torch.randn_like(self.x) * counts, *map(torch.randn_like, self.state)]
        self.weights = [self.peer.weight_ih_l0, self.peer.bias_ih_l0, self.peer.weight_hh_l0, self.peer.bias_hh_l0]

    def candidates(self) -> dict[str, Work]:
        """Training steps with gradients of inputs, initial states and weights."""
        packed = self._packed(self.x.detach())
        data = packed.data.requires_grad_()
        seeds = [self._packed(self.seeds[0]).data, *self.seeds[1:]]
        theirs = [*self.state, *self.weights]
        return {
            WEFT: training(self._ours, [self.x, *self.state, *self.cell.parameters()], self.seeds),
            PACKED: training(self._by_packed(packed._replace(data=data)), [data, *theirs], seeds),
            PADDED: training(by_torch(self.peer, self.x, self.state), [self.x, *theirs], self.seeds),
        }

    def outputs_apart(self) -> float:
        """Largest difference of outputs and last states from those of the packed sequence."""
        with torch.no_grad():
            outputs, *last = self._by_packed(self._packed(self.x))()
            padded = self._padded(outputs)
            return max(
                float((one - other.view_as(one)).abs().max())
                for one, other in zip(self._ours(), [padded, *last], strict=True)
            )

    def gradients_apart(self) -> float:
        """Largest difference of a gradient from the packed sequence's, relative to the largest value."""
        candidates = self.candidates()
        ours, (data, *theirs) = candidates[WEFT](), candidates[PACKED]()
        return distance([self._padded(data), *theirs], ours)

    def _ours(self) -> Sequence[Tensor]:
        result = self.net(self.x, self.state, lengths=self.lengths)
        return ends_of(result.outputs, result.last)

    def _by_packed(self, packed: PackedSequence) -> Forward:
        state = tuple([part[None] for part in self.state])

        def forward() -> Sequence[Tensor]:
            outputs, last = self.peer(packed, state)
            return ends_of(outputs.data, last)

        return forward

    def _packed(self, padded: Tensor) -> PackedSequence:
        return pack_padded_sequence(padded, self.lengths, enforce_sorted=False)

    def _padded(self, data: Tensor) -> Tensor:
        """Convert the data of a packed sequence to T x N x D."""
        return pad_packed_sequence(self._packed(self.x.detach())._replace(data=data))[0]
