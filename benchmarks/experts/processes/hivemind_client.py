"""A trainer's process with many callers, as `torchweft_client`, by hivemind's own client in the peer's own Python."""

import json
import sys
import time
from typing import Any

from words import answer_until_the_end, take_stdout_aside

PATIENCE = 30.0
"""Seconds until an expert must be found in the peer's table."""


def main() -> None:
    """Answer until standard input ends."""
    take_stdout_aside()
    import torch  # noqa: PLC0415  (after what it may print has its way)
    from callers import forward_call, rate, training_call  # noqa: PLC0415
    from hivemind import DHT  # noqa: PLC0415
    from hivemind.moe.server.dht_handler import get_experts  # noqa: PLC0415

    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    tables: list[Any] = []
    experts: list[Any] = []

    def connect(address: list[str]) -> dict[str, Any]:
        table = DHT(initial_peers=address, start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], use_relay=False)
        tables.append(table)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            (found,) = get_experts(table, [asked["uid"]])
            if found is not None:
                experts.append(found)
                return {}
            time.sleep(0.2)
        return {"fault": f"its table did not know the expert within {PATIENCE:g} s"}

    def handle(word: dict[str, Any]) -> dict[str, Any]:
        if "address" in word:
            return connect(word["address"])
        if "inputs" in word:
            with torch.no_grad():
                return {"outputs": experts[0](torch.tensor(word["inputs"])).tolist()}
        make = training_call if word["train"] else forward_call
        calls = [make(experts[0], word["rows"], asked["width"]) for _ in range(word["callers"])]
        return {"rate": rate(calls, word["seconds"])}

    try:
        answer_until_the_end({}, handle)
    finally:
        for each in tables:
            each.shutdown()


if __name__ == "__main__":
    main()
