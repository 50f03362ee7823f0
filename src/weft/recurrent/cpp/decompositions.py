"""Decompositions of larger operators into those that loops in C have, applied when a step is captured.

Most are PyTorch's own. Convolutions, for cells such as ConvLSTM's, become matrix products, by the `im2col` of
Chellapilla et al. (2006):

    x (N, C, H, W)  -> padded, windows as a view (N, H', W', C, kh, kw) -> copied to columns -> W columns

    gradient of x            the same with the kernel turned round, where the stride is 1
    gradient of the kernel   one product of the output's gradient and the columns, over all rows and positions

Grouped and transposed ones, and the backward of strided ones, stay as they are, and another backend runs the cell.
"""

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, _decomp

from weft.recurrent.cpp.ir import compute_dtype
from weft.recurrent.cpp.operators import aten

Sizes = Sequence[int]


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes, dilation: Sizes, *rest: Any
) -> Any:
    """aten.convolution out of smaller operators; NotImplemented where that is not known."""
    transposed, _, groups = rest
    if transposed or groups != 1 or x.dim() != weight.dim():
        return NotImplemented
    windows = _windows(x, weight.shape[2:], stride, padding, dilation)  # N, places ..., C, kernel ...
    dims = weight.dim() - 2
    places = list(windows.shape[1 : dims + 1])
    columns = windows.reshape(-1, weight[0].numel())
    flat = weight.reshape(weight.shape[0], -1).t()
    out = columns @ flat if bias is None else torch.addmm(bias, columns, flat)
    return out.reshape(x.shape[0], *places, weight.shape[0]).movedim(-1, 1).contiguous()


def convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, _: Any, *rest: Any) -> Any:
    """aten.convolution_backward out of smaller operators; NotImplemented where that is not known."""
    stride, padding, dilation, transposed, _, groups, output_mask = rest
    if transposed or groups != 1 or any(step != 1 for step in stride) or x.dim() != weight.dim():
        return NotImplemented
    axes = list(range(2, weight.dim()))
    dx = dw = db = None
    if output_mask[0]:
        turned = weight.flip(axes).transpose(0, 1).contiguous()
        around = [d * (k - 1) - p for k, p, d in zip(weight.shape[2:], padding, dilation, strict=True)]
        if any(each < 0 for each in around):
            return NotImplemented
        dx = convolution(gradient, turned, None, stride, around, dilation, False, [], 1)
    rows = gradient.movedim(1, -1).reshape(-1, weight.shape[0])
    if output_mask[1]:
        columns = _windows(x, weight.shape[2:], stride, padding, dilation).reshape(-1, weight[0].numel())
        dw = (rows.t() @ columns).reshape(weight.shape)
    if output_mask[2]:
        db = rows.sum(0)
    return dx, dw, db


