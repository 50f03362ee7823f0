"""Constructing a mixture reports all invalid arguments at once, by name, and accepts the valid ones."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.processes import python
from torchweft.core.validation import Validator
from torchweft.experts.mixture.fanout import MixtureOptions
from torchweft.experts.mixture.routing import check_grid

GOOD: dict[str, Any] = {
    "k_best": 4,
    "k_min": 1,
    "backward_k_min": 1,
    "forward_timeout": 1.0,
    "backward_timeout": 1.0,
    "timeout_after_k_min": None,
    "detect_anomalies": False,
    "allow_zero_outputs": False,
}
NO_COUNT = st.one_of(st.none(), st.booleans(), st.floats(), st.text(max_size=3), st.integers(max_value=-1))
CONSTRUCTED = """
import math

import torch
from torchweft.core.errors import UsageError
from torchweft.experts.client import Connections
from torchweft.experts.discovery import LocalDirectory
from torchweft.experts.mixture import RemoteMixtureOfExperts, RemoteSwitchMixtureOfExperts

directory = LocalDirectory()
connections = Connections(directory)
good = {"in_features": 8, "grid_size": [2, 2], "uid_prefix": "ffn", "connections": connections}
wrong = {
    "in_features": [0, 8.0, None],
    "grid_size": [4, "22", [2.0, 2.0], None, [], [2, True]],
    "uid_prefix": [None, "", 3],
    "connections": [directory, None, "host:1"],
    "k_best": [2.0, True, "2", None, 0],
    "k_min": [0.5, True, -1, None, 5],
    "backward_k_min": [1.5, True],
    "retry": [3, "never"],
    "compression": ["fp16", 1],
    "client": [5],
    "forward_timeout": [None, "1", 0.0],
    "backward_timeout": [math.inf],
    "timeout_after_k_min": [-1.0],
    **{name: ["no", 1, None] for name in ("detect_anomalies", "allow_zero_outputs", "accumulate", "keep_graph")},
}
of_switch = {"jitter_eps": [None, "a", 1.0, True, math.nan], "capacity_factor": ["1", True, 0.0, math.inf, math.nan]}

def faults(kind, given):
    try:
        kind(**{**good, **given})
    except UsageError as error:
        return str(error).splitlines()[1:]
    return []

for kind, cases in ((RemoteMixtureOfExperts, wrong), (RemoteSwitchMixtureOfExperts, {**wrong, **of_switch})):
    assert faults(kind, {}) == [] == faults(kind, {"retry": None, "compression": None, "grid_size": torch.Size([2, 2])})
    for name, values in cases.items():
        for value in values:
            lines = faults(kind, {name: value})
            assert lines and all(line.startswith(f"  - {name}") for line in lines), (name, value, lines)
    everything = "\\n".join(faults(kind, {name: values[0] for name, values in cases.items()}))
    assert all(f"- {name} is " in everything for name in cases), everything
    assert faults(kind, {"k_best": 9, "k_min": 9})[0].startswith("  - k_min is 9")
connections.close()
directory.close()
"""


def faults_of(checked: Callable[..., object], *arguments: Any) -> list[str]:
    check = Validator("invalid")
    checked(check, *arguments)
    return check.faults


def checked_options(**given: Any) -> Callable[..., object]:
    return partial(MixtureOptions.check, SimpleNamespace(**{**GOOD, **given}))


def test_wrong_argument_types_are_refused_at_once() -> None:
    # In a separate process, because the run-time type checks of this suite would reject the values first.
    seen = python(CONSTRUCTED)
    assert seen.returncode == 0, seen.stderr


@given(st.sampled_from(["k_best", "k_min", "backward_k_min"]), NO_COUNT)
def test_invalid_count_is_one_fault_under_its_own_name(name: str, value: Any) -> None:
    faults = faults_of(checked_options(**{name: value}))
    assert len(faults) == 1 and faults[0].startswith(f"{name} is {value!r}, wanted an int")


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9), st.integers(1, 9))
def test_counts_are_valid_if_enough_can_answer(k_best: int, k_min: int, backward_k_min: int, places: int) -> None:
    faults = faults_of(checked_options(k_best=k_best, k_min=k_min, backward_k_min=backward_k_min), places)
    expected = [k_min > min(k_best, places), backward_k_min > k_best]
    assert [any(fault.startswith(name) for fault in faults) for name in ("k_min", "backward_k_min")] == expected
    assert len(faults) == sum(expected)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from([list, tuple]))
def test_any_list_of_sizes_is_a_grid(sizes: list[int], kind: Any) -> None:
    assert faults_of(check_grid, "ffn", kind(sizes)) == []
    assert faults_of(check_grid, "ffn", kind([*sizes, 1.5])) == [
        f"grid_size[{len(sizes)}] is 1.5, wanted an int of at least 1"
    ]
