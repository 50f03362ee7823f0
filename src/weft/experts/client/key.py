"""The key of a forward and its backward, by which a server finds what it kept of the one for the other.

forward   key ──> the server keeps graph and inputs, if it has a budget for that, and says so
backward  key ──> kept: only the gradients are sent; and where the inputs are gone meanwhile, the whole call
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from weft.experts.compression import Policy
from weft.experts.wire import Call, Flags, Header, Received


def _fresh() -> str:
    return secrets.token_hex(16)  # of the system's: the caller's generators are the caller's


@dataclass(eq=False, slots=True)
class Key:
    """``text`` is what travels. ``kept``: the server has said that it holds the inputs of the forward."""

    text: str = field(default_factory=_fresh)
    kept: bool = False

    def heard(self, answer: Received) -> None:
        """What the answer of the forward says."""
        self.kept = Flags.KEEP in answer.header.flags

    def backward(
        self, header: Header, inputs: Sequence[Tensor], gradients: Sequence[Tensor], compression: Policy
    ) -> tuple[Call, Call]:
        """What to send, and the whole call, for a server that does not hold the inputs. Both bear this key."""
        header = header._replace(key=self.text)
        ways = compression.choose("output_gradients", len(gradients))
        whole = Call(header, [*inputs, *gradients], [*compression.choose("inputs", len(inputs)), *ways])
        return Call(header._replace(flags=Flags.KEEP), gradients, ways) if self.kept else whole, whole