def _windows(x: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> Tensor:
    """The patches under the kernel: N, places ..., C, kernel ..., a view of the padded input."""
    x = _pad(x, [pad for pad in reversed(padding) for _ in range(2)])
    dims = len(kernel)
    for axis, (size, step, apart) in enumerate(zip(kernel, stride, dilation, strict=True), 2):
        x = x.unfold(axis, (size - 1) * apart + 1, step)
    for axis, apart in enumerate(dilation, 2 + dims):
        if apart != 1:
            x = x[(slice(None),) * axis + (slice(None, None, apart),)]
    return x.movedim(1, dims + 1)


_ACTIVATIONS = """
    silu silu_backward gelu gelu_backward softplus softplus_backward log_sigmoid_forward log_sigmoid_backward
    elu elu_backward celu selu hardtanh hardtanh_backward hardsigmoid hardsigmoid_backward
    hardswish hardswish_backward mish mish_backward leaky_relu leaky_relu_backward glu glu_backward
    threshold softshrink softshrink_backward hardshrink logit logit_backward tan_backward
"""
_NORMS = """
    native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data logsumexp logaddexp
    norm linalg_vector_norm std aminmax nansum mse_loss huber_loss
"""
_PRODUCTS = "addmv addr mv dot vdot outer baddbmm addcmul addcdiv lerp xlogy rsub"
_SHAPES = """
    select_backward slice_backward stack unsafe_split unsafe_chunk narrow narrow_copy
    diff unsqueeze_copy squeeze masked_fill fill new_empty nan_to_num tril triu index_fill
"""
_SIXTH = struct.unpack("f", struct.pack("f", 1 / 6))[0]


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """For operators that are made of smaller ones, PyTorch's own functions that make them so."""
    names = " ".join((_ACTIVATIONS, _NORMS, _PRODUCTS, _SHAPES)).split()
    known = [getattr(aten, name) for name in names if hasattr(aten, name)]
    table: dict[Any, Callable[..., Any]] = dict(cast(Any, _decomp).get_decompositions(known))
    return table | {
        aten.hardsigmoid_backward.default: _hardsigmoid_backward,
        aten.flip.default: _flip,
        aten.slice_scatter.default: _slice_scatter,
        aten.select_scatter.default: _select_scatter,
        aten.constant_pad_nd.default: _pad,
        aten.roll.default: _roll,
        aten.repeat.default: _repeat,
        aten.var.correction: _var,
        aten.var_mean.correction: _var_mean,
        aten.max.dim: _max,
        aten.min.dim: _min,
        aten.convolution.default: convolution,
        aten.convolution_backward.default: convolution_backward,
    }


def _flip(x: Tensor, axes: Sequence[int]) -> Tensor:
    for axis in axes:
        x = x.index_select(axis, torch.arange(x.shape[axis] - 1, -1, -1, device=x.device))
    return x.clone() if not axes else x


def _slice_scatter(
    x: Tensor, piece: Tensor, axis: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """What is before, the piece, what is behind; every nth element by index."""
    axis %= x.dim()
    places = range(*slice(start, end, step).indices(x.shape[axis]))
    if step == 1:
        rest = x.narrow(axis, places.start + len(places), x.shape[axis] - places.start - len(places))
        return _joined([x.narrow(axis, 0, places.start), piece.to(x.dtype), rest], axis)
    shape = [-1 if i == axis else 1 for i in range(x.dim())]
    index = torch.arange(places.start, places.stop, step, device=x.device)
    return x.scatter(axis, index.view(shape).expand(piece.shape), piece)


def _joined(pieces: Sequence[Tensor], axis: int) -> Tensor:
    return torch.cat([each for each in pieces if each.shape[axis]] or list(pieces[:1]), axis)


def _select_scatter(x: Tensor, piece: Tensor, axis: int, index: int) -> Tensor:
    index %= x.shape[axis]
    return _slice_scatter(x, piece.unsqueeze(axis), axis, index, index + 1)


def _pad(x: Tensor, widths: Sequence[int], value: bool | int | float = 0) -> Tensor:
    """A number all around; less where a width is negative."""
    for axis, low, high in zip(range(x.dim() - 1, -1, -1), widths[::2], widths[1::2], strict=False):
        x = x.narrow(axis, max(-low, 0), x.shape[axis] - max(-low, 0) - max(-high, 0))
        edges = [x.new_full((*x.shape[:axis], max(width, 0), *x.shape[axis + 1 :]), value) for width in (low, high)]
        x = _joined([edges[0], x, edges[1]], axis)
    return x


def _roll(x: Tensor, shifts: Sequence[int], axes: Sequence[int] = ()) -> Tensor:
    if not axes:  # of all elements in a row
        return _roll(x.reshape(-1), shifts, [0]).reshape(x.shape)
    for shift, axis in zip(shifts, axes, strict=True):
        size = x.shape[axis]
        at = size - shift % max(size, 1)
        x = _joined([x.narrow(axis, at, size - at), x.narrow(axis, 0, at)], axis)
    return x


def _repeat(x: Tensor, times: Sequence[int]) -> Tensor:
    sizes = [*[1] * (len(times) - x.dim()), *x.shape]
    pairs = [each for pair in zip(times, sizes, strict=True) for each in pair]
    apart = x.reshape([each for size in sizes for each in (1, size)])
    return apart.expand(pairs).reshape([count * size for count, size in zip(times, sizes, strict=True)])


def _var(
    x: Tensor, axes: Sequence[int] | None = None, *, correction: int | float | None = None, keepdim: bool = False
) -> Tensor:
    """As the mean of the squared distances from the mean: two passes, so that nothing cancels."""
    axes, wide = list(axes or range(x.dim())), x.to(compute_dtype(x.dtype))
    count = math.prod(x.shape[axis] for axis in axes)
    apart = wide - wide.mean(axes, True)
    total = (apart * apart).sum(axes, keepdim)
    return (total / max(count - (1.0 if correction is None else correction), 0.0)).to(x.dtype)


def _var_mean(
    x: Tensor, axes: Sequence[int] | None = None, *, correction: int | float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    mean = x.mean(list(axes or range(x.dim())), keepdim)
    return _var(x, axes, correction=correction, keepdim=keepdim), mean


def _max(x: Tensor, axis: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return x.amax(axis, keepdim), x.argmax(axis, keepdim)


def _min(x: Tensor, axis: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return x.amin(axis, keepdim), x.argmin(axis, keepdim)


def _hardsigmoid_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """As PyTorch's kernels have it: in float64, too, they multiply by a sixth of float32."""
    return torch.where((x > -3) & (x < 3), gradient * _SIXTH, 0.0)
