"""How long a mixture waits, and what it puts up with. All faults of what it was told are found at once."""

from dataclasses import dataclass

from weft.core.errors import UsageError, listed
from weft.experts.checks import seconds_fault


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
        faults = [f"k_best is {self.k_best}, wanted at least 1"] if self.k_best < 1 else []
        for name in ("k_min", "backward_k_min"):
            value = getattr(self, name)
            if not 0 <= value <= self.k_best:
                faults.append(f"{name} is {value}, wanted 0 to k_best ({self.k_best})")
        for name in ("forward_timeout", "backward_timeout"):
            faults += seconds_fault(name, getattr(self, name))
        faults += seconds_fault("timeout_after_k_min", self.timeout_after_k_min, zero=True, none=True)
        if faults:
            raise UsageError(listed("a mixture cannot work like this:", faults))

    def steps_wanted(self, touched: int) -> int:
        """How many of so many experts must step at a commit: all, if nobody may be missing in backward; else any."""
        if self.allow_zero_outputs or self.backward_k_min == 0:
            return 0
        return touched if self.backward_k_min == self.k_best else min(1, touched)
