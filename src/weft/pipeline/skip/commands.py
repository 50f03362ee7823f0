"""The two commands that a skippable layer yields, and what each gets in return.

    def forward(self, x):
        yield stash("early", x)          # gets None
        far = yield pop("far")           # gets the tensor, or None if None was stashed
        return self.conv(x) + far

Outside of the ``forward`` of a skippable layer they do nothing.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class stash:
    """Put a tensor, or None, where the layers that declare ``pop=[name]`` will find it."""

    name: str
    tensor: Tensor | None


@dataclass(frozen=True, slots=True)
class pop:
    """Ask for the tensor that was stashed under this name."""

    name: str
