"""Lowering of a captured step to its three functions: forward, backward, and forward again where all states are known.

    forward    x, h (rows t)           ->  h (rows t + 1), y, and what backward reads (saved)
    recompute  x, h (rows t and t+1)   ->  saved             nothing is carried, so products are of all steps at once
    backward   x, h, y, saved, dy, dh  ->  dx, dh, and added to the parameters' gradients

What depends on the references only (`constants`) is computed by PyTorch, once for each call; what C does not know, for
each chunk (partitioner.py). Arguments are called

    x inputs   h states   y outputs   v saved   c constants   dy, dx, dh their gradients   dp those of parameters
    a          gradients of the states after each step, added to the carried one
    u          computed by PyTorch, read here   g   computed here, read by PyTorch after backward

Larger operators are decomposed when a step is captured, most by PyTorch's own functions. Convolutions, for cells such
as ConvLSTM's, become matrix products, by the `im2col` of Chellapilla et al. (2006):

    x (N, C, H, W)  -> padded, windows as a view (N, H', W', C, kh, kw) -> copied to columns -> W columns

    gradient of x            the same with the kernel turned round, where the stride is 1
    gradient of the kernel   one product of the output's gradient and the columns, over all rows and positions

Grouped and transposed ones, and the backward of strided ones, stay as they are, and another backend runs the cell.
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, _decomp, fx

from weft.recurrent.cpp.ir import (
    LoopValue,
    LoweringContext,
    Product,
    Reduce,
    Row,
    TimeReduction,
    Unsupported,
    View,
    check_dtype,
    compute_dtype,
    whole_view,
)
from weft.recurrent.cpp.operators import aten, is_view, lower_node
from weft.recurrent.cpp.partitioner import ForwardBackwardSplit, ReductionPattern
from weft.recurrent.cpp.scheduling import Argument, LoopFunction
from weft.recurrent.graph import StepGraph
from weft.recurrent.passes import writes


@dataclass
class Lowered:
    """The functions, and what their arguments mean."""

    split: ForwardBackwardSplit
    constants: list[fx.Node] = field(default_factory=list[fx.Node])
    outside: list[fx.Node] = field(default_factory=list[fx.Node])
    """Computed by PyTorch, read by the functions."""
    forward: LoopFunction = field(default_factory=partial(LoopFunction, "forward"))
    recompute: LoopFunction = field(default_factory=partial(LoopFunction, "recompute"))
    backward: LoopFunction = field(default_factory=partial(LoopFunction, "backward", backward=True))

    @property
    def functions(self) -> tuple[LoopFunction, LoopFunction, LoopFunction]:
        """Forward, recompute, backward."""
        return self.forward, self.recompute, self.backward


def lower(captured: StepGraph) -> Lowered:
    """Settle the three functions of a captured step. Raises Unsupported."""
    written = writes(captured.module)  # some of PyTorch's decompositions hold such
    if written:
        raise Unsupported(f"loops in C are made of pure operators, but this step writes by {', '.join(written)}")
    lowered = Lowered(ForwardBackwardSplit(captured))
    _forward(_FunctionLowering(lowered, lowered.forward))
    _recompute(_FunctionLowering(lowered, lowered.recompute))
    _backward(_FunctionLowering(lowered, lowered.backward))
    return lowered


class _FunctionLowering:
    """Fills in one function."""

    def __init__(self, lowered: Lowered, function: LoopFunction) -> None:
        self.split, self.lowered, self.function = lowered.split, lowered, function
        self.captured = captured = lowered.split.captured
        self.signature, self.invariant = captured.signature, captured.invariant
        """The states that a step hands on as they are."""
        self.views: dict[fx.Node, View] = {}
        """The arguments of the function."""
        self.context = LoweringContext({})

    def meta(self, node: fx.Node) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a node's value; a reference's is that of the tensor behind it."""
        value: Tensor = self.captured.value(node)
        return tuple(value.shape), value.dtype

    def given(self, name: str, node: fx.Node, row: Row) -> LoopValue:
        """The node's value is an argument. Constants come in the dtype that C computes in: products pack them."""
        shape, dtype = self.meta(node)
        check_dtype(dtype, name)
        dtype = dtype if self.split.varies(node) else compute_dtype(dtype)
        value = self.function.given(name, shape, dtype, row)
        self.views[node] = whole_view(value)
        return value

    def give_inputs(self) -> None:
        for i, node in enumerate(self.signature.inputs):
            if not self.split.outside(node):
                self.given(f"x{i}", node, "step")

    def give_states(self) -> list[LoopValue]:
        """The states before the step; of those that change from step to step, the values."""
        made = [
            self.given(f"h{k}", node, "same" if k in self.invariant else "step")
            for k, node in enumerate(self.signature.states)
        ]
        return [value for k, value in enumerate(made) if k not in self.invariant]

    def give_new_states(self, known: set[fx.Node]) -> None:
        """The states after the step, where they are known: the next rows of what holds the states."""
        for k, node in enumerate(self.signature.new_states):
            if node in known and k not in self.invariant and node not in self.views:
                shape, dtype = self.meta(node)
                value = LoopValue(f"n{k}", shape, dtype)
                self.function.allocate(value, f"h{k}", "next")
                self.views[node] = whole_view(value)

    def run(self, nodes: set[fx.Node]) -> None:
        """Lower these operators."""
        sparsity = self.split.sparsity
        mask = None if sparsity.mask is None else self.views[sparsity.mask]
        self.context = LoweringContext(self.views, {} if mask is None else dict.fromkeys(sparsity.products, mask))
        for node in self.captured.nodes:
            if node in nodes:
                for each in node.all_input_nodes:
                    self._from_outside(each)
                lower_node(self.context, node)

    def end(self, node: fx.Node) -> View:
        """The view that a node is."""
        self._from_outside(node)
        return self.context.as_dtype(self.context.view(node), self.meta(node)[1])

    def want(self, name: str, node: fx.Node, row: Row = "step") -> View:
        """Write a node's value into a new argument, or into that row of the argument of this name; the view of it."""
        shape, dtype = self.meta(node)
        check_dtype(dtype, name)
        argument = Argument(name, dtype, torch.Size(shape).numel(), row)
        if row == "step":
            self.function.arguments.append(argument)
        self.function.wanted.append((self.end(node), argument))
        return self.function.wanted[-1][0]

    def _from_outside(self, node: fx.Node) -> None:
        """Give what PyTorch makes: for all steps as a view of another such, or as an argument; or for each step."""
        if node in self.context.views:
            return
        if self.split.varies(node):
            if node in self.split.torch:
                self._numbered("u", self.lowered.outside, node, "step")
            return
        if is_view(node) and not self.split.varies(node.all_input_nodes[0]):
            self._from_outside(node.all_input_nodes[0])
            try:
                lower_node(self.context, node)
                return
            except Unsupported:
                pass  # PyTorch makes it, then
        if isinstance(node.meta.get("val"), list | tuple):
            raise Unsupported(f"{node.target} on weights yields several tensors")
        self._numbered("c", self.lowered.constants, node, "same")

    def _numbered(self, letter: str, known: list[fx.Node], node: fx.Node, row: Row) -> None:
        """The node's value is an argument with a number in a list that all functions share."""
        if node not in known:
            known.append(node)
        self.context.views[node] = whole_view(self.given(f"{letter}{known.index(node)}", node, row))


