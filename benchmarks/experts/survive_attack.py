"""Honest trainers during attacks of a stranger and a neighbour; see processes/survive_attack.py for what these do.

stranger    no token: large health checks and questions, wrong tokens, silent connections
neighbour   a token: half-sent frames, discards of what is not open
trainers    one step per key, every tenth sent twice ──> as many steps as keys, and a p99 at most doubled
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


def attacked(steps: int) -> Verdict:
    """So many steps of each trainer alone, and as many under attack."""
    names = [f"trainer-{index}" for index in range(TRAINERS)]
    access = Access([Grant(role=Role.TRAIN)], {f"token of {name}": name for name in [*names, "rival"]})
    backend = awkward()
    with ExitStack() as stack:
        server = stack.enter_context(Server([backend], access=access))
        trainers = [stack.enter_context(GrpcTransport(server.address, token=f"token of {name}")) for name in names]
        _train(trainers, "warm", steps // 4 + 1)
        alone, failed = _train(trainers, "alone", steps)
        given = {"address": server.address, "token": "token of rival", "uid": UID}
        attack = stack.enter_context(Helper("survive_attack", given, python=sys.executable))
        attack.hear()
        before = backend.steps
        beside, lost = _train(trainers, "beside", steps)
        made = attack.ask({})
        stepped = backend.steps - before
    p99, wanted = quantile(beside) * 1e3, 2 * quantile(alone) * 1e3
    keys = TRAINERS * steps
    return Verdict(
        "a stranger's and a neighbour's attacks beside honest trainers",
        f"{keys} steps, {sum(made.values())} attacks",
        f"as many steps as keys, p99 <= {wanted:.2f} ms, twice that alone",
        f"{stepped} steps, {len(failed) + len(lost)} calls failed; p99 {p99:.2f} ms",
        stepped == keys and not failed and not lost and p99 <= wanted,
    )


def _train(trainers: list[GrpcTransport], name: str, steps: int) -> tuple[list[float], list[BaseException]]:
    """Seconds of each call, and the failures."""
    took: list[float] = []
    failed: list[BaseException] = []

    def train(index: int, transport: GrpcTransport) -> None:
        x, gradient = rows(index, MOST_ROWS), torch.ones(MOST_ROWS, WIDTH)  # a batch of its own, and so a step
        for step in range(steps):
            call = backward(x, gradient, f"{name}-{index}-{step}")
            for _ in range(2 if step % 10 == 0 else 1):
                start = time.perf_counter()
                error = transport.submit(call, PATIENCE).exception(PATIENCE)
                took.append(time.perf_counter() - start)
                if error is not None:
                    failed.append(error)

    threads = [threading.Thread(target=train, args=each) for each in enumerate(trainers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took, failed
