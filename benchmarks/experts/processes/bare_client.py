"""The one caller of `bare_server`: ``{"port": ...}`` first, then ``{"rows", "train", "seconds"}``: calls per second."""

import json
import sys
import warnings
from queue import SimpleQueue
from typing import Any

import grpc
import torch
from bare_words import BACKWARD, FORWARD, METHOD, OPTIONS, SERVICE, TRACKED, message, tensor
from callers import rate
from words import answer_until_the_end, take_stdout_aside


def main() -> None:
    """Answer until standard input ends."""
    take_stdout_aside()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "The given buffer is not writable")
    width = json.loads(sys.argv[1])["width"]
    asked: SimpleQueue[bytes] = SimpleQueue()
    ways: list[Any] = []

    def ask(kind: bytes, given: torch.Tensor) -> torch.Tensor:
        asked.put(message(kind, given))
        return tensor(next(ways[1]), width)

    def handle(word: dict[str, Any]) -> dict[str, Any]:
        if "port" in word:
            channel: Any = grpc.insecure_channel(f"127.0.0.1:{word['port']}", OPTIONS)
            ways[:] = [channel, channel.stream_stream(f"/{SERVICE}/{METHOD}")(iter(asked.get, None))]
            return {}
        rows, gradients = torch.randn(word["rows"], width), torch.randn(word["rows"], width)

        def forward() -> None:
            ask(FORWARD, rows)

        def training() -> None:
            ask(TRACKED, rows)
            ask(BACKWARD, gradients)

        return {"rate": rate([training if word["train"] else forward], word["seconds"])}

    try:
        answer_until_the_end({}, handle)
    finally:
        for each in ways[:1]:
            each.close()


if __name__ == "__main__":
    main()
