"""What happens between the gradients and the weights."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.experts.expert_cases import fussy_backend, rows, work
from weft.experts import ExpertBackend
from weft.experts.errors import StepError


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def sent(backend: ExpertBackend, mini_batch: bool) -> list[Any]:
    """Two micro-batches of one mini-batch and their commit, or one batch."""
    name = "m" if mini_batch else None
    futures = [
        backend.backward_pool.submit_task(rows(2, seed), rows(2, seed + 9), client="ann", mini_batch=name)
        for seed in range(2 if mini_batch else 1)
    ]
    work(backend)
    futures += [backend.commit("m", client="ann")] if mini_batch else []
    work(backend)
    return futures


def steps_itself(parameter: Tensor) -> None:
    """An optimizer step within backward, as is done to save memory."""
    assert parameter.grad is not None and not torch.is_grad_enabled()
    parameter.sub_(parameter.grad, alpha=0.3)
    parameter.grad = None


def scales(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


@pytest.mark.parametrize("mini_batch", [False, True])
@pytest.mark.parametrize("hooks", [[steps_itself], [scales, scales], [scales, steps_itself]])
def test_hooks_of_parameters_are_called_once_a_step_with_their_whole_gradient(
    hooks: list[Any], mini_batch: bool
) -> None:
    backend = fussy_backend(optimizer=sgd)
    plain = copy.deepcopy(backend.module)
    for module in (backend.module, plain):
        for layer in (module.first, module.side):
            layer.bias.requires_grad_(False)  # no gradient, and so no call
        for parameter in module.parameters():
            for hook in hooks if parameter.requires_grad else []:
                parameter.register_post_accumulate_grad_hook(hook)
    assert all(future.result(0) for future in sent(backend, mini_batch))
    joined = [torch.cat([rows(2, seed + more) for seed in range(2 if mini_batch else 1)]) for more in (0, 9)]
    plain(joined[0]).backward(joined[1])
    sgd(plain.parameters()).step()
    for one, other in zip(backend.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mini_batch", [False, True])
def test_a_hook_that_raises_is_told_as_a_step_that_failed(mini_batch: bool) -> None:
    def fails(parameter: Tensor) -> None:
        raise ZeroDivisionError("mine")

    backend = fussy_backend(optimizer=sgd)
    parameters: list[nn.Parameter] = list(backend.module.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    parameters[0].register_post_accumulate_grad_hook(fails)
    failed = sent(backend, mini_batch)[-1].exception(0)
    assert isinstance(failed, StepError) and "ZeroDivisionError: mine" in str(failed)
    assert backend.steps == 0 and all(parameter.grad is None for parameter in parameters)
    assert all(torch.equal(one, other) for one, other in zip(parameters, before, strict=True))
