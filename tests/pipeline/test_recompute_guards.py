"""A change of a module between a forward and its recomputation raises an error."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from tests.pipeline.pipe_cases import (
    CUTS,
    assert_alike,
    assert_close,
    assert_gradients_equal,
    backward,
    chain,
    piped,
    rows,
)
from torchweft import Pipe
from torchweft.core.errors import ModuleChangedError, UsageError


def _step(pipe: Pipe) -> None:
    with torch.no_grad():
        pipe[2].bias.add_(1)


def _load(pipe: Pipe) -> None:
    pipe.load_state_dict(pipe.state_dict())


def _replace(pipe: Pipe) -> None:
    pipe[2].weight = nn.Parameter(pipe[2].weight.detach().clone())


def _add(pipe: Pipe) -> None:
    pipe[2].add_module("more", nn.Linear(2, 2))


CHANGES: dict[Callable[[Pipe], object], str] = {
    _step: r"parameter '2\.bias' was written to",
    _load: r"parameter '\d\.weight' was written to",
    _replace: r"parameter '2\.weight' was replaced",
    _add: "layers were added or removed",
    Pipe.eval: r"layer '\d' went from training to evaluation",
}


@pytest.mark.parametrize("executor", CUTS)
@pytest.mark.parametrize("checkpoint", ["always", "except_last", ["never", "always"]])
@pytest.mark.parametrize("change", CHANGES)
def test_change_before_a_recomputation_is_named(executor: str, checkpoint: str, change) -> None:
    pipe, plain = piped(chain(4, 5, 3), balance=[2, 1], executor=executor, checkpoint=checkpoint)
    loss = pipe(rows(7, 4)).square().sum()
    kept = pipe[2].weight
    change(pipe)
    with pytest.raises(ModuleChangedError, match=rf"{CHANGES[change]}.* of stage [01] .*checkpoint='never'"):
        loss.backward()
    if change is not _add:
        pipe[2].weight = kept
        pipe.train().load_state_dict(plain.state_dict())
        assert_alike(pipe, plain)


@pytest.mark.parametrize("executor", CUTS)
def test_change_without_recomputation_is_accepted(executor: str) -> None:
    pipe, _ = piped(chain(4, 5, 3), balance=[2, 1], executor=executor, checkpoint=["always", "never"])
    loss = pipe(rows(7, 4)).square().sum()
    pipe[2].eval()
    loss.backward()
    assert all(parameter.grad is not None for parameter in pipe.parameters())


class Notes(nn.Module):
    """Identity that stores a number and a flag of its last run."""

    def forward(self, x):
        self.last, self.ran = float(x.detach().sum()), True
        return x


@pytest.mark.parametrize("executor", CUTS)
def test_layer_can_keep_notes_of_a_run(executor: str) -> None:
    pipe, plain = piped(nn.Sequential(Notes(), *chain(4, 3)), executor=executor, checkpoint="always")
    for model in (pipe, plain):
        losses = [model(rows(7, 4, seed=seed)).square().sum() for seed in range(2)]
        losses[0].backward(retain_graph=True)
        losses[0].backward()
        losses[1].backward()
    assert_gradients_equal(pipe, plain)
    assert pipe[0].ran


@pytest.mark.parametrize("executor", CUTS)
def test_a_layer_may_change_its_own_weights_while_it_runs(executor: str) -> None:
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=0.5, dtype=torch.float64), *chain(4, 3))
    pipe, plain = piped(model, executor=executor, checkpoint="always")
    for _ in range(2):
        assert_alike(pipe, plain, lambda net: backward(net, torch.arange(7)))


@pytest.mark.parametrize("executor", CUTS)
def test_functional_call_works_only_without_recomputation(executor: str) -> None:
    for checkpoint in ("never", "always"):
        pipe, plain = piped(chain(4, 5, 3), executor=executor, checkpoint=checkpoint)
        fresh = {name: torch.full_like(value, 0.1).requires_grad_() for name, value in pipe.named_parameters()}
        seen, expected = (torch.func.functional_call(model, fresh, (rows(6, 4),)) for model in (pipe, plain))
        if checkpoint == "never":
            pairs = [torch.autograd.grad(y.square().sum(), list(fresh.values())) for y in (seen, expected)]
            assert_close(*pairs)
        else:
            with pytest.raises(ModuleChangedError, match="functional_call"):
                seen.sum().backward()


@pytest.mark.parametrize("executor", CUTS)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_weights_that_are_cached_for_one_graph_are_refused(executor: str, checkpoint: str) -> None:
    model = nn.Sequential(*chain(4, 4), weight_norm(nn.Linear(4, 3).double()))
    pipe, plain = piped(model, executor=executor, checkpoint=checkpoint)
    with parametrize.cached():
        with pytest.raises(UsageError, match=r"layer '1' of stage 1 .*parametrize\.cached"):
            pipe(rows(7, 4))
        with torch.no_grad():
            assert_close(pipe(rows(7, 4)), plain(rows(7, 4)))
    assert_alike(pipe, plain)
