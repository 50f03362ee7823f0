"""Time turned round: tables and inputs, and back again."""

import torch

from weft.recurrent.layers.composite import SequenceAxes, reverse, reverse_rows


def test_rows_begin_where_their_mask_does() -> None:
    mask, reset = reverse_rows(SequenceAxes(4, 3, False), [4, 2, 0], None, None)
    assert reset is None and mask is not None
    assert mask.t().tolist() == [[True] * 4, [False, False, True, True], [False] * 4]
    first, _ = reverse_rows(SequenceAxes(4, 3, True), torch.tensor([4, 2, 0]), None, None)
    assert first is not None and torch.equal(first, mask.t())


def test_a_reset_moves_to_the_other_side_of_its_cut() -> None:
    reset = torch.tensor([[True, False, True, True]]).t()
    _, seen = reverse_rows(SequenceAxes(4, 1, False), [3], None, reset)
    assert seen is not None
    assert seen.flatten().tolist() == [False, False, True, False]  # a cut 1 | 2; none at 3, where the row has ended
    _, none = reverse_rows(SequenceAxes(0, 1, False), None, None, reset[:0])
    assert none is not None and none.shape == (0, 1)


def test_a_mask_and_lengths_hold_together() -> None:
    mask = torch.tensor([[True, False, True, True]]).t()
    seen, _ = reverse_rows(SequenceAxes(4, 1, False), [3], mask, None)
    assert seen is not None and seen.flatten().tolist() == [False, True, False, True]
    assert reverse_rows(SequenceAxes(4, 1, False), None, None, None) == (None, None)


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
