"""The sLSTM by its formula without stabiliser, and that the stabiliser keeps it in range."""

import pytest
import torch
from torch import Tensor

from tests.recurrent.cells.references import by_hand, scattered
from tests.recurrent.recurrent_cases import close, gradients, grid
from weft.recurrent import Recurrent, cells


@pytest.mark.parametrize("heads", [1, 2])
def test_the_slstm_follows_its_formula(heads: int) -> None:
    cell = scattered(cells.SLSTMCell(3, 4, heads))
    width = 4 // heads

    def step(x: Tensor, state: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        h, c, n = state
        gates = []
        for gate in range(4):
            whole = torch.block_diag(*cell.weight_hh[gate]).T  # from old along the second axis to new along the first
            assert whole.shape == (heads * width, heads * width)
            of_x = torch.einsum("hd,nd->nh", cell.weight_ih.view(4, 4, 3)[gate], x)
            gates.append(of_x + torch.einsum("hd,nd->nh", whole, h) + cell.bias.view(4, 4)[gate])
        i, f, z, o = gates
        c = torch.sigmoid(f) * c + torch.exp(i) * torch.tanh(z)
        n = torch.sigmoid(f) * n + torch.exp(i)
        h = torch.sigmoid(o) * (c / n)
        return h, (h, c, n)

    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(2, 4).double()
    wanted, (_, c, n) = by_hand(step, x, (zeros, zeros, zeros))
    seen = Recurrent(cell)(x)
    close(seen.outputs, wanted)
    _, c_kept, n_kept, m = seen.last
    close([c_kept * m.exp(), n_kept * m.exp()], [c, n])
    everything = [x, *cell.parameters()]
    close(gradients(seen.outputs, everything), gradients(wanted, everything), 1e-10)


@grid(shift=[-1e4, -200.0, 200.0, 1e4], dtype=[torch.float32, torch.float64])
def test_an_input_gate_out_of_range_changes_nothing(shift: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cell = cells.SLSTMCell(3, 4, 2).to(dtype)
    x = torch.randn(20, 2, 3, dtype=dtype)
    wanted = Recurrent(cell)(x).outputs
    with torch.no_grad():
        cell.bias[:4] += shift
    seen = Recurrent(cell)(x)
    tolerance = torch.finfo(dtype).eps * abs(shift) * 20  # what the sum of gate and shift rounds away
    close(seen.outputs, wanted, tolerance)
    seen.outputs.sum().backward()
    assert all(each.grad.isfinite().all() for each in cell.parameters())