def _forward(it: _FunctionLowering) -> None:
    it.give_inputs()
    it.function.carried = [(value, value) for value in it.give_states()]
    it.run(it.split.front)
    for k, node in enumerate(it.signature.new_states):
        if k not in it.invariant:
            it.want(f"h{k}", cast(fx.Node, node), "next")
    for i, node in enumerate(it.signature.outputs):
        output = cast(fx.Node, node)
        if i not in it.captured.aliases and not it.split.outside(output):  # one that is a new state is stored once
            it.want(f"y{i}", output)
    for j, node in enumerate(it.split.saved):
        it.want(f"v{j}", node)
    it.function.finalize(it.context.made)


def _recompute(it: _FunctionLowering) -> None:
    it.give_inputs()
    it.give_states()
    it.give_new_states(it.split.front)
    it.run(it.split.ancestors(it.split.saved, {*it.views} | it.split.torch))
    for j, node in enumerate(it.split.saved):
        it.want(f"v{j}", node)
    it.function.finalize(it.context.made)


def _backward(it: _FunctionLowering) -> None:
    bases = {*it.split.bases}
    it.give_inputs()
    it.give_states()
    it.give_new_states(bases)
    for i, node in enumerate(it.signature.outputs):
        if node in bases and node not in it.views:
            it.given(f"y{i}", node, "step")
    for j, node in enumerate(it.split.saved):
        it.given(f"v{j}", node, "step")
    carried = _give_gradients(it)
    it.run(it.split.back | it.split.views)
    for k, value in carried.items():
        node = it.signature.state_gradients[k]
        it.function.carried.append((value, None if node is None else it.want(f"dh{k}", node, "out").value))
    for i, node in enumerate(it.signature.input_gradients):
        if node is not None and not it.split.outside(node):
            it.want(f"dx{i}", node)
    for j, node in enumerate(it.split.made):
        it.want(f"g{j}", node)
    totals = _totals(it)  # which makes more values
    it.function.finalize([*it.context.made, *totals])


