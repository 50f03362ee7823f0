"""How long a mixture waits, and what it puts up with. All faults of what it was told are found at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.core.errors import UsageError, listed
from weft.experts.checks import count_fault, is_whole, seconds_fault


def refuse(faults: Sequence[str]) -> None:
    """Raise ``UsageError`` that lists them, if there are any."""
    if faults:
        raise UsageError(listed("a mixture cannot work like this:", faults))


def term_faults(terms: Mapping[str, Any], places: int | None = None) -> list[str]:
    """What is wrong with these values of `Terms`, by name, in a grid of so many places."""
    k_best = terms["k_best"]
    faults = count_fault("k_best", k_best)
    most = None if faults else k_best
    for name in ("k_min", "backward_k_min"):
        value = terms[name]
        if not is_whole(value) or value < 0 or (most is not None and value > most):
            faults.append(f"{name} is {value!r}, wanted an int from 0 to k_best ({k_best!r})")
        elif name == "k_min" and places is not None and value > places:
            faults.append(f"k_min is {value}, but no sample can have more answers than the grid has places ({places})")
    for name in ("forward_timeout", "backward_timeout"):
        faults += seconds_fault(name, terms[name])
    return faults + seconds_fault("timeout_after_k_min", terms["timeout_after_k_min"], zero=True, none=True)


@dataclass(frozen=True)
class Terms:
    """See `RemoteMixtureOfExperts`, which says what each of them means. Seconds and counts."""

    k_best: int
    k_min: int
    backward_k_min: int
    forward_timeout: float
    backward_timeout: float
    timeout_after_k_min: float | None
    detect_anomalies: bool
    allow_zero_outputs: bool

    def __post_init__(self) -> None:
        refuse(term_faults(vars(self)))

    def steps_wanted(self, touched: int) -> int:
        """How many of so many experts must step at a commit: all, if nobody may be missing in backward; else any."""
        if self.allow_zero_outputs or self.backward_k_min == 0:
            return 0
        return touched if self.backward_k_min == self.k_best else min(1, touched)
