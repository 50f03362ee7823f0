"""Time turned round: tables and inputs, and back again."""

import torch

from weft.recurrent.layers.composite import SequenceAxes, reverse


def test_inputs_and_results_are_turned_along_time_wherever_it_is() -> None:
    inputs = {"x": torch.arange(6).view(2, 3, 1), "dt": torch.arange(3), "name": "run"}
    axes = SequenceAxes.of(inputs, batch_first=True)
    assert axes == SequenceAxes(3, 2, True, deep=True)
    seen = reverse(inputs, axes.time_of_input)
    assert seen["x"].flatten().tolist() == [2, 1, 0, 5, 4, 3]
    assert seen["dt"].tolist() == [2, 1, 0] and seen["name"] == "run"
    results = (torch.arange(6).view(2, 3), torch.arange(12).view(3, 4), None)  # N x T, and T x 4 without rows
    one, other, nothing = reverse(results, axes.time_of_result)
    assert one.tolist() == [[2, 1, 0], [5, 4, 3]] and other[0].tolist() == [8, 9, 10, 11] and nothing is None