def _give_gradients(it: _FunctionLowering) -> dict[int, LoopValue]:
    """Gradients of outputs, and of the states after the step: the carried ones, by their numbers."""
    for i, node in enumerate(it.signature.output_gradients):
        if not it.split.outside(node):
            it.given(f"dy{i}", node, "step")
    carried: dict[int, LoopValue] = {}
    for k, node in enumerate(it.signature.new_state_gradients):
        _, dtype = it.meta(it.signature.states[k])
        if dtype.is_floating_point:
            carried[k] = value = it.given(f"dh{k}", node, "in")
            it.function.added.append((value, it.function.argument(f"a{k}", dtype, value.size, "step")))
    return carried


def _totals(it: _FunctionLowering) -> list[LoopValue]:
    """The parameters' gradients, piece by piece."""
    totals: list[LoopValue] = []
    for j, (node, pieces) in enumerate(zip(it.signature.parameter_gradients, it.split.totals, strict=True)):
        if node is not None and pieces:
            shape, dtype = it.meta(node)
            into = it.function.given(f"dp{j}", shape, dtype, "same")
            for piece in pieces:
                made = TimeReduction(_summed(it, piece))
                totals.append(LoopValue(f"total{len(totals)}", tuple(piece.at.shape), dtype, made))
                it.function.totals.append((totals[-1], View(into, piece.at)))
    return totals


def _summed(it: _FunctionLowering, piece: ReductionPattern) -> Product | Reduce | View:
    sides = [it.context.as_dtype(it.end(each), piece.at.dtype) for each in piece.read]
    match piece.kind:
        case "product":
            mask = it.split.sparsity.mask if piece.node in it.split.sparsity.totals else None
            return Product(*sides, row_mask=None if mask is None else it.views[mask])
        case "sum":
            return Reduce("sum", sides[0], piece.axes, piece.keep)
        case "value":
            return sides[0]


# -- decompositions ----------------------------------------------------------------------------------------------------

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


_BY_PYTORCH = """
    silu silu_backward gelu gelu_backward softplus softplus_backward log_sigmoid_forward log_sigmoid_backward
    elu elu_backward celu selu hardtanh hardtanh_backward hardsigmoid hardsigmoid_backward
    hardswish hardswish_backward mish mish_backward leaky_relu leaky_relu_backward glu glu_backward
    threshold softshrink softshrink_backward hardshrink logit logit_backward tan_backward

    native_layer_norm native_layer_norm_backward native_group_norm_backward
    _softmax _safe_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data logsumexp logaddexp
    native_batch_norm native_batch_norm_backward norm linalg_vector_norm std aminmax nansum mse_loss huber_loss

    addmv addr mv dot vdot outer baddbmm addcmul addcdiv lerp xlogy rsub
    select_backward slice_backward stack unsafe_split unsafe_chunk narrow narrow_copy
    diff unsqueeze_copy squeeze masked_fill fill new_empty nan_to_num tril triu index_fill
"""
_SIXTH = struct.unpack("f", struct.pack("f", 1 / 6))[0]


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """For operators that are made of smaller ones, PyTorch's own functions that make them so."""
    known = [getattr(aten, name) for name in _BY_PYTORCH.split() if hasattr(aten, name)]
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
        aten.native_group_norm.default: _group_norm,
        aten.index.Tensor: _index,
        aten.index_put.default: _index_put,
        aten._weight_norm_interface_backward.default: _weight_norm_backward,
        aten._linalg_solve_ex.default: _solve,
        aten.linalg_lu_solve.default: _lu_solve,
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


