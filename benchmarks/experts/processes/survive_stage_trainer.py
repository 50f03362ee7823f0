"""Trainer of three remote stages: ``python survive_stage_trainer.py '{"addresses": {uid: address}, "width": 16}'``.

Each line of its output is one event of a mini-batch, as JSON: ``["begin", names]`` before its commit, and ``["done",
names]`` after it. ``names`` are those of the mini-batch at each stage. It trains until it is killed.
"""

import json
import os
import sys

import torch
from torch import nn
from words import take_stdout_aside

from torchweft.errors import WeftError
from torchweft.experts.client import Connections, RemoteExpert, commit, discard


def main() -> None:
    """Train without end."""
    answers = os.fdopen(os.dup(1), "w")
    take_stdout_aside()
    torch.set_num_threads(1)
    options = json.loads(sys.argv[1])
    connections = Connections(options["addresses"])
    experts = [RemoteExpert(uid, connections, accumulate=True) for uid in options["addresses"]]
    model = nn.Sequential(*experts)
    while True:
        try:
            for _ in range(2):
                model(torch.randn(4, options["width"])).square().mean().backward()
            names = {expert.uid: expert._stub.mini_batch.name for expert in experts}
            print(json.dumps(["begin", names]), file=answers, flush=True)
            commit(model)
            print(json.dumps(["done", names]), file=answers, flush=True)
        except WeftError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            discard(model)


if __name__ == "__main__":
    main()
