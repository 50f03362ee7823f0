"""Compiled models around a remote expert: its call is not traced, and the results are those without compilation."""

import pytest

from tests.processes import python

pytestmark = pytest.mark.timeout(240)
COMPILED = """
from functools import partial

import torch
from torch import nn

from tests.experts.client.transport_cases import reached
from tests.experts.expert_cases import WIDTH, Fussy, fussy_backend, rows, seeded
from torchweft.experts.client import RemoteExpert

sgd = partial(torch.optim.SGD, lr=0.1)
same = partial(torch.testing.assert_close, rtol=0, atol=1e-12)


class Scaled(RemoteExpert):
    def forward(self, x):
        return 2 * super().forward(x)


def compared(backend, model, local, twin, remote):
    compiled, optimizer = torch.compile(model, backend=backend), sgd(twin.parameters())
    for step in range(3):
        x, y = rows(2 + step, step).requires_grad_(), rows(2 + step, step).requires_grad_()
        actual, expected = compiled(x), local(y)
        same(actual, expected)
        actual.square().sum().backward()
        expected.square().sum().backward()
        same(x.grad, y.grad)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        same(compiled(rows(2, 0)), local(rows(2, 0)))
    assert remote.steps == 3, remote.steps


def one(backend, kind, around):
    torch._dynamo.reset()
    with reached("grpc", fussy_backend(optimizer=sgd)) as (_, transport):
        remote, twin = kind("fussy", transport, timeout=30.0), seeded(Fussy)
        local = nn.Sequential(twin) if kind is RemoteExpert else lambda x: 2 * twin(x)
        if not around:
            return compared(backend, remote, local, twin, remote)
        first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        compared(backend, nn.Sequential(first, remote, nn.Tanh()), lambda x: local(first(x)).tanh(), twin, remote)


one("eager", RemoteExpert, False)  # every pair of values once
one("eager", Scaled, True)
one("aot_eager", RemoteExpert, True)
one("aot_eager", Scaled, False)
"""


@pytest.mark.long
def test_a_compiled_model_computes_and_trains_as_before() -> None:
    # In a separate process, because the compiler cannot trace through the run-time type checks of this suite.
    seen = python(COMPILED)
    assert seen.returncode == 0, seen.stderr
