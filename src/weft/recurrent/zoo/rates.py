"""Rates for nested values: one number for all tensors, or numbers nested as the value is.

0.1            every tensor of floating-point numbers; counters and masks are left alone
(0.1, 0.0)     for a state (h, c): h at 0.1, c never
"""

from typing import Any

from torch import Tensor

from weft.core.errors import SpecError, UsageError
from weft.core.tree import difference, flatten, structure_paths
from weft.recurrent.zoo.arguments import rate_fault

Rates = Any
"""A number from 0 to 1, or such numbers nested as the value that they are for."""


def rates_faults(name: str, rates: Rates) -> list[str]:
    """A fault for every leaf that is no probability, by its path."""
    leaves, structure = flatten(rates)
    paths = structure_paths(structure, name)
    return [fault for path, leaf in zip(paths, leaves, strict=True) for fault in rate_fault(path, leaf)]


def rates_for(name: str, rates: Rates, value: Any) -> list[float]:
    """The rate of every leaf of ``value``.

    Raises ``SpecError`` if rates are nested otherwise than the value, and ``UsageError`` where a rate above 0 meets
    what has no floating-point numbers.
    """
    leaves, structure = flatten(value)
    floating = [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves]
    if isinstance(rates, int | float):
        if rates and not any(floating):
            raise UsageError(f"{name} is {rates}, but there are no floating-point numbers that it could be for")
        return [float(rates) if fits else 0.0 for fits in floating]
    given, form = flatten(rates)
    fault = difference(structure, form, name)
    if fault:
        raise SpecError(f"rates must be one number, or nested as what they are for: {fault}")
    paths = structure_paths(form, name)
    wrong = [path for path, rate, fits in zip(paths, given, floating, strict=True) if rate and not fits]
    if wrong:
        raise UsageError(f"{', '.join(wrong)}: not 0, but for what has no floating-point numbers")
    return [float(rate) for rate in given]
