"""Options of a mixture: how many answers it wants, how long it waits, and the checks of all its arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from weft.core.validation import Validator, is_whole
from weft.experts.client.connections import Connections
from weft.experts.client.remote import check_compression
from weft.experts.client.retry import Retry
from weft.experts.mixture.grid import check_grid


@dataclass(frozen=True)
class MixtureOptions:
    """See `RemoteMixtureOfExperts`. Seconds and counts."""

    k_best: int
    k_min: int
    backward_k_min: int
    forward_timeout: float
    backward_timeout: float
    timeout_after_k_min: float | None
    detect_anomalies: bool
    allow_zero_outputs: bool

    def __post_init__(self) -> None:
        with Validator("invalid mixture options") as check:
            check_options(check, vars(self))

    def steps_wanted(self, touched: int) -> int:
        """How many of so many experts must step at a commit: all, if none may be missing in backward; else one."""
        if self.allow_zero_outputs or self.backward_k_min == 0:
            return 0
        return touched if self.backward_k_min == self.k_best else min(1, touched)


def check_options(check: Validator, given: Mapping[str, Any], places: int | None = None) -> None:
    """Check these values of `MixtureOptions`, for a grid of so many places."""
    k_best = given["k_best"]
    most = k_best if check.count("k_best", k_best) else None
    for name in ("k_min", "backward_k_min"):
        value = given[name]
        valid = is_whole(value) and value >= 0 and (most is None or value <= most)
        if check.that(valid, f"{name} is {value!r}, wanted an int from 0 to k_best ({k_best!r})"):
            fits = name != "k_min" or places is None or value <= places
            check.that(fits, f"k_min is {value}, but the grid has only {places} experts")
    check.seconds("forward_timeout", given["forward_timeout"])
    check.seconds("backward_timeout", given["backward_timeout"])
    check.seconds("timeout_after_k_min", given["timeout_after_k_min"], zero=True, optional=True)
    check.boolean("detect_anomalies", given["detect_anomalies"])
    check.boolean("allow_zero_outputs", given["allow_zero_outputs"])


def check_mixture(check: Validator, given: Mapping[str, Any]) -> None:
    """Check the arguments of `RemoteMixtureOfExperts`, by name."""
    check.count("in_features", given["in_features"])
    valid = check_grid(check, given["uid_prefix"], given["grid_size"])
    wanted = "Connections, made with Connections(directory)"
    check.instance("connections", given["connections"], Connections, wanted)
    check_options(check, given, prod(given["grid_size"]) if valid else None)
    check.instance("retry", given["retry"], Retry, "a Retry", optional=True)
    check_compression(check, given["compression"])
    check.instance("client", given["client"], str, "a name", optional=True)
    check.boolean("accumulate", given["accumulate"])
    check.boolean("keep_graph", given["keep_graph"])
