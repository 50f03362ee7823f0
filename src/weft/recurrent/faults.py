"""All faults of one call, gathered and told at once.

Whoever reads a part of the arguments appends what is wrong with it and goes on, so that one run of the program
shows everything that there is to repair.
"""

from dataclasses import dataclass, field

from weft.core.errors import SpecError, UsageError, listed


@dataclass(frozen=True)
class Faults:
    """``spec``: values that do not look as they should. ``usage``: arguments that do not make sense together."""

    spec: list[str] = field(default_factory=list[str])
    usage: list[str] = field(default_factory=list[str])

    def check(self, headline: str) -> None:
        """Raise if there is any: ``SpecError`` where a value is at fault, else ``UsageError``."""
        if self.spec or self.usage:
            kind = SpecError if self.spec else UsageError
            raise kind(listed(headline, [*self.usage, *self.spec]))
