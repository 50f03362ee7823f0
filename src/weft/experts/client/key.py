"""The key of a forward and its backward: by it a server finds what it kept of the one for the other, and a module
that draws random numbers draws the same ones for both.

forward   key ──> the server keeps graph and inputs, if that is wished and it has a budget for that, and says so
backward  key ──> kept: only the gradients are sent; and where the inputs are gone meanwhile, the whole call
once more key+1   another backward of the same forward: a step of its own, with the same random numbers
in parts  key/2   of the third part of a call that has more rows than the server takes at a time
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from weft.experts.compression import Policy
from weft.experts.task import REPEATED
from weft.experts.wire import Call, Flags, Header, Received


def _fresh() -> str:
    return secrets.token_hex(16)  # of the system's: the caller's generators are the caller's


@dataclass(eq=False, slots=True)
class Key:
    """``text`` is what travels. ``keep``: the server is asked to keep graph and inputs; ``kept``: it has said that it
    holds the inputs. ``evaluation``: the module runs as after ``eval()``, in forward and backward."""

    keep: bool = False
    evaluation: bool = False
    text: str = field(default_factory=_fresh)
    kept: bool = False
    _again: int = 0
    _parts: "list[Key]" = field(default_factory=list["Key"])

    def forward(self, header: Header) -> Header:
        """The header of the forward."""
        flags = self._mode | (Flags.KEEP if self.keep else Flags.NONE)
        return header._replace(key=self.text, flags=flags)

    def heard(self, answer: Received) -> None:
        """What the answer of the forward says."""
        self.kept = Flags.KEEP in answer.header.flags

    def backward(
        self, header: Header, inputs: Sequence[Tensor], gradients: Sequence[Tensor], compression: Policy
    ) -> tuple[Call, Call]:
        """What to send, and the whole call, for a server that does not hold the inputs. Both bear this key."""
        header = header._replace(key=self.text, flags=self._mode)
        ways = compression.choose("output_gradients", len(gradients))
        whole = Call(header, [*inputs, *gradients], [*compression.choose("inputs", len(inputs)), *ways])
        short = header._replace(flags=self._mode | Flags.KEEP)
        return Call(short, gradients, ways) if self.kept else whole, whole

    def again(self) -> "Key":
        """The key of one more backward of the same forward."""
        first, _, _ = self.text.partition(REPEATED)
        number = self._again + 1
        return Key(evaluation=self.evaluation, text=f"{first}{REPEATED}{number}", _again=number)

    def split(self, count: int) -> "list[Key]":
        """The keys of so many parts of a call, the same ones for its forward and its backward."""
        if len(self._parts) != count:
            first, repeated, number = self.text.partition(REPEATED)
            texts = [f"{first}/{part}{repeated}{number}" for part in range(count)]
            self._parts = [Key(self.keep, self.evaluation, text) for text in texts]
        return self._parts

    @property
    def _mode(self) -> Flags:
        return Flags.EVALUATION if self.evaluation else Flags.NONE
