"""What is kept beside weights is good for those very weights."""

import copy
import pickle

import torch

from weft.recurrent.layers.rnn import WeightKeyedCache


def test_it_is_made_again_only_when_a_tensor_was_replaced() -> None:
    made, beside = [], WeightKeyedCache[int]()
    weights = [torch.zeros(1), torch.ones(1)]

    def make() -> int:
        made.append(1)
        return len(made)

    assert [beside.get(weights, make), beside.get(list(weights), make)] == [1, 1]
    weights[1].add_(1)
    assert beside.get(weights, make) == 1
    assert beside.get([weights[0], weights[1].clone()], make) == 2
    assert beside.get(weights[:1], make) == 3


def test_a_copy_begins_empty() -> None:
    beside = WeightKeyedCache[int]()
    weights = [torch.zeros(1)]
    beside.get(weights, lambda: 1)
    for again in (copy.deepcopy(beside), pickle.loads(pickle.dumps(beside))):
        assert again._kept is None
        assert again.get(weights, lambda: 2) == 2
    assert beside.get(weights, lambda: 2) == 1
