"""A step has its owner's very parameters, under their short names."""

import torch
from torch import nn

from weft.recurrent.layers.rnn import GRUStep, LSTMStep


def test_parameters_are_the_owners_own_and_other_tensors_are_none_of_it() -> None:
    owner = nn.LSTM(3, 4, proj_size=2)
    kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    step = LSTMStep({kind: getattr(owner, f"{kind}_l0") for kind in kinds})
    assert {name: id(p) for name, p in step.named_parameters()} == {k: id(getattr(owner, f"{k}_l0")) for k in kinds}
    plain = GRUStep({"weight_ih": torch.ones(6, 3), "weight_hh": torch.ones(6, 2), "bias_ih": None, "bias_hh": None})
    assert list(plain.parameters()) == []
    assert plain(torch.ones(1, 3), (torch.ones(1, 2),))[0].shape == (1, 2)
