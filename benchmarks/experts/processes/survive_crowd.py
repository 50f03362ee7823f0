"""Many idle or slow connections to one server: ``python survive_crowd.py '{"address": "host:port"}'``.

{"idle": 1000}                    opens idle streams, each with its own connection
{"slow": 10, "frame": "base64"}   opens streams that send the frame as often as possible and never read an answer
"""

import asyncio
import base64
import json
import sys
from typing import Any

from grpc import aio
from words import Answer, answer_until_the_end, take_stdout_aside

STREAM = "/torchweft.Experts/Stream"
FRAMES = 400
SECONDS = 0.3


class Crowd:
    """All streams, which stay open until the end."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._held: list[Any] = []

    async def idle(self, count: int) -> Answer:
        """Open idle streams, at most 50 at a time."""
        for start in range(0, count, 50):
            await asyncio.gather(*[self._open() for _ in range(min(50, count - start))])
        return {"open": count}

    async def slow(self, count: int, frame: bytes) -> Answer:
        """Open slow streams, and send until the server accepts no more frames."""
        sent = [0]
        tasks = [asyncio.create_task(self._send(await self._open(), frame, sent)) for _ in range(count)]
        self._held += tasks
        before = -1
        while sent[0] > before:
            before = sent[0]
            await asyncio.wait(tasks, timeout=SECONDS)
        return {"open": count, "sent": sent[0]}

    async def _send(self, call: Any, frame: bytes, sent: list[int]) -> None:
        for _ in range(FRAMES):
            await call.write(frame)
            sent[0] += 1

    async def _open(self) -> Any:
        channel = aio.insecure_channel(self._address, [("grpc.use_local_subchannel_pool", 1)])
        call = channel.stream_stream(STREAM)()
        self._held += [channel, call]
        await call.initial_metadata()
        return call


def main() -> None:
    take_stdout_aside()
    crowd, loop = Crowd(json.loads(sys.argv[1])["address"]), asyncio.new_event_loop()

    def handle(question: Answer) -> Answer:
        if "idle" in question:
            return loop.run_until_complete(crowd.idle(question["idle"]))
        return loop.run_until_complete(crowd.slow(question["slow"], base64.b64decode(question["frame"])))

    answer_until_the_end({}, handle)


if __name__ == "__main__":
    main()
