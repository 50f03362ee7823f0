"""Encoded errors keep their class, text and reason, and arbitrary bytes decode to an error or a WireError."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.core.errors import SpecError, UsageError, WeftError
from torchweft.experts.errors import (
    ExpertError,
    ExpertFailedError,
    LimitError,
    NotOwnerError,
    OverloadError,
    RemoteError,
    TooManyRowsError,
    WireError,
)
from torchweft.experts.protobuf import load_messages
from torchweft.experts.wire import RETRYABLE, read_fault, register_fault, write_fault
from torchweft.experts.wire.service import FAULTS, MOST_TEXT


@given(
    st.sampled_from(list(FAULTS.values())),
    st.text(max_size=50),
    st.dictionaries(st.text(max_size=8), st.text(), max_size=4),
)
def test_error_keeps_its_class_and_details(kind: type[WeftError], words: str, details: dict[str, str]) -> None:
    def clean(text: str) -> str:
        return text.encode("utf-8", "replace").decode()

    seen = read_fault(write_fault(kind(words)))
    assert type(seen) is kind and str(seen) == clean(words)
    received = read_fault(write_fault(NotOwnerError("ask there", details))).details
    assert received == {clean(key): clean(value) for key, value in details.items()}
    limit = read_fault(write_fault(LimitError("too large", reason="elements", call_id=3)))
    assert isinstance(limit, LimitError) and limit.reason == "elements"


def test_foreign_error_arrives_as_expert_failure() -> None:
    class Unprintable(KeyError):
        def __str__(self) -> str:
            raise ValueError

    for error, words in ((ZeroDivisionError("by 0"), "ZeroDivisionError: by 0"), (Unprintable(), "cannot be shown")):
        seen = read_fault(write_fault(error))
        assert isinstance(seen, ExpertFailedError) and words in str(seen)
        assert seen.details["type"].endswith(type(error).__name__)


def test_unknown_error_arrives_as_its_nearest_base() -> None:
    for base in (TooManyRowsError, SpecError):
        seen = read_fault(write_fault(type("Own", (base,), {})("axis 1")))
        assert type(seen) is base and (base is TooManyRowsError or any("Own" in note for note in seen.__notes__))
    assert type(read_fault(write_fault(WeftError("any")))) is RemoteError
    newer = load_messages("torchweft.experts.wire", "experts")["Fault"](code=60000, message="full").SerializeToString()
    seen = read_fault(newer)
    assert type(seen) is RemoteError and seen.details["code"] == "60000" and str(seen) == "full"


def test_fault_code_belongs_to_one_class() -> None:
    class Own(ExpertError):
        pass

    register_fault(65000, Own)
    try:
        register_fault(65000, Own)  # registering the same pair again is allowed
        assert type(read_fault(write_fault(Own("x")))) is Own
        with pytest.raises(UsageError, match="stands for Own"):
            register_fault(65000, OverloadError)
    finally:
        del FAULTS[65000]
    for code in (0, 1 << 16):
        with pytest.raises(UsageError, match="from 1 to 65535"):
            register_fault(code, Own)


def test_long_texts_are_truncated() -> None:
    seen = read_fault(write_fault(RemoteError("ä" * 10000, {str(i): "y" * 9000 for i in range(99)})))
    assert len(str(seen).encode()) <= MOST_TEXT + 3
    assert len(seen.details) <= 32


def _mutated(cut: int, flip: int) -> bytes:
    data = bytearray(write_fault(NotOwnerError("there", {"address": "a:1"})))
    data[flip % len(data)] ^= 1 << (flip % 8)
    return bytes(data[: len(data) - cut % len(data)])


def test_retryable_errors_exclude_uncertain_outcomes() -> None:
    assert issubclass(NotOwnerError, RETRYABLE) and issubclass(OverloadError, RETRYABLE)
    names = {kind.__name__ for kind in FAULTS.values() if issubclass(kind, RETRYABLE)}
    assert not names & {"DeadlineError", "LostError", "StepError", "ExpertFailedError", "RemoteError", "ExpertError"}


@given(st.binary(max_size=80) | st.builds(_mutated, st.integers(0, 60), st.integers()))
def test_any_bytes_are_an_error_or_a_wire_error(data: bytes) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(read_fault(data), WeftError)
