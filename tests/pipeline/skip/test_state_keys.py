"""A layer keeps its state-dict keys when it becomes skippable."""

import copy

import pytest
import torch
from torch import nn

from torchweft.pipeline.skip import Skippable, skippable


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.rand(2))
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x) + self.shift


def bare(model: nn.Sequential) -> nn.Sequential:
    """The same layers without their wrappers."""
    return nn.Sequential(*(copy.deepcopy(m.module if isinstance(m, Skippable) else m) for m in model))


class OwnsModule(nn.Module):
    """A custom class that has a child called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)


def test_faults_of_a_state_are_named_by_its_keys() -> None:
    model = nn.Sequential(skippable()(Affine)(), nn.Linear(2, 2))
    state = model.state_dict()
    del state["0.shift"]
    state["0.linear.bias"], state["0.linear.other"] = torch.ones(3), torch.ones(1)
    result = copy.deepcopy(model).load_state_dict({**state, "0.linear.bias": torch.ones(2)}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["0.shift"], ["0.linear.other"])
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    assert "module." not in str(caught.value)
    for words in ('"0.shift"', '"0.linear.other"', "size mismatch for 0.linear.bias"):
        assert words in str(caught.value)


def wrapped_model() -> nn.Sequential:
    """Skippable layers with new random parameters."""
    return nn.Sequential(skippable()(Affine)(), skippable()(OwnsModule)(), skippable()(nn.BatchNorm1d)(2))


def test_state_dict_keys_and_order_are_those_of_the_bare_model() -> None:
    model = wrapped_model()
    plain = bare(model).state_dict()
    assert list(model.state_dict()) == list(plain)
    assert all(torch.equal(value, plain[key]) for key, value in model.state_dict().items())
    assert model.state_dict()._metadata.keys() >= plain._metadata.keys()
    assert {k: model.state_dict()._metadata[k] for k in plain._metadata} == plain._metadata


@pytest.mark.parametrize("directions", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_bare_and_wrapped_models_load_into_each_other(directions) -> None:
    source, target = (bare(wrapped_model()) if without else wrapped_model() for without in directions)
    target.load_state_dict(source.state_dict())
    for mine, theirs in zip(target.state_dict().values(), source.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_checkpoints_with_the_wrappers_name_in_their_keys_load() -> None:
    source, target = nn.Sequential(skippable()(Affine)()), nn.Sequential(skippable()(Affine)())
    target.load_state_dict({f"0.module.{k.removeprefix('0.')}": v for k, v in source.state_dict().items()})
    assert torch.equal(target[0].module.linear.weight, source[0].module.linear.weight)
