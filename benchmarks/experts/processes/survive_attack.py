"""Attacks with and without a token: ``python survive_attack.py '{"address": "a:1", "token": "secret", "uid": "u"}'``.

Runs until standard input ends. The question ``{}`` returns the number of attacks of each kind.
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

PAUSE = 0.05  # seconds between two attacks of a kind, because server and trainers share the processor
SILENT, HALVES = 200, 8
SECONDS = 1.0  # timeout of an attack without an answer
BIG = bytes(2 << 20)


class Attacks:
    """Attacks of every kind, each in its own thread."""

    def __init__(self, address: str, token: str, uid: str) -> None:
        self.counts: Counter[str] = Counter()
        self._address, self._uid = address, uid
        self._numbers = itertools.count()
        self._rival = GrpcTransport(address, token=token)
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._held: list[Any] = []
        kinds = (self.check, self.ask, self.guess, self.silence, self.half, self.discard)
        for kind in kinds:
            threading.Thread(target=self._repeat, args=(kind,), daemon=True).start()

    def _repeat(self, attack: Callable[[Any], None]) -> None:
        channel = grpc.insecure_channel(self._address, [("grpc.max_send_message_length", -1)])
        while True:
            with suppress(grpc.RpcError, OSError):
                attack(channel)
            self.counts[attack.__name__] += 1
            time.sleep(PAUSE)

    def check(self, channel: Any) -> None:
        """Health check with a name of 2 MiB."""
        channel.unary_unary("/grpc.health.v1.Health/Check")(BIG, timeout=SECONDS)

    def ask(self, channel: Any) -> None:
        """Large request for expert information, without a token."""
        channel.unary_unary(INFO)(BIG, timeout=SECONDS)

    def guess(self, channel: Any) -> None:
        """Large frame with a wrong token of 4000 characters."""
        metadata = (("authorization", "Bearer " + "x" * 4000),)
        list(channel.stream_stream(STREAM)(iter([BIG]), timeout=SECONDS, metadata=metadata))

    def silence(self, channel: Any) -> None:
        """Connections that send nothing."""
        host, _, port = self._address.rpartition(":")
        self._held.append(socket.create_connection((host, int(port)), SECONDS))
        if len(self._held) > SILENT:
            self._held.pop(0).close()

    def half(self, channel: Any) -> None:
        """Frames of 60 MiB, of which only the first part is sent. Has a valid token."""
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
        """Discards of mini-batches that are not open, with a valid token."""
        for _ in range(20):
            name = f"m{next(self._numbers)}"
            header = Header(kind=Kind.DISCARD, call_id=0, uid=self._uid, client="me", mini_batch=name)
            self._rival.submit(Call(header), SECONDS)


def main() -> None:
    take_stdout_aside()
    attacks = Attacks(**json.loads(sys.argv[1]))

    def handle(_: Answer) -> Answer:
        return dict(attacks.counts)

    answer_until_the_end({}, handle)


if __name__ == "__main__":
    main()
