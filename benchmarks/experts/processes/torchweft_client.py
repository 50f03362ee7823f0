"""A trainer's process with many callers: threads that share one connection to a server of torchweft.

Questions: ``{"address": ...}`` first, which connects; ``{"rows", "keep"}`` for the outputs of known inputs;
``{"callers", "rows", "train", "keep", "seconds"}`` for the calls per second.
"""

import json
import sys
from typing import Any

import torch
from callers import forward_call, rate, training_call
from words import answer_until_the_end, take_stdout_aside

from torchweft.experts.client import GrpcTransport, RemoteExpert


def main() -> None:
    """Answer until standard input ends."""
    take_stdout_aside()
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    uid, width = asked["uid"], asked["width"]
    ways: list[GrpcTransport] = []

    def handle(word: dict[str, Any]) -> dict[str, Any]:
        if "address" in word:
            ways.append(GrpcTransport(word["address"]))
            return {}
        keep = bool(word.get("keep"))
        count = word.get("callers", 1)
        experts = [RemoteExpert(uid, ways[0], keep_graph=keep) for _ in range(count)]
        if "inputs" in word:
            with torch.no_grad():
                return {"outputs": experts[0](torch.tensor(word["inputs"])).tolist()}
        make = training_call if word["train"] else forward_call
        return {"rate": rate([make(each, word["rows"], width) for each in experts], word["seconds"])}

    try:
        answer_until_the_end({}, handle)
    finally:
        for each in ways:
            each.close()


if __name__ == "__main__":
    main()
