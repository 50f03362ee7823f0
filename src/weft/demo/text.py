"""Text to learn from, without a download: the help topics of the Python that runs this, out of its standard library.

"assert", "assignment", ...  ->  one text  ->  numbers  |--------- training ---------|- held out -|
                                                         cut into N pieces, which stand side by side:  T x N
"""

from collections import Counter
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from torch import Tensor

UNKNOWN = "\ufffd"
"""Stands for every character that is rare."""
_RARE = 20
_HELD_OUT = 0.05


class Text(NamedTuple):
    """An alphabet, and two parts of a text as numbers of its characters, int64."""

    alphabet: str
    train: Tensor
    held_out: Tensor

    def numbers(self, words: str) -> list[int]:
        """The numbers of these characters, 0 for those that are not in the alphabet."""
        return [max(self.alphabet.find(each), 0) for each in words]

    def spell(self, numbers: Sequence[int]) -> str:
        """The characters with these numbers."""
        return "".join(self.alphabet[each] for each in numbers)


def load_text() -> Text:
    """All topics in the order of their names; the last twentieth is held out."""
    words = "\n\n".join(topics[name] for name in sorted(topics))
    counted = Counter(words)
    alphabet = UNKNOWN + "".join(sorted(each for each, count in counted.items() if count >= _RARE))
    numbers = {each: number for number, each in enumerate(alphabet)}
    coded = torch.tensor([numbers.get(each, 0) for each in words])
    cut = int(len(coded) * (1 - _HELD_OUT))
    return Text(alphabet, coded[:cut], coded[cut:])


def side_by_side(numbers: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """A text as `rows` pieces of one length, L x rows: characters, and for each the one that follows it."""
    length = (len(numbers) - 1) // rows
    one, next_one = (numbers[i : i + rows * length].view(rows, length).t() for i in (0, 1))
    return one, next_one
