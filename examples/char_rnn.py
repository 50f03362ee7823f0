"""Across time: a recurrent cell that PyTorch does not have learns to spell.

    python examples/char_rnn.py [--seconds 12] [--seed 0]

    character -> embedding -> Recurrent(IntegratingCell) -> linear -> scores of the next character
                                 state ^  | state
                                       +--+

You write one time step. `weft.Recurrent` runs it over time, derives the backward pass once, and compiles the loops
if there is a C++ compiler. The text is that of Python's help topics, so nothing is downloaded.
"""

import argparse
import math
import time
from collections import Counter
from pydoc_data.topics import topics
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchweft.recurrent import Recurrent

ROWS, STEPS = 32, 64  # parallel pieces of text, and characters of each per optimizer step
WIDTH, HIDDEN = 64, 192
BIT = math.log(2)


class IntegratingCell(nn.Module):
    """One step: x N x D, state (h, c) N x H each -> output h N x H and the new state.

    Multiplicative integration (Wu et al., arXiv 1606.06630), coupled gates (Greff et al., arXiv 1503.04069) and layer
    norm (Ba et al., arXiv 1607.06450).
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.input = nn.Linear(width, 3 * hidden)
        self.recurrent = nn.Linear(hidden, 3 * hidden, bias=False)
        self.product = nn.Parameter(torch.full((3 * hidden,), 0.5))
        self.norm = nn.LayerNorm(hidden)

    def initial_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        zero = x.new_zeros(x.shape[0], self.recurrent.in_features)
        return zero, zero

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = state
        a, b = self.input(x), self.recurrent(h)
        keep, show, new = (a + b + self.product * a * b).chunk(3, -1)
        keep = keep.sigmoid()
        c = keep * c + (1 - keep) * new.tanh()
        h = show.sigmoid() * self.norm(c)
        return h, (h, c)


class Speller(nn.Module):
    """Scores of the next character: T x N int64 -> T x N x characters, and the last state."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        self.net = Recurrent(IntegratingCell(WIDTH, HIDDEN))
        self.scores = nn.Linear(HIDDEN, characters)

    def forward(self, numbers, state=None):
        result = self.net(self.embedding(numbers), state)
        return self.scores(result.outputs), result.last

    @torch.no_grad()
    def spell(self, prompt: list[int], count: int, temperature: float = 0.8) -> list[int]:
        """Write `count` characters after a prompt, one `step` at a time, each from the state of the previous one."""
        state, written, pending = None, [], list(prompt)
        while len(written) < count:
            y, state = self.net.step(self.embedding(torch.tensor([pending.pop(0)])), state)
            if not pending:
                written.append(int(torch.multinomial((self.scores(y) / temperature).softmax(-1), 1)))
                pending = written[-1:]
        return written


def load_text() -> tuple[str, Tensor, Tensor]:
    """The alphabet, and the text as numbers of its characters: for training, and held out."""
    words = "\n\n".join(topics[name] for name in sorted(topics))
    alphabet = "".join(sorted(character for character, count in Counter(words).items() if count >= 20))
    numbers = {character: i for i, character in enumerate(alphabet)}
    coded = torch.tensor([numbers.get(character, 0) for character in words])
    cut = int(0.95 * len(coded))
    return alphabet, coded[:cut], coded[cut:]


def side_by_side(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """All characters but the last, L x ROWS, and the character that follows each of them."""
    length = (len(numbers) - 1) // ROWS
    now, following = (numbers[i : i + ROWS * length].view(ROWS, length).t() for i in (0, 1))
    return now, following


def loss_of(scores: Tensor, following: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def train(model: Speller, text: Tensor, seconds: float) -> float:
    """Train by truncated backpropagation through time. Returns the median seconds of a step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    now, following = side_by_side(text)
    begin, times, state, start = time.perf_counter(), [], None, 0
    while (spent := time.perf_counter() - begin) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (len(times) + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * spent / seconds))
        if start + STEPS > len(now):
            state, start = None, 0  # start the text again
        optimizer.zero_grad()
        scores, state = model(now[start : start + STEPS], state)
        loss = loss_of(scores, following[start : start + STEPS])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state = tuple(part.detach() for part in state)  # truncates backpropagation
        start += STEPS
        times.append(time.perf_counter() - begin - spent)
        if len(times) % 50 == 0:
            print(f"  step {len(times)}   {loss.item() / BIT:.2f} bits per character   {spent:.0f} s", flush=True)
    print(f"  {len(times)} steps, {median(times) * 1e3:.1f} ms each")
    return median(times)


def difference_from_eager(cell: IntegratingCell) -> float:
    """The largest difference of any gradient between the derived plan and the eager loop, in float64."""
    gradients = []
    for backend in ("auto", "eager"):
        net = Recurrent(cell.double(), backend=backend)
        x = torch.randn(30, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        outputs = net(x, lengths=[30, 17, 4]).outputs
        gradients.append(torch.autograd.grad(outputs.square().sum(), list(cell.parameters())))
    cell.float()
    return max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0, help="seconds of training")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)

    alphabet, text, held_out = load_text()
    model = Speller(len(alphabet))
    print(f"across time: a cell that PyTorch does not have learns to spell ({len(text):,} characters)")
    train(model, text, options.seconds)
    with torch.no_grad():
        now, following = side_by_side(held_out)
        bits = loss_of(model(now)[0], following).item() / BIT
    print(f"  held-out text: {bits:.2f} bits per character, of {math.log2(len(alphabet)):.2f} without learning")
    kind, backend, why = model.net.why()[0]
    print(f"  {kind}: backend {backend!r}, because {why.splitlines()[0]}")
    worst = difference_from_eager(model.net.cell)
    print(f"  largest difference of any gradient from the eager loop, float64: {worst:.1e}")
    if not worst < 1e-9:
        raise SystemExit("the gradients differ by more than rounding")
    sample = model.spell([alphabet.index(character) for character in "The "], 300)
    print(f"  it writes: {' '.join(''.join(alphabet[number] for number in sample).split())[:90]} ...")


if __name__ == "__main__":
    main()
