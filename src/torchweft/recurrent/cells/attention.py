"""A cell with attention over an encoded source. The result is part of the cell's next input.

    x_t ------+
              v
    context  cat --> cell --> y_t --> query --> scores --> weights --> context'      output (y_t, context', weights)
     t-1             ^  |                        ^                      ^
                     |  v                        |                      |
                     state of the cell           keys of the source     memory: the source itself

Every call has another source, which needs a gradient, so the source can be neither a parameter nor a buffer of the
cell. It is a *state that every step returns unchanged*. It has rows like any state, its gradient is that of an initial
state, and a step stays a pure function of its arguments. ``result.last`` continues with the same source.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchweft.core.validation import Validator
from torchweft.recurrent.cell import adapt
from torchweft.recurrent.cells.gated import check_arguments
from torchweft.recurrent.masking import read_rows
from torchweft.recurrent.sequence import Lengths, read_inputs


class AttentionState(NamedTuple):
    """The state of an :class:`AttentionCell`, which its method ``begin`` returns.

    Example:
        >>> cell = weft.recurrent.cells.AttentionCell(nn.GRUCell(3 + 6, 8), 6, query_size=8, attention_size=4)
        >>> cell.begin(torch.randn(5, 2, 6), lengths=[5, 2]).valid.sum(1)  # positions of the source, for each row
        tensor([5, 2])
    """

    cell: Any
    """The state of the wrapped cell."""
    context: Tensor
    """N x M: the context of the previous step."""
    keys: Tensor
    """N x S x A: the projected memory, which is compared with a query. This and the next two never change."""
    memory: Tensor
    """N x S x M, zero at invalid positions."""
    valid: Tensor
    """N x S bool: the valid positions of the source."""


class Attended(NamedTuple):
    """The output of an :class:`AttentionCell`.

    Example:
        >>> cell = weft.recurrent.cells.AttentionCell(nn.GRUCell(3 + 6, 8), 6, query_size=8, attention_size=4)
        >>> attended, state = cell(torch.randn(2, 3), cell.begin(torch.randn(5, 2, 6)))
    """

    output: Tensor
    """N x H: the wrapped cell's output."""
    context: Tensor
    """N x M: the weighted mean of the memory; zero for a row without a source."""
    weights: Tensor
    """N x S: their sum over the valid positions is one; elsewhere they are zero."""


