"""Randomly corrupted bytes for every decoder. Each must return a message or raise WireError.

    bits, bytes   flipped, set, removed, inserted, repeated           mostly in the header
    lengths       eight, four or two bytes set to an extreme          0, 1, 2**31, 2**63, 2**64 - 1
    truncated     cut at a random position
    spliced       the start of one message, the end of another        their lengths do not match
    swapped       two ranges of one message are exchanged             calls, descriptors, tensors out of order

In every second frame only the header is changed and its length is corrected, so that the corruption passes the outer
checks.
"""

import resource
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import torch
from torch import nn

from benchmarks.experts.survive_common import UID, WIDTH, Verdict, backward, forward, message, rows
from torchweft.experts import ExpertBackend, TensorSpec
from torchweft.experts.compression import Compression
from torchweft.experts.errors import GradientError, WireError
from torchweft.experts.protobuf import load_messages
from torchweft.experts.replication.replica import StateVersion
from torchweft.experts.replication.streams import PullRequest, PullResponse, UpdateKind, read_request, read_response
from torchweft.experts.wire import Call, Header, Kind, decode, read_fault, write_fault
from torchweft.experts.wire.service import StepReceipt, describe, read_description, read_receipt

SEED = 7
REQUIRED_MB = 64.0
_HEAD = 160
_FRAME = load_messages("torchweft.experts.wire", "experts", "Frame.header")["Frame"]
_EXTREMES = (0, 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_WIDTHS = ((8, "<Q"), (8, "<Q"), (4, "<I"), (2, "<H"))


def corrupted_messages(times: int, seed: int = SEED) -> Verdict:
    """Decode `times` corrupted messages in this process. Four of five are frames."""
    draw, tally = Random(seed), _Tally()
    frames = [message(*calls) for calls in _frames()]
    others = _others()
    before = _peak()
    for turn in range(times):
        if turn % 5:
            corrupted = (_corrupt_header if turn & 1 else _corrupt)(draw.choice(frames), draw.choice(frames), draw)
            tally.count(_decode_frame, bytes(corrupted))
        else:
            read, samples = draw.choice(others)
            tally.count(read, bytes(_corrupt(draw.choice(samples), draw.choice(samples), draw)))
    growth = (_peak() - before) / 1024
    return Verdict(
        "randomly corrupted bytes, for every decoder",
        f"{times}",
        f"decoded, or a WireError; at most {REQUIRED_MB:g} MB more",
        f"{tally}; {growth:+.1f} MB, the longest {tally.longest * 1e3:.1f} ms; seed {seed}",
        not tally.strange and growth <= REQUIRED_MB,
    )


@dataclass
class _Tally:
    """Outcomes of the decoders."""

    decoded: int = 0
    rejected: Counter[str] = field(default_factory=Counter[str])
    strange: Counter[str] = field(default_factory=Counter[str])
    longest: float = 0.0

    def count(self, read: Callable[[bytes], object], corrupted: bytes) -> None:
        """Decode one message and count the outcome."""
        start = time.perf_counter()
        try:
            read(corrupted)
            self.decoded += 1
        except WireError as error:
            self.rejected[error.reason] += 1
        except BaseException as error:
            self.strange[f"{type(error).__name__}: {error}"] += 1
        self.longest = max(self.longest, time.perf_counter() - start)

    def __str__(self) -> str:
        strange = "".join(f", {count} {error}" for error, count in self.strange.most_common(3))
        text = f"{self.decoded} decoded, {self.rejected.total()} wire errors for {len(self.rejected)} reasons, "
        return text + f"{self.strange.total()} others" + strange


def _decode_frame(frame: bytes) -> None:
    for received in decode(frame):
        received.tensors()


def _peak() -> int:
    """Peak resident memory of this process, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _frames() -> list[list[Call]]:
    kinds = [Compression.INT8, Compression.BF16]
    return [
        [forward(rows(0))],
        [backward(rows(0), rows(1), "a key"), forward(rows(2), number=2)],
        [Call(Header(kind=Kind.PING, call_id=3))],
        [Call(Header(kind=Kind.RESULT, call_id=4, data=b"d" * 24), [rows(3), torch.tensor([True, False])])],
        [Call(Header(kind=Kind.FORWARD, call_id=5, uid=UID), [rows(4)] * 2, kinds)],
    ]


def _others() -> list[tuple[Callable[[bytes], object], list[bytes]]]:
    """All other decoders, each with valid messages."""
    args = (TensorSpec((None, WIDTH), torch.float32),)
    described = describe(ExpertBackend(UID, nn.Linear(WIDTH, WIDTH), args_schema=args).get_info(), None, 1)
    faults = [WireError("broken", reason="length"), GradientError("NaN in it"), ValueError("whatever")]
    mark = StateVersion(1, 2, 3)
    return [
        (read_receipt, [StepReceipt(1, 2, 3).to_bytes(), StepReceipt(None, 1 << 60).to_bytes()]),
        (read_fault, [write_fault(error) for error in faults]),
        (read_description, [described]),
        (read_request, [PullRequest(mark, 1, 2, 3).to_bytes()]),
        (read_response, [PullResponse(kind, mark, 100).to_bytes() for kind in UpdateKind]),
    ]


def _corrupt(one: bytes, other: bytes, draw: Random) -> bytearray:
    """Copy of a message with one to four random changes."""
    data = bytearray(one)
    for _ in range(draw.randint(1, 4)):
        if data:
            draw.choice(_CHANGES)(data, other, draw)
    return data


def _corrupt_header(one: bytes, other: bytes, draw: Random) -> bytearray:
    """Copy of a frame with one to four random changes of its header, whose length is corrected."""
    frame, rest = _FRAME.FromString(one), _FRAME.FromString(other)
    frame.header = bytes(_corrupt(frame.header, rest.header, draw))
    return bytearray(frame.SerializeToString())


def _position(data: bytearray, draw: Random) -> int:
    """Random position, mostly near the start."""
    return int(draw.random() * (min(len(data), _HEAD) if draw.random() < 0.8 else len(data)))


def _flip(data: bytearray, _: bytes, draw: Random) -> None:
    data[_position(data, draw)] ^= 1 << draw.getrandbits(3)


def _set(data: bytearray, _: bytes, draw: Random) -> None:
    data[_position(data, draw)] = draw.getrandbits(8)


def _cut(data: bytearray, _: bytes, draw: Random) -> None:
    at = _position(data, draw)
    del data[at : at + draw.randint(1, 8)]


def _put(data: bytearray, _: bytes, draw: Random) -> None:
    at = _position(data, draw)
    data[at:at] = draw.randbytes(draw.randint(1, 8))


def _repeat(data: bytearray, _: bytes, draw: Random) -> None:
    at = _position(data, draw)
    data[at:at] = data[at : at + 32]


def _extreme(data: bytearray, _: bytes, draw: Random) -> None:
    size, form = draw.choice(_WIDTHS)
    at = _position(data, draw)
    data[at : at + size] = struct.pack(form, draw.choice(_EXTREMES) & (1 << 8 * size) - 1)


def _truncate(data: bytearray, _: bytes, draw: Random) -> None:
    del data[_position(data, draw) :]


def _splice(data: bytearray, other: bytes, draw: Random) -> None:
    data[_position(data, draw) :] = other[int(draw.random() * len(other)) :]


def _swap(data: bytearray, _: bytes, draw: Random) -> None:
    a, b, c, d = sorted(_position(data, draw) for _ in range(4))
    data[a:d] = data[c:d] + data[b:c] + data[a:b]


_CHANGES = (_flip, _set, _cut, _put, _repeat, _extreme, _extreme, _truncate, _splice, _swap)
