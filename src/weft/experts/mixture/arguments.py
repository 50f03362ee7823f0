"""What is wrong with the arguments of a mixture, in words: all of it is told where one is made."""

from collections.abc import Mapping
from math import prod
from typing import Any

from weft.core.validation import Validator
from weft.experts.checks import count_fault, kind_fault, switch_fault
from weft.experts.client.connections import Connections
from weft.experts.client.remote import check_compression
from weft.experts.client.retry import Retry
from weft.experts.mixture.grid import grid_faults
from weft.experts.mixture.terms import term_faults

_SWITCHES = ("detect_anomalies", "allow_zero_outputs", "accumulate", "keep_graph")


def mixture_faults(given: Mapping[str, Any]) -> list[str]:
    """Of `RemoteMixtureOfExperts`, whose arguments these are, by name, whatever they are."""
    connections, retry, compression = given["connections"], given["retry"], given["compression"]
    nowhere = grid_faults(given["uid_prefix"], given["grid_size"])
    return [
        *count_fault("in_features", given["in_features"]),
        *nowhere,
        *kind_fault("connections", connections, Connections, "Connections, made with Connections(directory)"),
        *term_faults(given, None if nowhere else prod(given["grid_size"])),
        *kind_fault("retry", retry, Retry, "a Retry", none=True),
        *_compression_faults(compression),
        *kind_fault("client", given["client"], str, "a name", none=True),
        *[fault for name in _SWITCHES for fault in switch_fault(name, given[name])],
    ]


def _compression_faults(compression: Any) -> list[str]:
    check = Validator("")
    check_compression(check, compression)
    return check.faults