def _group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's function without weights: with weights it reads by strides, which stacked values do not have."""
    plain = cast("Callable[..., tuple[Tensor, ...]]", _decomp.decomposition_table[aten.native_group_norm.default])
    out, mean, rstd = plain(x, None, None, *rest)
    shape = (1, -1, *[1] * (x.dim() - 2))
    out = out if weight is None else out * weight.reshape(shape)
    return (out if bias is None else out + bias.reshape(shape)).to(x.dtype), mean, rstd


def _weight_norm_backward(gradient: Tensor, v: Tensor, g: Tensor, norms: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """The gradients of v * (g / norms), for which `vmap` has no rule."""
    others = [i for i in range(v.dim()) if i != axis]
    along = (gradient * v).sum(others, True) / norms
    return g / norms * (gradient - v * (along / norms)), along


def _flattened(x: Tensor, indices: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, list[int], int] | None:
    """Several indices of integers as one; None if there is only one, or a mask.

    Returns x with the indexed axes in front, as a single one; the index into that; the order of x's axes; and the place
    of the index's axes in the result.
    """
    places = [i for i, each in enumerate(indices) if each is not None]
    given = [each for each in indices if each is not None]
    if len(places) < 2 or any(each.dtype not in (torch.int64, torch.int32) for each in given):
        return None
    order = [*places, *(i for i in range(x.dim()) if i not in places)]
    table = x.permute(order).reshape(-1, *[x.shape[i] for i in order[len(places) :]])
    flat, within = given[0] * 0, given[0] == given[0]
    for i, index in zip(places, given, strict=True):
        flat = flat * x.shape[i] + torch.where(index < 0, index + x.shape[i], index)
        within = within & (index >= -x.shape[i]) & (index < x.shape[i])
    # An index that is out of range along one axis must not reach another element, so it stays out of range.
    flat = torch.where(within, flat, len(table))
    return table, flat, order, places[0] if places[-1] - places[0] == len(places) - 1 else 0


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    found = _flattened(x, indices)
    if found is None:
        return NotImplemented
    table, flat, _, start = found
    picked = table.index_select(0, flat.reshape(-1)).reshape(*flat.shape, *table.shape[1:])
    return picked.movedim(list(range(flat.dim())), list(range(start, start + flat.dim()))).contiguous()


def _index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    found = _flattened(x, indices)
    if found is None:
        return NotImplemented
    (table, flat, order, start), dims = found, found[1].dim()
    rest = table.shape[1:]
    values = values.expand(*rest[:start], *flat.shape, *rest[start:])
    values = values.movedim(list(range(start, start + dims)), list(range(dims))).reshape(-1, *rest)
    flat = flat.reshape(-1)
    made = table.index_add(0, flat, values) if accumulate else table.index_put([flat], values)
    back = sorted(range(x.dim()), key=order.__getitem__)
    return made.reshape([x.shape[i] for i in order]).permute(back).contiguous()


def _solve(a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    if a.dim() != 2 or a.is_complex():
        return NotImplemented
    lu, pivots, info = aten.linalg_lu_factor_ex.default(a)
    found = _lu_solve(lu, pivots, b.unsqueeze(-1) if b.dim() == 1 else b, left=left)
    return found.squeeze(-1) if b.dim() == 1 else found, lu, pivots, info


def _lu_solve(lu: Tensor, pivots: Tensor, b: Tensor, *, left: bool = True, adjoint: bool = False) -> Any:
    """A product by the inverse, which is made once where the factors are those of a weight."""
    if lu.dim() != 2 or lu.is_complex():
        return NotImplemented
    permuted, lower, upper = aten.lu_unpack.default(lu, pivots)
    inverse = aten.linalg_solve_triangular.default(lower, permuted.mT, upper=False, unitriangular=True)
    inverse = aten.linalg_solve_triangular.default(upper, inverse, upper=True)
    inverse = inverse.mT if adjoint else inverse
    return inverse @ b if left else b @ inverse


def _max(x: Tensor, axis: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return x.amax(axis, keepdim), x.argmax(axis, keepdim)


def _min(x: Tensor, axis: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return x.amin(axis, keepdim), x.argmin(axis, keepdim)


def _hardsigmoid_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """As PyTorch's kernels have it: in float64, too, they multiply by a sixth of float32."""
    return torch.where((x > -3) & (x < 3), gradient * _SIXTH, 0.0)