class AttentionCell(nn.Module):
    """Attention of a cell's output over a memory, with the result as part of the cell's next input ("input feeding").

    Args:
        cell: the cell to wrap, with inputs N x (D + M) and outputs N x H.
        memory_size: M, the width of the memory.
        query_size: H, the width of the cell's output.
        attention_size: A, the width in which queries and keys are compared.
        score: ``"additive"``, ``v . tanh(query + key)``, Bahdanau, Cho and Bengio (arXiv 1409.0473); or ``"dot"``,
            ``query . key / sqrt(A)``, Luong, Pham and Manning (arXiv 1508.04025, which also proposes input feeding),
            scaled as in Vaswani et al. (arXiv 1706.03762).
        factory: ``device`` and ``dtype`` of the parameters.

    A sequence begins with a state from :meth:`begin`: ``net(x, cell.begin(memory, lengths))``. Outputs are
    :class:`Attended`, states :class:`AttentionState`.

    Raises ``UsageError`` for a size below 1 or another score.

    Example:
        >>> cell = weft.recurrent.cells.AttentionCell(nn.GRUCell(3 + 6, 8), 6, query_size=8, attention_size=4)
        >>> net = weft.Recurrent(cell, backend="eager")
        >>> result = net(torch.randn(7, 2, 3), cell.begin(torch.randn(5, 2, 6)))
    """

    def __init__(
        self,
        cell: nn.Module,
        memory_size: int,
        query_size: int,
        attention_size: int,
        score: Literal["additive", "dot"] = "additive",
        **factory: Any,
    ) -> None:
        super().__init__()
        with check_arguments(self) as check:
            check.count("memory_size", memory_size)
            check.count("query_size", query_size)
            check.count("attention_size", attention_size)
            check.choice("score", score, ("additive", "dot"))
        self.cell = cell
        self.score = score
        self.weight_key = nn.Parameter(torch.empty(attention_size, memory_size, **factory))
        self.weight_query = nn.Parameter(torch.empty(attention_size, query_size, **factory))
        # With "dot", a bias of the keys would shift all scores of a query alike, which softmax ignores.
        additive = score == "additive"
        self.bias = nn.Parameter(self.weight_key.new_empty(attention_size)) if additive else None
        self.weight_score = nn.Parameter(self.weight_key.new_empty(attention_size)) if additive else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw uniformly between plus and minus ``1 / sqrt(A)``. The wrapped cell is not reset."""
        bound = len(self.weight_key) ** -0.5
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)

    def begin(
        self,
        memory: Tensor,
        lengths: Lengths | None = None,
        *,
        mask: Tensor | None = None,
        batch_first: bool = False,
        state: Any = None,
    ) -> AttentionState:
        """The state before the first step, with one source for every row.

        Args:
            memory: S x N x M, as a network over the source returns it; N x S x M with ``batch_first``.
            lengths: N integers from 0 to S: the length of each row's source. Positions past it are never read.
            mask: S x N bool, N x S with ``batch_first``: false at invalid positions of the source.
            state: the wrapped cell's state, by default its initial state for N rows.

        Raises ``SpecError`` or ``UsageError`` that lists every fault.
        """
        with Validator("AttentionCell cannot begin with these arguments") as check:
            if memory.dim() != 3 or memory.shape[-1] != self.weight_key.shape[1]:
                axes = "N x S" if batch_first else "S x N"
                check.mismatch(f"memory has shape {tuple(memory.shape)}, wanted {axes} x {self.weight_key.shape[1]}")
            source = read_inputs(memory, batch_first=batch_first, certain=True, check=check)
            rows = read_rows(source, lengths, mask, None, batch_first=batch_first, check=check)
            initial_state = adapt(self.cell).own_initial()
            if state is None and initial_state is None:
                check.add(f"{type(self.cell).__name__} has no initial state of its own: give state=")
        memory = memory if batch_first else memory.transpose(0, 1)
        valid = memory.new_ones(memory.shape[:2], dtype=torch.bool) if rows.valid is None else rows.valid.t()
        # Padding can hold NaN, and a weight of 0 times NaN would be NaN in values and gradients.
        memory = memory.where(valid.unsqueeze(-1), memory.new_zeros(()))
        context = memory.new_zeros(memory.shape[0], memory.shape[2])
        first = state if initial_state is None or state is not None else initial_state(context)
        # Keys are computed once per source, not in every step.
        return AttentionState(first, context, F.linear(memory, self.weight_key, self.bias), memory, valid)

    def forward(self, x: Tensor, state: AttentionState) -> tuple[Attended, AttentionState]:
        y, inner = adapt(self.cell)(torch.cat([x, state.context], -1), state.cell, 0)
        query = F.linear(y, self.weight_query)
        if self.weight_score is None:
            scores = (state.keys @ query.unsqueeze(-1)).squeeze(-1) * query.shape[-1] ** -0.5
        else:
            scores = torch.tanh(query.unsqueeze(1) + state.keys) @ self.weight_score
        # The lowest number, not -inf: softmax of a row without any valid position would be NaN. Such a row then gets
        # equal weights, so the weights are masked once more.
        scores = scores.masked_fill(~state.valid, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1).masked_fill(~state.valid, 0.0)
        context = (weights.unsqueeze(1) @ state.memory).squeeze(1)
        return Attended(y, context, weights), state._replace(cell=inner, context=context)

    def extra_repr(self) -> str:
        attention_size, memory_size = self.weight_key.shape
        return f"memory_size={memory_size}, attention_size={attention_size}, score={self.score!r}"
