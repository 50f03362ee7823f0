"""Bytes broken at random, for every decoder: each ends with a decoded message or a WireError, and nothing else.

    bits, bytes   turned over, set, cut out, put in, repeated         mostly in the head, where the format is
    lengths       eight, four or two bytes set to an extreme          0, 1, 2**31, 2**63, 2**64 - 1
    truncated     cut off anywhere
    spliced       the beginning of one message, the end of another    their lengths no longer agree
    swapped       two stretches of one message change places          calls, descriptors, tensors out of order

Of every second frame only the header is changed, and its length fits, so that what is broken lies deeper.
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


def fuzzed(times: int, seed: int = SEED) -> Verdict:
    """So many messages broken, four of five of them frames; in this process, which their numbers alone may fill."""
    draw, tally = Random(seed), _Tally()
    frames = [message(*calls) for calls in _frames()]
    others = _others()
    before = _peak()
    for turn in range(times):
        if turn % 5:
            broken = (_deeply_broken if turn & 1 else _broken)(draw.choice(frames), draw.choice(frames), draw)
            tally.count(_decoded, bytes(broken))
        else:
            read, samples = draw.choice(others)
            tally.count(read, bytes(_broken(draw.choice(samples), draw.choice(samples), draw)))
    grown = (_peak() - before) / 1024
    return Verdict(
        "bytes broken at random, for every decoder",
        f"{times}",
        f"taken, or a WireError; at most {REQUIRED_MB:g} MB more",
        f"{tally}; {grown:+.1f} MB, the longest {tally.longest * 1e3:.1f} ms; seed {seed}",
        not tally.strange and grown <= REQUIRED_MB,
    )


@dataclass
class _Tally:
    """Outcomes of the decoders."""

    taken: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    strange: Counter[str] = field(default_factory=Counter[str])
    longest: float = 0.0

    def count(self, read: Callable[[bytes], object], broken: bytes) -> None:
        """Try one."""
        start = time.perf_counter()
        try:
            read(broken)
            self.taken += 1
        except WireError as error:
            self.refused[error.reason] += 1
        except BaseException as error:
            self.strange[f"{type(error).__name__}: {error}"] += 1
        self.longest = max(self.longest, time.perf_counter() - start)

    def __str__(self) -> str:
        strange = "".join(f", {count} {what}" for what, count in self.strange.most_common(3))
        told = f"{self.taken} taken, {self.refused.total()} wire errors for {len(self.refused)} reasons, "
        return told + f"{self.strange.total()} others" + strange


def _decoded(frame: bytes) -> None:
    for one in decode(frame):
        one.tensors()


def _peak() -> int:
    """The most memory that this process ever had, in KiB."""
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
    """The other decoders, each with messages that it takes."""
    args = (TensorSpec((None, WIDTH), torch.float32),)
    described = describe(ExpertBackend(UID, nn.Linear(WIDTH, WIDTH), args_schema=args).get_info(), None, 1)
    faults = [WireError("broken", reason="length"), GradientError("NaN in it"), ValueError("whatever")]
    mark = StateVersion(1, 2, 3)
    return [
        (read_receipt, [StepReceipt(1, 2, 3).to_bytes(), StepReceipt(None, 1 << 60).to_bytes()]),
        (read_fault, [write_fault(each) for each in faults]),
        (read_description, [described]),
        (read_request, [PullRequest(mark, 1, 2, 3).to_bytes()]),
        (read_response, [PullResponse(news, mark, 100).to_bytes() for news in UpdateKind]),
    ]


def _broken(one: bytes, other: bytes, draw: Random) -> bytearray:
    """One message, changed in one to four ways."""
    made = bytearray(one)
    for _ in range(draw.randint(1, 4)):
        if made:
            draw.choice(_WAYS)(made, other, draw)
    return made


def _deeply_broken(one: bytes, other: bytes, draw: Random) -> bytearray:
    """One frame, whose header is changed in one to four ways, and as long as the frame says."""
    frame, rest = _FRAME.FromString(one), _FRAME.FromString(other)
    frame.header = bytes(_broken(frame.header, rest.header, draw))
    return bytearray(frame.SerializeToString())


def _at(made: bytearray, draw: Random) -> int:
    """A place, mostly near the beginning."""
    return int(draw.random() * (min(len(made), _HEAD) if draw.random() < 0.8 else len(made)))


def _flip(made: bytearray, _: bytes, draw: Random) -> None:
    made[_at(made, draw)] ^= 1 << draw.getrandbits(3)


def _set(made: bytearray, _: bytes, draw: Random) -> None:
    made[_at(made, draw)] = draw.getrandbits(8)


def _cut(made: bytearray, _: bytes, draw: Random) -> None:
    at = _at(made, draw)
    del made[at : at + draw.randint(1, 8)]


def _put(made: bytearray, _: bytes, draw: Random) -> None:
    at = _at(made, draw)
    made[at:at] = draw.randbytes(draw.randint(1, 8))


def _repeat(made: bytearray, _: bytes, draw: Random) -> None:
    at = _at(made, draw)
    made[at:at] = made[at : at + 32]


def _extreme(made: bytearray, _: bytes, draw: Random) -> None:
    size, form = draw.choice(_WIDTHS)
    at = _at(made, draw)
    made[at : at + size] = struct.pack(form, draw.choice(_EXTREMES) & (1 << 8 * size) - 1)


def _truncate(made: bytearray, _: bytes, draw: Random) -> None:
    del made[_at(made, draw) :]


def _splice(made: bytearray, other: bytes, draw: Random) -> None:
    made[_at(made, draw) :] = other[int(draw.random() * len(other)) :]


def _swap(made: bytearray, _: bytes, draw: Random) -> None:
    """Two stretches."""
    a, b, c, d = sorted(_at(made, draw) for _ in range(4))
    made[a:d] = made[c:d] + made[b:c] + made[a:b]


_WAYS = (_flip, _set, _cut, _put, _repeat, _extreme, _extreme, _truncate, _splice, _swap)
