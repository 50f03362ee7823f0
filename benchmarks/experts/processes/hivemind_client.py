"""Trainer process with many callers, like `torchweft_client`, but with hivemind's client and the peer's Python."""

import json
import sys
import time
from typing import Any

from words import answer_until_the_end, take_stdout_aside

PATIENCE = 30.0
"""Seconds within which the expert must be found in the peer's DHT."""


def main() -> None:
    """Answer questions until standard input ends."""
    take_stdout_aside()
    import torch  # noqa: PLC0415  (must follow the redirection of stdout)
    from callers import forward_call, rate, training_call  # noqa: PLC0415
    from hivemind import DHT  # noqa: PLC0415
    from hivemind.moe.server.dht_handler import get_experts  # noqa: PLC0415

    torch.set_num_threads(1)
    options = json.loads(sys.argv[1])
    dhts: list[Any] = []
    experts: list[Any] = []

    def connect(address: list[str]) -> dict[str, Any]:
        dht = DHT(initial_peers=address, start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], use_relay=False)
        dhts.append(dht)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            (expert,) = get_experts(dht, [options["uid"]])
            if expert is not None:
                experts.append(expert)
                return {}
            time.sleep(0.2)
        return {"fault": f"the DHT did not find the expert within {PATIENCE:g} s"}

    def handle(question: dict[str, Any]) -> dict[str, Any]:
        if "address" in question:
            return connect(question["address"])
        if "inputs" in question:
            with torch.no_grad():
                return {"outputs": experts[0](torch.tensor(question["inputs"])).tolist()}
        make = training_call if question["train"] else forward_call
        calls = [make(experts[0], question["rows"], options["width"]) for _ in range(question["callers"])]
        return {"rate": rate(calls, question["seconds"])}

    try:
        answer_until_the_end({}, handle)
    finally:
        for dht in dhts:
            dht.shutdown()


if __name__ == "__main__":
    main()
