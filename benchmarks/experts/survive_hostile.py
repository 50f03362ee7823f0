"""Malformed requests among valid ones. See survive_fuzz.py for randomly corrupted bytes.

malformed   truncated frame, 2**63 rows, wrong shape, dtype, name ...  ──> a typed error, soon
valid       the same call, repeated during the malformed ones          ──> always the same bits
"""

import time
from collections import Counter

import torch

from benchmarks.experts.survive_common import (
    MOST_ROWS,
    PATIENCE,
    ROWS,
    TROUBLE,
    UID,
    WIDTH,
    Raw,
    Verdict,
    awkward,
    backward,
    connected,
    forward,
    message,
    quantile,
    repeated_calls,
    rows,
)
from torchweft.core.errors import SpecError
from torchweft.experts.client import GrpcTransport
from torchweft.experts.errors import (
    ExpertFailedError,
    GradientError,
    LimitError,
    MalformedError,
    TooManyRowsError,
    TruncatedError,
    UnknownExpertError,
)
from torchweft.experts.protobuf import load_messages
from torchweft.experts.server import Server
from torchweft.experts.wire import Call, Header, Kind, read_fault

REQUIRED_MS = 50.0
_VALID = message(forward(rows(0)))


def _with_rows(count: int) -> bytes:
    """The valid frame, with another number of rows in the header of its tensor."""
    frame = load_messages("torchweft.experts.wire", "experts")["Frame"].FromString(_VALID)
    frame.header.calls[0].tensors[0].shape[0] = count
    return frame.SerializeToString()


FRAMES: list[tuple[bytes, type[Exception]]] = [
    (_VALID[:-7], TruncatedError),
    (_VALID[:11], TruncatedError),
    (_VALID + b"x", TruncatedError),
    (b"GET " + _VALID[4:], MalformedError),
    (_with_rows(ROWS - 1), MalformedError),
    (_with_rows(ROWS + 1), TruncatedError),
    (_with_rows((1 << 63) - 1), LimitError),
]
"""Malformed frames, which end their stream, and the expected errors."""
CALLS: list[tuple[Call, type[Exception]]] = [
    (forward(torch.zeros(ROWS, WIDTH + 1)), SpecError),
    (forward(torch.zeros(ROWS)), SpecError),
    (forward(torch.zeros(ROWS, WIDTH, dtype=torch.float64)), SpecError),
    (Call(Header(kind=Kind.FORWARD, call_id=1, uid=UID)), SpecError),
    (forward(torch.zeros(MOST_ROWS + 1, WIDTH)), TooManyRowsError),
    (forward(rows(0), "nobody"), UnknownExpertError),
    (forward(torch.full((ROWS, WIDTH), TROUBLE)), ExpertFailedError),
    (backward(rows(0), torch.full((ROWS, WIDTH), float("nan"))), GradientError),
]
"""Invalid calls, whose stream stays open, and the expected errors."""


def malformed_requests(times: int) -> Verdict:
    """Send `times` malformed requests one after another, while another client repeats a valid call."""
    seconds: list[float] = []
    wrong: Counter[str] = Counter()
    with (
        Server([awkward()]) as server,
        GrpcTransport(server.address) as bad,
        GrpcTransport(server.address) as other,
        connected(server.address) as channel,
        repeated_calls(other) as answers,
    ):
        for turn in range(times):
            start = time.perf_counter()
            error, expected = _send_malformed(turn, bad, channel)
            seconds.append(time.perf_counter() - start)
            wrong[f"{type(error).__name__} for {expected.__name__}"] += type(error) is not expected
    p99 = quantile(seconds) * 1e3
    measured = f"{sum(wrong.values())} wrong; p99 {p99:.1f} ms; {answers}"
    measured += f" ({', '.join(f'{count} x {error}' for error, count in wrong.items() if count)})" * any(wrong.values())
    return Verdict(
        "malformed requests among valid ones",
        f"{times}",
        f"a typed error, p99 <= {REQUIRED_MS:g} ms; other answers bit-equal",
        measured,
        not any(wrong.values()) and p99 <= REQUIRED_MS and answers.holds,
    )


def _send_malformed(turn: int, bad: GrpcTransport, channel: object) -> tuple[BaseException | None, type[Exception]]:
    """Send one malformed request. Return the error, and the expected class."""
    kind = turn % (len(FRAMES) + len(CALLS))
    if kind >= len(FRAMES):
        call, expected = CALLS[kind - len(FRAMES)]
        return bad.submit(call, PATIENCE).exception(PATIENCE), expected
    frame, expected = FRAMES[kind]
    with Raw(channel) as stream:
        stream.send(frame)
        for answer in stream.receive():
            if answer.header.kind is Kind.ERROR and answer.header.call_id == 0:
                return read_fault(answer.header.data), expected
    return None, expected
