"""An LSTM over images: where the LSTM multiplies by a matrix, it convolves, so the state is an image too."""

import torch
from torch import Tensor, nn

from weft.recurrent.zoo.arguments import Device, refuse, size_faults


class ConvLSTMCell(nn.Module):
    """An LSTM whose states are images, N x H x height x width, like its inputs, N x D x height x width.

    State ``(h, c)``; output ``h``. ``conv_ih`` has the bias, ``conv_hh`` none; both keep height and width by zero
    padding, and give the channels of i, f, g, o, H each. Shi et al., "Convolutional LSTM network" (arXiv 1506.04214),
    without its peephole weights, which would tie the cell to one size of image.

    Args:
        input_size: channels D of the input.
        hidden_size: channels H of the state.
        kernel_size: of both convolutions; odd, so that images keep their size.

    Raises ``UsageError`` for a size below 1 or an even kernel.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        kernel_size: int = 3,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        faults = size_faults(input_size=input_size, hidden_size=hidden_size, kernel_size=kernel_size)
        if kernel_size % 2 == 0:
            faults.append(f"kernel_size is {kernel_size}, wanted an odd number, so that images keep their size")
        refuse(self, faults)
        self.hidden_size = hidden_size
        gates, padding = 4 * hidden_size, kernel_size // 2
        self.conv_ih = nn.Conv2d(input_size, gates, kernel_size, padding=padding, device=device, dtype=dtype)
        self.conv_hh = nn.Conv2d(
            hidden_size, gates, kernel_size, padding=padding, bias=False, device=device, dtype=dtype
        )

    def reset_parameters(self) -> None:
        """As convolutions begin in PyTorch."""
        self.conv_ih.reset_parameters()
        self.conv_hh.reset_parameters()

    def initial_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(h, c)``: N x H x height x width zeros each, as large as the first image, with the weights' dtype."""
        shape = (*x.shape[:-3], self.hidden_size, *x.shape[-2:])
        return self.conv_hh.weight.new_zeros(shape), self.conv_hh.weight.new_zeros(shape)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One step: ``(h', (h', c'))``."""
        h, c = state
        i, f, g, o = (self.conv_ih(x) + self.conv_hh(h)).chunk(4, -3)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return h, (h, c)
