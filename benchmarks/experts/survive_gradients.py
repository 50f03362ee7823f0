"""Gradients that would ruin an expert for everybody, and an exception in the middle of backward.

NaN, infinity, 1e38 ──> GradientError ──┐
raises half-way     ──> its own error ──┴── weights, moments, step count: the same bytes as before
"""

import hashlib
from typing import Any

import torch

from benchmarks.experts.survive_common import (
    PATIENCE,
    ROWS,
    TROUBLE,
    WIDTH,
    Verdict,
    awkward,
    backward,
    rows,
)
from torchweft.experts import ExpertBackend
from torchweft.experts.client import GrpcTransport
from torchweft.experts.errors import ExpertFailedError, GradientError
from torchweft.experts.server import Server

SPOILED: dict[str, tuple[float, type[Exception]]] = {
    "NaN": (float("nan"), GradientError),
    "infinity": (float("inf"), GradientError),
    "1e38": (1e38, GradientError),
    "one that raises in backward": (TROUBLE, ExpertFailedError),
}


def refused(times: int) -> list[Verdict]:
    """Each kind so many times, every tenth after a good step."""
    verdicts: list[Verdict] = []
    with Server([backend := awkward()]) as server, GrpcTransport(server.address) as transport:
        for name, (value, meant) in SPOILED.items():
            wrong = changed = 0
            gradient = torch.zeros(ROWS, WIDTH)
            gradient[1, 2] = value
            for turn in range(times):
                if turn % 10 == 0:
                    transport.submit(backward(rows(turn), rows(turn + 1)), PATIENCE).result(PATIENCE)
                before = _fingerprint(backend)
                error = transport.submit(backward(rows(0), gradient), PATIENCE).exception(PATIENCE)
                wrong += type(error) is not meant
                changed += _fingerprint(backend) != before
            verdicts.append(
                Verdict(
                    f"a gradient: {name}",
                    f"{times}",
                    f"{meant.__name__}, the same bytes after",
                    f"{wrong} other errors, {changed} changes",
                    not wrong and not changed,
                )
            )
    return verdicts


def _fingerprint(backend: ExpertBackend) -> bytes:
    """All that a step changes. Nothing is under way when it is taken."""
    digest = hashlib.sha256()
    _feed(digest, backend.state_dict())
    return digest.digest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key, each in value.items():
            digest.update(repr(key).encode())
            _feed(digest, each)
    elif isinstance(value, list | tuple):
        for each in value:
            _feed(digest, each)
    else:
        digest.update(repr(value).encode())
