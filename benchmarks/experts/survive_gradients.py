"""Gradients that would corrupt an expert for all clients, and an exception during backward.

NaN, infinity, 1e38 ──> GradientError     ──┐
backward raises     ──> ExpertFailedError ──┴── weights, moments and step count keep the same bytes
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

INVALID: dict[str, tuple[float, type[Exception]]] = {
    "NaN": (float("nan"), GradientError),
    "infinity": (float("inf"), GradientError),
    "1e38": (1e38, GradientError),
    "an exception in backward": (TROUBLE, ExpertFailedError),
}


def invalid_gradients(times: int) -> list[Verdict]:
    """Send each kind `times` times, every tenth after a valid step."""
    verdicts: list[Verdict] = []
    with Server([backend := awkward()]) as server, GrpcTransport(server.address) as transport:
        for name, (value, expected) in INVALID.items():
            wrong = changed = 0
            gradient = torch.zeros(ROWS, WIDTH)
            gradient[1, 2] = value
            for turn in range(times):
                if turn % 10 == 0:
                    transport.submit(backward(rows(turn), rows(turn + 1)), PATIENCE).result(PATIENCE)
                before = _fingerprint(backend)
                error = transport.submit(backward(rows(0), gradient), PATIENCE).exception(PATIENCE)
                wrong += type(error) is not expected
                changed += _fingerprint(backend) != before
            verdicts.append(
                Verdict(
                    f"an invalid gradient: {name}",
                    f"{times}",
                    f"{expected.__name__}, no byte changed",
                    f"{wrong} other errors, {changed} changes",
                    not wrong and not changed,
                )
            )
    return verdicts


def _fingerprint(backend: ExpertBackend) -> bytes:
    """Hash of all state that a step changes. No call is running."""
    digest = hashlib.sha256()
    _feed(digest, backend.state_dict())
    return digest.digest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key, entry in value.items():
            digest.update(repr(key).encode())
            _feed(digest, entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            _feed(digest, entry)
    else:
        digest.update(repr(value).encode())
