"""What the constructors of the zoo refuse: sizes that are no sizes, rates that are no rates. All faults at once."""

from collections.abc import Sequence

import torch

from weft.core.errors import UsageError, listed

Device = torch.device | str | int | None
"""Where parameters are made, in all the ways in which PyTorch's own modules take it."""


def size_faults(**sizes: int) -> list[str]:
    """A fault for every size below 1, by its argument's name."""
    return [f"{name} is {size}, wanted at least 1" for name, size in sizes.items() if size < 1]


def rate_fault(name: str, rate: object) -> list[str]:
    """A fault if ``rate`` is no probability."""
    if isinstance(rate, int | float) and 0 <= rate <= 1:
        return []
    return [f"{name} is {rate!r}, wanted a number from 0 to 1"]


def refuse(cell: object, faults: Sequence[str]) -> None:
    """Raise ``UsageError`` that lists the faults, if there are any."""
    if faults:
        raise UsageError(listed(f"{type(cell).__name__} cannot be built from these arguments:", faults))
