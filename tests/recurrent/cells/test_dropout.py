"""SequenceDropout draws once for a sequence, and its step draws nothing."""

import pytest
import torch
from torch import Tensor, nn

from tests.recurrent.recurrent_cases import close, equal
from weft.core.errors import SpecError, UsageError
from weft.recurrent import Recurrent, cells


class Shows(nn.Module):
    """A cell whose output is what it got."""

    def initial_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(x), torch.ones_like(x)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
        return (x, *state), (torch.ones_like(x), torch.ones_like(x))


def test_the_same_entries_are_dropped_at_every_step_and_others_in_every_row() -> None:
    torch.manual_seed(0)
    net = Recurrent(cells.SequenceDropout(Shows(), inputs=0.2, states=(0.5, 0.0)))
    x, h, c = net(torch.ones(6, 40, 50)).outputs
    for values, rate in ((x, 0.2), (h, 0.5)):
        assert equal(values, values[:1].expand_as(values))
        assert not torch.equal(values[0, 0], values[0, 1])
        close(values.unique(), torch.tensor([0.0, 1 / (1 - rate)]))
        assert abs((values[0] == 0).double().mean() - rate) < 0.04
    assert (c == 1).all()
    assert not torch.equal(x, net(torch.ones(6, 40, 50)).outputs[0])


def test_chunks_go_on_with_their_masks() -> None:
    net = Recurrent(cells.SequenceDropout(cells.LSTMCell(3, 4), inputs=0.5, states=(0.5, 0)))
    x = torch.randn(6, 2, 3)
    first = net(x[:2])
    second = net(x[2:], first.last)
    assert equal(first.last.masks, second.last.masks)
    torch.manual_seed(0)
    whole = net(x)
    torch.manual_seed(0)
    first = net(x[:2])
    assert equal(torch.cat([first.outputs, net(x[2:], first.last).outputs]), whole.outputs)


def test_in_eval_mode_nothing_is_dropped_and_nothing_drawn() -> None:
    cell = cells.LSTMCell(3, 4)
    dropout = Recurrent(cells.SequenceDropout(cell, inputs=0.5, states=0.5))
    x = torch.randn(6, 2, 3)
    trained = dropout(x)
    before = torch.random.get_rng_state()
    dropout.eval()
    assert equal(dropout(x).outputs, Recurrent(cell)(x).outputs)
    assert equal(dropout(x, trained.last).outputs, Recurrent(cell)(x, trained.last.cell).outputs)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_ends_of_the_scale() -> None:
    x, h, c = Recurrent(cells.SequenceDropout(Shows(), inputs=1.0, states=(0.0, 1.0)))(torch.ones(2, 3, 4)).outputs
    assert not x.any() and (h == 1).all() and not c.any()


def test_a_rate_that_could_only_be_ignored_is_an_error() -> None:
    class Embeds(nn.Module):
        def initial_state(self, x: Tensor) -> Tensor:
            return torch.zeros(len(x))

        def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            return state, state + x

    with pytest.raises(UsageError, match=r"inputs is 0\.5, but there are no floating-point numbers"):
        Recurrent(cells.SequenceDropout(Embeds(), inputs=0.5))(torch.ones(3, 2, dtype=torch.int64))
    with pytest.raises(SpecError, match="states should be a tuple of 2"):
        Recurrent(cells.SequenceDropout(cells.LSTMCell(3, 4), states=[0.5]))(torch.ones(3, 2, 3))
