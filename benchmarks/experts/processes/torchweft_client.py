"""Trainer process with many callers: threads that share one connection to a server of torchweft.

Questions: first ``{"address": ...}``, which connects. ``{"inputs"}`` returns the outputs of these inputs.
``{"callers", "rows", "train", "keep", "seconds"}`` returns the calls per second. With ``"gather": 32`` instead of
callers, a lap is 32 calls of one thread at once.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from callers import forward_call, rate, training_call
from torch import Tensor
from words import answer_until_the_end, take_stdout_aside

from torchweft.experts.client import GrpcTransport, RemoteExpert, gather


def gather_call(expert: RemoteExpert, count: int, width: int) -> Callable[[], list[Tensor]]:
    """Forward of ``count`` single rows at once, without gradients."""
    calls = [(expert, torch.randn(1, width)) for _ in range(count)]

    def call() -> list[Tensor]:
        with torch.no_grad():
            return gather(calls)

    return call


def main() -> None:
    """Answer questions until standard input ends."""
    take_stdout_aside()
    torch.set_num_threads(1)
    options = json.loads(sys.argv[1])
    uid, width = options["uid"], options["width"]
    transports: list[GrpcTransport] = []

    def handle(question: dict[str, Any]) -> dict[str, Any]:
        if "address" in question:
            transports.append(GrpcTransport(question["address"]))
            return {}
        keep = bool(question.get("keep"))
        count = question.get("callers", 1)
        experts = [RemoteExpert(uid, transports[0], keep_graph=keep) for _ in range(count)]
        if "gather" in question:
            lap = gather_call(experts[0], question["gather"], width)
            return {"rate": rate([lap], question["seconds"])}
        if "inputs" in question:
            with torch.no_grad():
                return {"outputs": experts[0](torch.tensor(question["inputs"])).tolist()}
        make = training_call if question["train"] else forward_call
        return {"rate": rate([make(expert, question["rows"], width) for expert in experts], question["seconds"])}

    try:
        answer_until_the_end({}, handle)
    finally:
        for transport in transports:
            transport.close()


if __name__ == "__main__":
    main()
