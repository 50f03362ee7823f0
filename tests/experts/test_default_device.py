"""Internal tensors of experts do not depend on the default device, tested with the meta device."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.experts.expert_cases import answered, fussy_backend, rows
from tests.experts.mixture.commit_cases import WIDTH, Experts, X, sgd
from tests.experts.mixture.mixture_cases import numbers, two_layers
from torchweft.experts import ExpertBackend
from torchweft.experts.client import LocalTransport, RemoteExpert, commit
from torchweft.experts.serialization import deserialize, serialize
from torchweft.experts.server import Server
from torchweft.experts.wire.frame import aligned_body

Run = Callable[[], list[Any]]


def make_inputs(seed: int = 0) -> Tensor:
    with torch.device("cpu"):
        return numbers(16, WIDTH, seed=seed)


def train_twice(remote: nn.Module) -> list[Any]:
    """Run forward, backward and commit twice. Returns the outputs, the gradients and the commit results."""
    results: list[Any] = []
    for seed in range(2):
        x = make_inputs(seed).requires_grad_()
        y = remote(x)
        tensors: list[Tensor] = [y] if isinstance(y, Tensor) else list(y)
        torch.stack([tensor.square().sum() for tensor in tensors]).sum().backward()
        results += [*tensors, x.grad, commit(remote)]
    return [*results, *(parameter.grad for name, parameter in remote.named_parameters() if name != "anchor")]


def run_remote_expert() -> list[Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with torch.device("cpu"):
            module = two_layers()
    with Server([ExpertBackend("one", module, sgd, args_schema=(X,))]) as server:
        transport = LocalTransport(server.handler(), name="one")
        remote = RemoteExpert("one", transport, accumulate=True)
        return train_twice(remote)


def run_expert() -> list[Any]:
    """Run a backward and a commit in this thread, without a server. Returns their answers."""
    with torch.device("cpu"):
        # SGD, because PyTorch 2.11 creates Adam's counters on the default device of the stepping thread.
        backend, x, gradient = fussy_backend(optimizer=sgd), rows(2, 0), rows(2, 1)
    sent = backend.backward_pool.submit_task(x, gradient, client="ann", mini_batch="m")
    answers = answered(backend, sent) + answered(backend, backend.commit("m", client="ann"))
    return [tensor for result in answers for tensor in result]


def run_mixture(**options: Any) -> list[Any]:
    with torch.device("cpu"):
        experts = Experts(keep_graphs=None)
    with experts:
        return train_twice(experts.mixture(device="cpu", **options))


RUNS: dict[str, Run] = {
    "an expert": run_expert,
    "a remote expert": run_remote_expert,
    "a mixture": run_mixture,
    "a mixture of few answers": lambda: run_mixture(allow_zero_outputs=True, detect_anomalies=True),
    "a switch": lambda: run_mixture(switch=True),
    "a switch with a capacity": lambda: run_mixture(switch=True, capacity_factor=0.5),
}


@pytest.mark.parametrize("kind", RUNS)
def test_experts_work_under_any_default_device(kind: str) -> None:
    expected = RUNS[kind]()
    with torch.device("meta"):
        seen = RUNS[kind]()
    for one, other in zip(seen, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_caches_made_under_a_default_device_work_without_it() -> None:
    with Experts() as experts:
        mixture, other = experts.mixture(allow_zero_outputs=True, k_min=1), experts.mixture()
        for first in (True, False):
            with torch.device("meta"), torch.no_grad():
                y = mixture(make_inputs())
            assert first or torch.equal(y, other(make_inputs()))
            assert torch.equal(mixture(make_inputs()), other(make_inputs()))
        for lease in experts.leases.values():
            experts.directory.withdraw(lease)
        with torch.device("meta"):
            y = mixture(make_inputs())  # zeros, on the device that answers would have
        assert not y.any() and y.shape == (16, WIDTH)


def test_files_and_messages_work_under_any_default_device() -> None:
    state = {"some": numbers(3, 2), "none": torch.empty(0, 2), "narrow": torch.ones(2, dtype=torch.complex128)}
    with torch.device("meta"):
        read = deserialize(serialize(state))
        body = aligned_body(memoryview(bytes(range(16)))[3:])
    assert all(tensor.device.type == "cpu" and torch.equal(tensor, state[name]) for name, tensor in read.items())
    assert np.array_equal(body, np.arange(3, 16))
