"""Callers of `bare_server`, each with a stream on one connection.

Questions: ``{"port": ...}`` first, then ``{"callers", "rows", "train", "seconds"}`` for the calls per second.
"""

import json
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

import grpc
import torch
from bare_words import BACKWARD, FORWARD, METHOD, OPTIONS, SERVICE, TRACKED, message, tensor
from callers import rate
from words import answer_until_the_end, take_stdout_aside


def caller(way: Any, stack: ExitStack, width: int, rows: int, train: bool) -> Callable[[], None]:
    """One more, until the end of the stack."""
    asked: SimpleQueue[bytes | None] = SimpleQueue()
    stream = way(iter(asked.get, None))
    stack.callback(asked.put, None)
    inputs, gradients = torch.randn(rows, width), torch.randn(rows, width)

    def ask(kind: bytes, given: torch.Tensor) -> torch.Tensor:
        asked.put(message(kind, given))
        return tensor(next(stream), width)

    def forward() -> None:
        ask(FORWARD, inputs)

    def training() -> None:
        ask(TRACKED, inputs)
        ask(BACKWARD, gradients)

    return training if train else forward


def main() -> None:
    """Answer until standard input ends."""
    take_stdout_aside()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "The given buffer is not writable")
    width = json.loads(sys.argv[1])["width"]
    ways: list[Any] = []

    def handle(word: dict[str, Any]) -> dict[str, Any]:
        if "port" in word:
            channel: Any = grpc.insecure_channel(f"127.0.0.1:{word['port']}", OPTIONS)
            ways[:] = [channel, channel.stream_stream(f"/{SERVICE}/{METHOD}")]
            return {}
        with ExitStack() as stack:
            callers = [caller(ways[1], stack, width, word["rows"], word["train"]) for _ in range(word["callers"])]
            return {"rate": rate(callers, word["seconds"])}

    try:
        answer_until_the_end({}, handle)
    finally:
        for each in ways[:1]:
            each.close()


if __name__ == "__main__":
    main()
