"""Honest trainers during attacks with and without a token, which processes/survive_attack.py makes.

without a token   large health checks and requests, wrong tokens, silent connections
with a token      half-sent frames, discards of mini-batches that are not open
trainers          one step per key, every tenth sent twice ──> as many steps as keys, and at most twice the p99
"""

import sys
import threading
import time
from contextlib import ExitStack

import torch

from benchmarks.experts.helper import Helper
from benchmarks.experts.survive_common import (
    MOST_ROWS,
    PATIENCE,
    UID,
    WIDTH,
    Verdict,
    awkward,
    backward,
    quantile,
    rows,
)
from torchweft.experts.client import GrpcTransport
from torchweft.experts.server import Access, Grant, Role, Server

TRAINERS = 2


def attacks(steps: int) -> Verdict:
    """Each trainer takes `steps` steps without attacks, and as many under attack."""
    names = [f"trainer-{index}" for index in range(TRAINERS)]
    access = Access([Grant(role=Role.TRAIN)], {f"token of {name}": name for name in [*names, "rival"]})
    backend = awkward()
    with ExitStack() as stack:
        server = stack.enter_context(Server([backend], access=access))
        trainers = [stack.enter_context(GrpcTransport(server.address, token=f"token of {name}")) for name in names]
        _train(trainers, "warm", steps // 4 + 1)
        alone, failed = _train(trainers, "alone", steps)
        options = {"address": server.address, "token": "token of rival", "uid": UID}
        attack = stack.enter_context(Helper("survive_attack", options, python=sys.executable))
        attack.hear()
        before = backend.steps
        attacked, lost = _train(trainers, "attacked", steps)
        counts = attack.ask({})
        stepped = backend.steps - before
    p99, limit = quantile(attacked) * 1e3, 2 * quantile(alone) * 1e3
    keys = TRAINERS * steps
    return Verdict(
        "attacks with and without a token during training",
        f"{keys} steps, {sum(counts.values())} attacks",
        f"as many steps as keys, p99 <= {limit:.2f} ms, twice that without attacks",
        f"{stepped} steps, {len(failed) + len(lost)} calls failed; p99 {p99:.2f} ms",
        stepped == keys and not failed and not lost and p99 <= limit,
    )


def _train(trainers: list[GrpcTransport], name: str, steps: int) -> tuple[list[float], list[BaseException]]:
    """Train in a thread per transport. Return the seconds of each call, and the failures."""
    seconds: list[float] = []
    failed: list[BaseException] = []

    def train(index: int, transport: GrpcTransport) -> None:
        x, gradient = rows(index, MOST_ROWS), torch.ones(MOST_ROWS, WIDTH)  # a full batch: one step per call
        for step in range(steps):
            call = backward(x, gradient, f"{name}-{index}-{step}")
            for _ in range(2 if step % 10 == 0 else 1):
                start = time.perf_counter()
                error = transport.submit(call, PATIENCE).exception(PATIENCE)
                seconds.append(time.perf_counter() - start)
                if error is not None:
                    failed.append(error)

    threads = [threading.Thread(target=train, args=each) for each in enumerate(trainers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds, failed
