"""Requests that break the rules, among good ones; and frames that are broken at random.

offender   frame cut off, frame that says 2**63, wrong shape, dtype, name ...  ──> its own typed error, soon
good one   the same call, again and again, meanwhile                           ──> the same bits, always
"""

import random
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable

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
    rows,
)
from weft.core.errors import SpecError
from weft.experts.client import GrpcTransport
from weft.experts.compression import Compression
from weft.experts.errors import GradientError, TooManyRowsError
from weft.experts.server import Server
from weft.experts.wire import (
    Call,
    ExpertFailedError,
    Header,
    Kind,
    LimitError,
    MalformedError,
    TruncatedError,
    UnknownExpertError,
    WireError,
    decode,
    encode,
    read_fault,
)
from weft.experts.wire.header import CALL, PREAMBLE, TENSOR

WANTED_MS = 50.0
_GOOD = message(forward(rows(0)))
_AXIS = PREAMBLE.size + CALL.size + len(UID) + TENSOR.size  # where the first axis of the first tensor stands


def _with_axis(size: int) -> bytes:
    return _GOOD[:_AXIS] + struct.pack("<Q", size) + _GOOD[_AXIS + 8 :]


FRAMES: list[tuple[bytes, type[Exception]]] = [
    (_GOOD[:-7], TruncatedError),
    (_GOOD[:11], TruncatedError),
    (_GOOD + b"x", TruncatedError),
    (b"GET " + _GOOD[4:], MalformedError),
    (PREAMBLE.pack(b"WEFT", 1, 0, 1, 64, 1 << 63) + bytes(64), LimitError),
    (_with_axis(1 << 63), MalformedError),  # negative, as the format reads it
    (_with_axis((1 << 63) - 1), LimitError),
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
    stop, good = threading.Event(), [0, 0]
    with Server([awkward()]) as server, GrpcTransport(server.address) as bad, GrpcTransport(server.address) as fine:
        call = forward(rows(1))
        (wanted,) = fine.submit(call, PATIENCE).result(PATIENCE).tensors(copy=True)

        def go_on() -> None:
            while not stop.is_set():
                answer = fine.submit(call, PATIENCE)
                same = answer.exception(PATIENCE) is None and torch.equal(answer.result().tensors()[0], wanted)
                good[same] += 1

        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            with connected(server.address) as channel:
                for turn in range(times):
                    start = time.perf_counter()
                    seen, meant = _offend(turn, bad, channel)
                    took.append(time.perf_counter() - start)
                    wrong[f"{type(seen).__name__} for {meant.__name__}"] += type(seen) is not meant
        finally:
            stop.set()
            thread.join()
    p99 = quantile(took) * 1e3
    seen = f"{sum(wrong.values())} wrong; p99 {p99:.1f} ms; {good[1]} good answers, {good[0]} of them lost or changed"
    seen += f" ({', '.join(f'{n} x {what}' for what, n in wrong.items() if n)})" * any(wrong.values())
    return Verdict(
        "broken requests among good ones",
        f"{times}",
        f"its typed error, p99 <= {WANTED_MS:g} ms; others to the bit",
        seen,
        not any(wrong.values()) and p99 <= WANTED_MS and good[0] == 0 and good[1] > 0,
    )


def _offend(turn: int, bad: GrpcTransport, channel: object) -> tuple[BaseException | None, type[Exception]]:
    """What came back, and what should have."""
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


def fuzzed(times: int) -> Verdict:
    """So many frames with a few bytes changed, cut out, put in or repeated; every second one with its sums mended."""
    draw = random.Random(7)
    seeds = [message(*some) for some in _samples()]
    ends: Counter[str] = Counter()
    reasons: set[str] = set()
    for turn in range(times):
        broken = _mutated(seeds[turn % len(seeds)], draw)
        if turn % 2 and len(broken) >= PREAMBLE.size:
            broken[-8:] = bytes(8)
            struct.pack_into("<Q", broken, PREAMBLE.size - 8, max(0, len(broken) - _body_start(broken)))
        try:
            for one in decode(bytes(broken)):
                one.tensors()
            ends["frames"] += 1
        except WireError as error:
            ends["wire errors"] += 1
            reasons.add(error.reason)
        except BaseException as error:
            ends[f"{type(error).__name__}: {error}"] += 1
    others = sum(ends.values()) - ends["frames"] - ends["wire errors"]
    told = ", ".join(f"{count} {what}" for what, count in ends.most_common(5)) + f" for {len(reasons)} reasons"
    return Verdict("frames broken at random, decoded", f"{times}", "a frame or a WireError", told, not others)


def _samples() -> list[list[Call]]:
    made = [
        [forward(rows(0))],
        [backward(rows(0), rows(1), "a key"), forward(rows(2), number=2)],
        [Call(Header(kind=Kind.PING, call_id=3))],
        [Call(Header(kind=Kind.RESULT, call_id=4, data=b"d" * 24), [rows(3), torch.tensor([True, False])])],
    ]
    packed = Call(Header(kind=Kind.FORWARD, call_id=5, uid=UID), [rows(4)] * 2, [Compression.INT8, Compression.BF16])
    assert all(decode(b"".join(encode(calls))) for calls in made)
    return [*made, [packed]]


def _body_start(frame: bytes | bytearray) -> int:
    (header,) = struct.unpack_from("<I", frame, 8)
    return -(-(PREAMBLE.size + header) // 16) * 16


def _mutated(seed: bytes, draw: random.Random) -> bytearray:
    broken = bytearray(seed)
    changes: list[Callable[[int], None]] = [
        lambda at: broken.__setitem__(at, draw.randrange(256)),
        lambda at: broken.__setitem__(at, broken[at] ^ 1 << draw.randrange(8)),
        lambda at: broken.__delitem__(slice(at, at + draw.randint(1, 8))),
        lambda at: broken.__setitem__(slice(at, at), draw.randbytes(draw.randint(1, 8))),
        lambda at: broken.__setitem__(
            slice(at, at + 8), struct.pack("<Q", draw.choice([0, 1 << 31, 1 << 63, -1 % 2**64]))
        ),
        lambda at: broken.__setitem__(slice(at, at), broken[at : at + 32]),
    ]
    for _ in range(draw.randint(1, 4)):
        if broken:
            headish = min(len(broken), 160) if draw.random() < 0.8 else len(broken)
            draw.choice(changes)(draw.randrange(headish))
    return broken
