"""Requests that break the rules, among good ones. For bytes that are broken at random see survive_fuzz.py.

offender   frame cut off, frame that says 2**63, wrong shape, dtype, name ...  ──> its own typed error, soon
good one   the same call, again and again, meanwhile                           ──> the same bits, always
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
    goes_on,
    message,
    quantile,
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
_GOOD = message(forward(rows(0)))


def _with_rows(count: int) -> bytes:
    """The good frame, whose tensor says that it has so many rows."""
    frame = load_messages("torchweft.experts.wire", "experts")["Frame"].FromString(_GOOD)
    frame.header.calls[0].tensors[0].shape[0] = count
    return frame.SerializeToString()


FRAMES: list[tuple[bytes, type[Exception]]] = [
    (_GOOD[:-7], TruncatedError),
    (_GOOD[:11], TruncatedError),
    (_GOOD + b"x", TruncatedError),
    (b"GET " + _GOOD[4:], MalformedError),
    (_with_rows(ROWS - 1), MalformedError),
    (_with_rows(ROWS + 1), TruncatedError),
    (_with_rows((1 << 63) - 1), LimitError),
]
"""They end their stream."""
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
"""They get their answer, and the stream goes on."""


def among_good_ones(times: int) -> Verdict:
    """So many broken requests, one after the other, while a good client calls."""
    took: list[float] = []
    wrong: Counter[str] = Counter()
    with (
        Server([awkward()]) as server,
        GrpcTransport(server.address) as bad,
        GrpcTransport(server.address) as fine,
        connected(server.address) as channel,
        goes_on(fine) as good,
    ):
        for turn in range(times):
            start = time.perf_counter()
            seen, meant = _offend(turn, bad, channel)
            took.append(time.perf_counter() - start)
            wrong[f"{type(seen).__name__} for {meant.__name__}"] += type(seen) is not meant
    p99 = quantile(took) * 1e3
    seen = f"{sum(wrong.values())} wrong; p99 {p99:.1f} ms; {good}"
    seen += f" ({', '.join(f'{n} x {what}' for what, n in wrong.items() if n)})" * any(wrong.values())
    return Verdict(
        "broken requests among good ones",
        f"{times}",
        f"its typed error, p99 <= {REQUIRED_MS:g} ms; others to the bit",
        seen,
        not any(wrong.values()) and p99 <= REQUIRED_MS and good.holds,
    )


def _offend(turn: int, bad: GrpcTransport, channel: object) -> tuple[BaseException | None, type[Exception]]:
    """The answer, and the required answer."""
    kind = turn % (len(FRAMES) + len(CALLS))
    if kind >= len(FRAMES):
        call, meant = CALLS[kind - len(FRAMES)]
        return bad.submit(call, PATIENCE).exception(PATIENCE), meant
    frame, meant = FRAMES[kind]
    with Raw(channel) as stream:
        stream.send(frame)
        for answer in stream.receive():
            if answer.header.kind is Kind.ERROR and answer.header.call_id == 0:
                return read_fault(answer.header.data), meant
    return None, meant
