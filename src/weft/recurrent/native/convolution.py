"""Convolutions as matrix products, for cells such as ConvLSTM's.

    x (N, C, H, W)  -> padded, windows as a view (N, H', W', C, kh, kw) -> copied to columns -> W columns

    gradient of x          the same with the kernel turned round, where the stride is 1
    gradient of the kernel one product of the output's gradient and the columns, over all rows and places

Grouped, transposed and strided backward ones are left as they are, and another backend runs the cell. Columns are those
of `im2col` (Chellapilla et al., 2006).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """aten.convolution out of smaller operators; NotImplemented where that is not known."""
    if transposed or groups != 1 or x.dim() != weight.dim():
        return NotImplemented
    windows = _windows(x, weight.shape[2:], stride, padding, dilation)  # N, places ..., C, kernel ...
    dims = weight.dim() - 2
    places = list(windows.shape[1 : dims + 1])
    columns = windows.reshape(-1, weight[0].numel())
    flat = weight.reshape(weight.shape[0], -1).t()
    out = columns @ flat if bias is None else torch.addmm(bias, columns, flat)
    return out.reshape(x.shape[0], *places, weight.shape[0]).movedim(-1, 1).contiguous()


def convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """aten.convolution_backward out of smaller operators; NotImplemented where that is not known."""
    if transposed or groups != 1 or any(step != 1 for step in stride) or x.dim() != weight.dim():
        return NotImplemented
    axes = list(range(2, weight.dim()))
    dx = dw = db = None
    if output_mask[0]:
        turned = weight.flip(axes).transpose(0, 1).contiguous()
        around = [d * (k - 1) - p for k, p, d in zip(weight.shape[2:], padding, dilation, strict=True)]
        if any(each < 0 for each in around):
            return NotImplemented
        zeros = [0] * len(axes)
        dx = convolution(gradient, turned, None, stride, around, dilation, False, zeros, 1)
    rows = gradient.movedim(1, -1).reshape(-1, weight.shape[0])
    if output_mask[1]:
        columns = _windows(x, weight.shape[2:], stride, padding, dilation).reshape(-1, weight[0].numel())
        dw = (rows.t() @ columns).reshape(weight.shape)
    if output_mask[2]:
        db = rows.sum(0)
    return dx, dw, db


def _windows(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """What the kernel sees at every place: N, places ..., C, kernel ..., a view of the padded input."""
    for axis, pad in enumerate(padding, 2):
        if pad:
            edge = x.new_zeros([pad if i == axis else size for i, size in enumerate(x.shape)])
            x = torch.cat([edge, x, edge], axis)
    dims = len(kernel)
    for axis, (size, step, apart) in enumerate(zip(kernel, stride, dilation, strict=True), 2):
        x = x.unfold(axis, (size - 1) * apart + 1, step)
    for axis, apart in enumerate(dilation, 2 + dims):
        if apart != 1:
            x = x[(slice(None),) * axis + (slice(None, None, apart),)]
    return x.movedim(1, dims + 1)
