"""What is kept beside weights is good for those very weights."""

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
