"""Callers of `bare_server`, each with its own stream on one connection.

Questions: first ``{"port": ...}``, then ``{"callers", "rows", "train", "seconds"}``, which returns calls per second.
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


def caller(open_stream: Any, stack: ExitStack, width: int, rows: int, train: bool) -> Callable[[], None]:
    """Open a stream that ends with ``stack``, and return a function that makes one call."""
    requests: SimpleQueue[bytes | None] = SimpleQueue()
    stream = open_stream(iter(requests.get, None))
    stack.callback(requests.put, None)
    inputs, gradients = torch.randn(rows, width), torch.randn(rows, width)

    def ask(kind: bytes, value: torch.Tensor) -> torch.Tensor:
        requests.put(message(kind, value))
        return tensor(next(stream), width)

    def forward() -> None:
        ask(FORWARD, inputs)

    def training() -> None:
        ask(TRACKED, inputs)
        ask(BACKWARD, gradients)

    return training if train else forward


def main() -> None:
    """Answer questions until standard input ends."""
    take_stdout_aside()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "The given buffer is not writable")
    width = json.loads(sys.argv[1])["width"]
    connection: list[Any] = []

    def handle(question: dict[str, Any]) -> dict[str, Any]:
        if "port" in question:
            channel: Any = grpc.insecure_channel(f"127.0.0.1:{question['port']}", OPTIONS)
            connection[:] = [channel, channel.stream_stream(f"/{SERVICE}/{METHOD}")]
            return {}
        with ExitStack() as stack:
            rows, train = question["rows"], question["train"]
            callers = [caller(connection[1], stack, width, rows, train) for _ in range(question["callers"])]
            return {"rate": rate(callers, question["seconds"])}

    try:
        answer_until_the_end({}, handle)
    finally:
        for channel in connection[:1]:
            channel.close()


if __name__ == "__main__":
    main()
