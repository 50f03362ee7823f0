"""Attacks of a stranger and a neighbour: ``python survive_attack.py '{"address": "host:port", "token": "secret"}'``.

Until standard input ends. ``{}`` asks how often each attack was made so far.
"""

import itertools
import json
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
import torch
from words import Answer, answer_until_the_end, take_stdout_aside

from torchweft.experts.client import GrpcTransport
from torchweft.experts.wire import Call, Header, Kind, encode_parts
from torchweft.experts.wire.service import INFO, STREAM

PAUSE = 0.05  # seconds between two attacks of a kind: the processor is shared with those who are attacked
SILENT, HALVES = 200, 8
SECONDS = 1.0  # of an attack that gets no answer
BIG = bytes(2 << 20)


class Attack:
    """Threads, each with one kind of attack."""

    def __init__(self, address: str, token: str, uid: str) -> None:
        self.made: Counter[str] = Counter()
        self._address, self._uid = address, uid
        self._numbers = itertools.count()
        self._rival = GrpcTransport(address, token=token)
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._held: list[Any] = []
        kinds = (self.check, self.ask, self.guess, self.silence, self.half, self.discard)
        for each in kinds:
            threading.Thread(target=self._again, args=(each,), daemon=True).start()

    def _again(self, attack: Callable[[Any], None]) -> None:
        channel = grpc.insecure_channel(self._address, [("grpc.max_send_message_length", -1)])
        while True:
            with suppress(grpc.RpcError, OSError):
                attack(channel)
            self.made[attack.__name__] += 1
            time.sleep(PAUSE)

    def check(self, channel: Any) -> None:
        """Health, with a name of 2 MiB."""
        channel.unary_unary("/grpc.health.v1.Health/Check")(BIG, timeout=SECONDS)

    def ask(self, channel: Any) -> None:
        """Without a token."""
        channel.unary_unary(INFO)(BIG, timeout=SECONDS)

    def guess(self, channel: Any) -> None:
        """A token, and a name that fills logs."""
        metadata = (("authorization", "Bearer " + "x" * 4000),)
        list(channel.stream_stream(STREAM)(iter([BIG]), timeout=SECONDS, metadata=metadata))

    def silence(self, channel: Any) -> None:
        """Connections that say nothing."""
        host, _, port = self._address.rpartition(":")
        self._held.append(socket.create_connection((host, int(port)), SECONDS))
        if len(self._held) > SILENT:
            self._held.pop(0).close()

    def half(self, channel: Any) -> None:
        """Frames of 60 MiB, of which the neighbour sends the first part."""
        call = Call(Header(kind=Kind.FORWARD, call_id=1, uid=self._uid), [torch.zeros(60 << 20, dtype=torch.uint8)])
        frame = next(encode_parts([call]))

        def once() -> Any:
            yield frame
            time.sleep(SECONDS)

        calls = [channel.stream_stream(STREAM)(once(), timeout=SECONDS, metadata=self._metadata) for _ in range(HALVES)]
        for call in calls:
            with suppress(grpc.RpcError):
                list(call)

    def discard(self, channel: Any) -> None:
        """Mini-batches that are not open, under everybody's names."""
        for _ in range(20):
            name = f"m{next(self._numbers)}"
            header = Header(kind=Kind.DISCARD, call_id=0, uid=self._uid, client="me", mini_batch=name)
            self._rival.submit(Call(header), SECONDS)


def main() -> None:
    """Until standard input ends."""
    take_stdout_aside()
    attack = Attack(**json.loads(sys.argv[1]))

    def handle(asked: Answer) -> Answer:
        return dict(attack.made)

    answer_until_the_end({}, handle)


if __name__ == "__main__":
    main()
