"""A model of text, character by character, around a recurrent cell that PyTorch does not have.

    character -> embedding -> Recurrent(IntegratingCell) -> linear -> scores of the next character
                                 state ^  | state
                                       +--+

The cell puts three ideas together: the two products are also multiplied with each other (multiplicative integration;
Wu et al., arXiv 1606.06630), one gate says both what is kept and what is taken in (coupled gates; Greff et al., arXiv
1503.04069), and what the cell holds is normalised where it is read (layer norm; Ba et al., arXiv 1607.06450).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.recurrent import Recurrent
from weft.recurrent.backends import Name

TEMPERATURE = 0.8
"""Below 1, what is likely becomes likelier."""

State = tuple[Tensor, Tensor]


class IntegratingCell(nn.Module):
    """One step, as a user would write it: x N x D, state (h, c) N x H each -> output h and the new state."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.input = nn.Linear(width, 3 * hidden)
        self.recurrent = nn.Linear(hidden, 3 * hidden, bias=False)
        self.product = nn.Parameter(torch.full((3 * hidden,), 0.5))
        self.norm = nn.LayerNorm(hidden)

    def initial_state(self, x: Tensor) -> State:
        zero = x.new_zeros(len(x), self.recurrent.in_features)
        return zero, zero

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        h, c = state
        a, b = self.input(x), self.recurrent(h)
        keep, show, new = (a + b + self.product * a * b).chunk(3, -1)
        keep = keep.sigmoid()
        c = keep * c + (1 - keep) * new.tanh()
        h = show.sigmoid() * self.norm(c)
        return h, (h, c)


class Speller(nn.Module):
    """Scores of the next character, for an alphabet of so many."""

    def __init__(self, characters: int, width: int, hidden: int, backend: Name = "auto") -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.net = Recurrent(IntegratingCell(width, hidden), backend=backend)
        self.scores = nn.Linear(hidden, characters)

    def forward(self, numbers: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Characters T x N, int64, to scores T x N x characters, and the state to go on with."""
        result = self.net(self.embedding(numbers), state)
        return self.scores(result.outputs), result.last


@torch.no_grad()
def spell(model: Speller, prompt: Sequence[int], count: int) -> list[int]:
    """So many characters after a prompt of at least one, each drawn from what the model expects.

    A stream: the net takes one step at a time and hands the state on. Draws from the caller's generator.
    """
    state: Any = None
    found: list[int] = []
    for i in range(len(prompt) + count - 1):
        number = prompt[i] if i < len(prompt) else found[-1]
        seen, state = model.net.step(model.embedding(torch.tensor([number])), state)
        if i >= len(prompt) - 1:
            chances = (model.scores(seen) / TEMPERATURE).softmax(-1)
            found.append(int(torch.multinomial(chances, 1)))
    return found
