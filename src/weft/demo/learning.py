"""Training the model of text by truncated backpropagation: chunk after chunk, with the state handed on.

rows of text   |--chunk 0--|--chunk 1--|--chunk 2--| ...     a step of the optimizer for each chunk
state          0 ---------> ----------> ---------->          handed on, without its gradient
"""

import math
import time
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.core.tree import map_leaves
from weft.demo.speller import Speller
from weft.demo.stage import Stagehand
from weft.demo.text import Text, side_by_side

ROWS, STEPS = 32, 64
"""Pieces of text side by side, and characters of each in a chunk."""
LONGEST = 12.0
"""Seconds that training may take here, whatever the options allow."""
_RATE = 4e-3
_WARM_UP = 10  # steps
_CHECKS = 10  # how often the held-out text is read
_BIT = math.log(2)


class Learning(NamedTuple):
    """Bits per character: of every step, and of the held-out text after some; and the median seconds of a step."""

    losses: list[float]
    held_out: list[tuple[float, float]]
    seconds: float


def learn(model: Speller, text: Text, hand: Stagehand) -> Learning:
    """Train with Adam and a rate that falls as a cosine, until steps or seconds are used up; at least one step."""
    longest = min(hand.options.seconds, LONGEST)
    optimizer = torch.optim.Adam(model.parameters(), lr=_RATE)
    losses: list[float] = []
    held_out: list[tuple[float, float]] = []
    taken: list[float] = []
    chunks = _chunks(text.train)
    state: Any = None
    done = 0.0
    begin = time.perf_counter()
    while done < 1:
        start = time.perf_counter()
        numbers, following, fresh = next(chunks)
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (len(losses) + 1) / _WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * done))
        loss, state = _step(model, optimizer, numbers, following, None if fresh else state)
        losses.append(loss)
        taken.append(time.perf_counter() - start)
        spent = time.perf_counter() - begin
        done = 1.0 if spent >= longest else max(len(losses) / hand.options.steps, spent / longest)
        if done >= min(1.0, len(held_out) / _CHECKS):
            held_out.append((float(len(losses)), bits(model, text.held_out)))
        speed = f"{median(taken[-20:]) * 1e3:.0f} ms a step"
        hand.progress(f"  step {len(losses)}   {loss:.2f} bits per character   {speed}   {spent:.0f} s")
    return Learning(losses, held_out, median(taken))


@torch.no_grad()
def bits(model: Speller, numbers: Tensor) -> float:
    """Bits per character of a text: what the model, on average, lacks to know the next one."""
    characters, following = side_by_side(numbers, ROWS)
    scores, _ = model(characters)
    return functional.cross_entropy(scores.flatten(0, 1), following.flatten()).item() / _BIT


def _step(
    model: Speller, optimizer: torch.optim.Optimizer, numbers: Tensor, following: Tensor, state: Any
) -> tuple[float, Any]:
    optimizer.zero_grad()
    scores, last = model(numbers, state)
    loss = functional.cross_entropy(scores.flatten(0, 1), following.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item() / _BIT, map_leaves(torch.detach, last)


def _chunks(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Characters and those that follow them, T x N, and whether the text begins anew; again and again."""
    characters, following = side_by_side(numbers, ROWS)
    while True:
        for start in range(0, len(characters) - STEPS + 1, STEPS):
            yield characters[start : start + STEPS], following[start : start + STEPS], start == 0
