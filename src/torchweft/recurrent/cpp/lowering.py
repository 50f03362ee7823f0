"""Lowering of a captured step to its three functions: forward, backward, and forward again where all states are known.

    forward    x, h (rows t)           ->  h (rows t + 1), y, and the values that backward reads (saved)
    recompute  x, h (rows t and t+1)   ->  saved             nothing is carried, so products are of all steps at once
    backward   x, h, y, saved, dy, dh  ->  dx, dh, and added to the parameters' gradients

PyTorch computes values that depend on the references only (`constants`) once per call. It computes values of operators
that C does not know once per chunk (partitioner.py). In the C text, arguments are called

    x inputs   h states   y outputs   v saved   c constants   dy, dx, dh their gradients   dp those of parameters
    a          gradients of the states after each step, added to the carried one
    u          computed by PyTorch, read here   g   computed here, read by PyTorch after backward

Larger operators are decomposed when a step is captured, most of them by PyTorch's own functions. Convolutions, for
cells such as ConvLSTM's, become matrix products, by the `im2col` of Chellapilla et al. (2006):

    x (N, C, H, W)  -> padded, windows as a view (N, H', W', C, kh, kw) -> copied to columns -> W columns

    gradient of x            the same with the flipped kernel, for stride 1
    gradient of the kernel   one product of the output's gradient and the columns, over all rows and positions

Grouped and transposed convolutions, and the backward of strided ones, stay as they are. Another backend then runs the
cell.
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, _decomp, fx

from torchweft.recurrent.cpp import ir
from torchweft.recurrent.cpp.operators import aten, is_view, lower_node
from torchweft.recurrent.cpp.partitioner import ForwardBackwardSplit, ReductionPattern
from torchweft.recurrent.cpp.scheduling import LoopFunction, LoopSignature
from torchweft.recurrent.graph import StepGraph
from torchweft.recurrent.passes import writes


@dataclass(frozen=True)
class Lowered:
    """The three functions, and the nodes of some arguments, by index."""

    split: ForwardBackwardSplit
    constants: list[fx.Node]  # nodes of the arguments "constant"
    outside: list[fx.Node]  # nodes of the arguments "from torch"
    forward: LoopFunction
    recompute: LoopFunction
    backward: LoopFunction

    @property
    def functions(self) -> tuple[LoopFunction, LoopFunction, LoopFunction]:
        return self.forward, self.recompute, self.backward


def lower(captured: StepGraph) -> Lowered:
    """Lower a captured step to its three functions. Raises Unsupported."""
    # Some of PyTorch's decompositions write into a result in place. Values of loops never change once computed.
    written = writes(captured.module)
    if written:
        raise ir.Unsupported(f"loops in C are made of pure operators, but this step writes by {', '.join(written)}")
    split = ForwardBackwardSplit(captured)
    constants: list[fx.Node] = []
    outside: list[fx.Node] = []
    forward = _FunctionLowering(split, LoopSignature("forward"), constants, outside).lower_forward()
    recompute = _FunctionLowering(split, LoopSignature("recompute"), constants, outside).lower_recompute()
    backward = _FunctionLowering(split, LoopSignature("backward", True), constants, outside).lower_backward()
    return Lowered(split, constants, outside, forward, recompute, backward)


class _FunctionLowering:
    """The lowering of one function. `constants` and `outside` are shared by all three functions, and grow."""

    def __init__(
        self, split: ForwardBackwardSplit, function: LoopSignature, constants: list[fx.Node], outside: list[fx.Node]
    ) -> None:
        self.split, self.function = split, function
        self.captured = split.captured
        self.graph = split.captured.signature
        self.views: dict[fx.Node, ir.View] = {}
        self.context = ir.LoweringContext({})
        self._constants, self._outside = constants, outside  # shared, because an argument's index is its place there

    def lower_forward(self) -> LoopFunction:
        self.add_inputs()
        self.function.carried.extend((value, value) for value in self.add_states())
        self.lower_nodes(self.split.front)
        for k, node in enumerate(self.graph.new_states):
            if k not in self.captured.invariant:
                self.write("state", k, cast(fx.Node, node), "next")
        for i, node in enumerate(self.graph.outputs):
            output = cast(fx.Node, node)
            # An output that is a new state is stored once, as the state.
            if i not in self.captured.aliases and not self.split.is_outside(output):
                self.write("output", i, output)
        for j, node in enumerate(self.split.saved):
            self.write("saved", j, node)
        return self.finish()

    def lower_recompute(self) -> LoopFunction:
        self.add_inputs()
        self.add_states()
        self.add_new_states(self.split.front)
        self.lower_nodes(self.split.ancestors_of(self.split.saved, {*self.views} | self.split.torch))
        for j, node in enumerate(self.split.saved):
            self.write("saved", j, node)
        return self.finish()

    def lower_backward(self) -> LoopFunction:
        bases = {*self.split.forward_values.bases}
        self.add_inputs()
        self.add_states()
        self.add_new_states(bases)
        for i, node in enumerate(self.graph.outputs):
            if node in bases and node not in self.views:
                self.add_input("output", i, node, "step")
        for j, node in enumerate(self.split.saved):
            self.add_input("saved", j, node, "step")
        carried = self._add_gradients()
        self.lower_nodes(self.split.back | self.split.forward_values.views)
        # None: a step that does not read a state passes no gradient on, and the loop must clear the carried one.
        for k, value in carried.items():
            node = self.graph.state_gradients[k]
            end = None if node is None else self.write("carried gradient", k, node, "out").value
            self.function.carried.append((value, end))
        for i, node in enumerate(self.graph.input_gradients):
            if node is not None and not self.split.is_outside(node):
                self.write("input gradient", i, node)
        for j, node in enumerate(self.split.for_torch):
            self.write("for torch", j, node)
        return self.finish(self._add_totals())

    def meta_of(self, node: fx.Node) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a node's value. For a reference, those of its tensor."""
        value: Tensor = self.captured.value(node)
        return tuple(value.shape), value.dtype

    def add_input(self, kind: ir.ArgumentKind, index: int, node: fx.Node, row: ir.Row) -> ir.LoopValue:
        shape, dtype = self.meta_of(node)
        # Constants come in the dtype in which C computes, because products pack them as they are.
        dtype = dtype if self.split.varies(node) else ir.compute_dtype(dtype)
        value = self.function.add_input(kind, index, shape, dtype, row)
        ir.check_dtype(dtype, value.name)
        self.views[node] = ir.whole_view(value)
        return value

    def add_inputs(self) -> None:
        for i, node in enumerate(self.graph.inputs):
            if not self.split.is_outside(node):
                self.add_input("input", i, node, "step")

    def add_states(self) -> list[ir.LoopValue]:
        """Make the states before the step arguments. Returns the values of those that change."""
        invariant = self.captured.invariant
        values = [
            self.add_input("state", k, node, "same" if k in invariant else "step")
            for k, node in enumerate(self.graph.states)
        ]
        return [value for k, value in enumerate(values) if k not in invariant]

    def add_new_states(self, known: set[fx.Node]) -> None:
        """Read the states after the step, as far as they are `known`, from the next rows of the states' memory."""
        for k, node in enumerate(self.graph.new_states):
            if node in known and k not in self.captured.invariant and node not in self.views:
                shape, dtype = self.meta_of(node)
                value = ir.LoopValue(f"n{k}", shape, dtype)
                self.function.inputs[value] = ir.Argument("state", k, dtype, value.size, "next")
                self.views[node] = ir.whole_view(value)

    def lower_nodes(self, nodes: set[fx.Node]) -> None:
        # Created only here, because the mask must be an argument by now.
        sparsity = self.split.sparsity
        mask = None if sparsity.mask is None else self.views[sparsity.mask]
        self.context = ir.LoweringContext(self.views, {} if mask is None else dict.fromkeys(sparsity.products, mask))
        for node in self.captured.nodes:
            if node in nodes:
                for operand in node.all_input_nodes:
                    self._add_from_outside(operand)
                lower_node(self.context, node)

    def result_of(self, node: fx.Node) -> ir.View:
        self._add_from_outside(node)
        return self.context.as_dtype(self.context.view_of(node), self.meta_of(node)[1])

    def write(self, kind: ir.ArgumentKind, index: int, node: fx.Node, row: ir.Row = "step") -> ir.View:
        shape, dtype = self.meta_of(node)
        # The rows "next" and "out" belong to memory that is an argument already: states and carried gradients.
        argument = ir.Argument(kind, index, dtype, torch.Size(shape).numel(), row)
        ir.check_dtype(dtype, argument.name)
        if row == "step":
            self.function.arguments.append(argument)
        view = self.result_of(node)
        self.function.results.append((view, argument))
        return view

    def finish(self, totals: Sequence[ir.LoopValue] = ()) -> LoopFunction:
        return LoopFunction(self.function, [*self.context.values, *totals])

    def _add_from_outside(self, node: fx.Node) -> None:
        """Make a value of PyTorch's available: as an argument with a row per step, or the same for all steps."""
        if node in self.context.views:
            return
        if self.split.varies(node):
            if node in self.split.torch:
                self._add_shared_input("from torch", self._outside, node, "step")
            return
        # A view of a constant is lowered as a view, so that both share one argument, and one packed matrix.
        if is_view(node) and not self.split.varies(node.all_input_nodes[0]):
            self._add_from_outside(node.all_input_nodes[0])
            try:
                lower_node(self.context, node)
                return
            except ir.Unsupported:
                pass  # then PyTorch computes it
        if isinstance(node.meta.get("val"), list | tuple):
            raise ir.Unsupported(f"{node.target} on weights yields several tensors")
        self._add_shared_input("constant", self._constants, node, "same")

    def _add_shared_input(self, kind: ir.ArgumentKind, nodes: list[fx.Node], node: fx.Node, row: ir.Row) -> None:
        if node not in nodes:
            nodes.append(node)
        self.context.views[node] = ir.whole_view(self.add_input(kind, nodes.index(node), node, row))

    def _add_gradients(self) -> dict[int, ir.LoopValue]:
        """Make the gradients of outputs and new states arguments. Returns the carried ones, by index of the state."""
        for i, node in enumerate(self.graph.output_gradients):
            if not self.split.is_outside(node):
                self.add_input("output gradient", i, node, "step")
        carried: dict[int, ir.LoopValue] = {}
        for k, node in enumerate(self.graph.new_state_gradients):
            _, dtype = self.meta_of(self.graph.states[k])
            if dtype.is_floating_point:
                carried[k] = value = self.add_input("carried gradient", k, node, "in")
                argument = self.function.add_argument("added gradient", k, dtype, value.size, "step")
                self.function.added.append((value, argument))
        return carried

    def _add_totals(self) -> list[ir.LoopValue]:
        totals: list[ir.LoopValue] = []
        for j, (node, pieces) in enumerate(zip(self.graph.parameter_gradients, self.split.totals, strict=True)):
            if node is not None and pieces:
                shape, dtype = self.meta_of(node)
                gradient = self.function.add_input("parameter gradient", j, shape, dtype, "same")
                for piece in pieces:
                    reduction = ir.TimeReduction(self._summed_operation(piece))
                    totals.append(ir.LoopValue(f"total{len(totals)}", tuple(piece.at.shape), dtype, reduction))
                    self.function.totals.append((totals[-1], ir.View(gradient, piece.at)))
        return totals

    def _summed_operation(self, piece: ReductionPattern) -> ir.Product | ir.Reduce | ir.View:
        sides = [self.context.as_dtype(self.result_of(node), piece.at.dtype) for node in piece.read]
        match piece.kind:
            case "product":
                mask = self.split.sparsity.mask if piece.node in self.split.sparsity.totals else None
                return ir.Product(*sides, row_mask=None if mask is None else self.views[mask])
            case "sum":
                return ir.Reduce("sum", sides[0], piece.axes, piece.keep)
            case "value":
                return sides[0]


Sizes = Sequence[int]


def decompose_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes, dilation: Sizes, *rest: Any
) -> Any:
    """aten.convolution by smaller operators, or NotImplemented for transposed and grouped ones."""
    transposed, _, groups = rest
    if transposed or groups != 1 or x.dim() != weight.dim():
        return NotImplemented
    windows = _windows_of(x, weight.shape[2:], stride, padding, dilation)
    dims = weight.dim() - 2
    places = list(windows.shape[1 : dims + 1])
    columns = windows.reshape(-1, weight[0].numel())
    flat = weight.reshape(weight.shape[0], -1).t()
    out = columns @ flat if bias is None else torch.addmm(bias, columns, flat)
    # Contiguous as the result of aten.convolution is, because views of it in the cell can depend on that.
    return out.reshape(x.shape[0], *places, weight.shape[0]).movedim(-1, 1).contiguous()


def decompose_convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, _: Any, *rest: Any) -> Any:
    """aten.convolution_backward by smaller operators, or NotImplemented if it is transposed, grouped or strided."""
    stride, padding, dilation, transposed, _, groups, output_mask = rest
    if transposed or groups != 1 or any(step != 1 for step in stride) or x.dim() != weight.dim():
        return NotImplemented
    axes = list(range(2, weight.dim()))
    dx = dw = db = None
    if output_mask[0]:
        flipped = weight.flip(axes).transpose(0, 1).contiguous()
        around = [d * (k - 1) - p for k, p, d in zip(weight.shape[2:], padding, dilation, strict=True)]
        if any(width < 0 for width in around):
            return NotImplemented
        dx = decompose_convolution(gradient, flipped, None, stride, around, dilation, False, [], 1)
    rows = gradient.movedim(1, -1).reshape(-1, weight.shape[0])
    if output_mask[1]:
        columns = _windows_of(x, weight.shape[2:], stride, padding, dilation).reshape(-1, weight[0].numel())
        dw = (rows.t() @ columns).reshape(weight.shape)
    if output_mask[2]:
        db = rows.sum(0)
    return dx, dw, db


def _windows_of(x: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> Tensor:
    """The patches under the kernel, N x places ... x C x kernel ..., as a view of the padded input."""
    x = _decompose_pad(x, [pad for pad in reversed(padding) for _ in range(2)])
    dims = len(kernel)
    for axis, (size, step, distance) in enumerate(zip(kernel, stride, dilation, strict=True), 2):
        x = x.unfold(axis, (size - 1) * distance + 1, step)
    for axis, distance in enumerate(dilation, 2 + dims):
        if distance != 1:
            x = x[(slice(None),) * axis + (slice(None, None, distance),)]
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
    """The decomposition of each larger operator: PyTorch's own, or one of this module."""
    known = [getattr(aten, name) for name in _BY_PYTORCH.split() if hasattr(aten, name)]
    table: dict[Any, Callable[..., Any]] = dict(cast(Any, _decomp).get_decompositions(known))
    return table | {
        aten.hardsigmoid_backward.default: _decompose_hardsigmoid_backward,
        aten.flip.default: _decompose_flip,
        aten.slice_scatter.default: _decompose_slice_scatter,
        aten.select_scatter.default: _decompose_select_scatter,
        aten.constant_pad_nd.default: _decompose_pad,
        aten.roll.default: _decompose_roll,
        aten.repeat.default: _decompose_repeat,
        aten.var.correction: _decompose_var,
        aten.var_mean.correction: _decompose_var_mean,
        aten.native_group_norm.default: _decompose_group_norm,
        aten.index.Tensor: _decompose_index,
        aten.index_put.default: _decompose_index_put,
        aten._weight_norm_interface_backward.default: _decompose_weight_norm_backward,
        aten._linalg_solve_ex.default: _decompose_solve,
        aten.linalg_lu_solve.default: _decompose_lu_solve,
        aten.max.dim: partial(_decompose_extreme, torch.amax, torch.argmax),
        aten.min.dim: partial(_decompose_extreme, torch.amin, torch.argmin),
        aten.convolution.default: decompose_convolution,
        aten.convolution_backward.default: decompose_convolution_backward,
    }


def _decompose_flip(x: Tensor, axes: Sequence[int]) -> Tensor:
    for axis in axes:
        x = x.index_select(axis, torch.arange(x.shape[axis] - 1, -1, -1, device=x.device))
    return x.clone() if not axes else x


def _decompose_slice_scatter(
    x: Tensor, piece: Tensor, axis: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """Replace a slice: concatenate the part before it, `piece` and the part after it. Use an index for step > 1."""
    axis %= x.dim()
    places = range(*slice(start, end, step).indices(x.shape[axis]))
    if step == 1:
        rest = x.narrow(axis, places.start + len(places), x.shape[axis] - places.start - len(places))
        return _joined([x.narrow(axis, 0, places.start), piece.to(x.dtype), rest], axis)
    shape = [-1 if i == axis else 1 for i in range(x.dim())]
    index = torch.arange(places.start, places.stop, step, device=x.device)
    return x.scatter(axis, index.view(shape).expand(piece.shape), piece)


def _joined(pieces: Sequence[Tensor], axis: int) -> Tensor:
    return torch.cat([piece for piece in pieces if piece.shape[axis]] or list(pieces[:1]), axis)


def _decompose_select_scatter(x: Tensor, piece: Tensor, axis: int, index: int) -> Tensor:
    index %= x.shape[axis]
    return _decompose_slice_scatter(x, piece.unsqueeze(axis), axis, index, index + 1)


def _decompose_pad(x: Tensor, widths: Sequence[int], value: bool | int | float = 0) -> Tensor:
    """Add a border of one number. A negative width removes elements."""
    for axis, low, high in zip(range(x.dim() - 1, -1, -1), widths[::2], widths[1::2], strict=False):
        x = x.narrow(axis, max(-low, 0), x.shape[axis] - max(-low, 0) - max(-high, 0))
        edges = [x.new_full((*x.shape[:axis], max(width, 0), *x.shape[axis + 1 :]), value) for width in (low, high)]
        x = _joined([edges[0], x, edges[1]], axis)
    return x


def _decompose_roll(x: Tensor, shifts: Sequence[int], axes: Sequence[int] = ()) -> Tensor:
    if not axes:  # without axes, PyTorch rolls the flattened tensor
        return _decompose_roll(x.reshape(-1), shifts, [0]).reshape(x.shape)
    for shift, axis in zip(shifts, axes, strict=True):
        size = x.shape[axis]
        start = size - shift % max(size, 1)
        x = _joined([x.narrow(axis, start, size - start), x.narrow(axis, 0, start)], axis)
    return x


def _decompose_repeat(x: Tensor, times: Sequence[int]) -> Tensor:
    """Insert an axis of size 1 before each axis, expand it, and merge the two."""
    sizes = [*[1] * (len(times) - x.dim()), *x.shape]
    expanded = [size for pair in zip(times, sizes, strict=True) for size in pair]
    with_axes = x.reshape([part for size in sizes for part in (1, size)])
    return with_axes.expand(expanded).reshape([count * size for count, size in zip(times, sizes, strict=True)])


def _decompose_var(
    x: Tensor, axes: Sequence[int] | None = None, *, correction: int | float | None = None, keepdim: bool = False
) -> Tensor:
    axes, wide = list(axes or range(x.dim())), x.to(ir.compute_dtype(x.dtype))
    count = math.prod(x.shape[axis] for axis in axes)
    # Two passes: the mean of squares minus the square of the mean would cancel for a large mean.
    distance = wide - wide.mean(axes, True)
    total = (distance * distance).sum(axes, keepdim)
    return (total / max(count - (1.0 if correction is None else correction), 0.0)).to(x.dtype)


def _decompose_var_mean(
    x: Tensor, axes: Sequence[int] | None = None, *, correction: int | float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    mean = x.mean(list(axes or range(x.dim())), keepdim)
    return _decompose_var(x, axes, correction=correction, keepdim=keepdim), mean


def _decompose_group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    # PyTorch's function reads weights by strides that the stacked values of several steps do not have. So it gets
    # none, and they are applied here.
    plain = cast("Callable[..., tuple[Tensor, ...]]", _decomp.decomposition_table[aten.native_group_norm.default])
    out, mean, rstd = plain(x, None, None, *rest)
    shape = (1, -1, *[1] * (x.dim() - 2))
    out = out if weight is None else out * weight.reshape(shape)
    return (out if bias is None else out + bias.reshape(shape)).to(x.dtype), mean, rstd


def _decompose_weight_norm_backward(
    gradient: Tensor, v: Tensor, g: Tensor, norms: Tensor, axis: int
) -> tuple[Tensor, Tensor]:
    """The gradients of v * (g / norms), for which `vmap` has no rule."""
    others = [i for i in range(v.dim()) if i != axis]
    along = (gradient * v).sum(others, True) / norms
    return g / norms * (gradient - v * (along / norms)), along


def _flatten_indices(x: Tensor, indices: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, list[int], int] | None:
    """Several indices of integers as a single one, or None for a single index or a mask."""
    # Returns x with the indexed axes in front, merged into one, and the index into that axis. Also the order of x's
    # axes, and the position of the index's axes in the result.
    places = [i for i, index in enumerate(indices) if index is not None]
    used = [index for index in indices if index is not None]
    if len(places) < 2 or any(index.dtype not in (torch.int64, torch.int32) for index in used):
        return None
    order = [*places, *(i for i in range(x.dim()) if i not in places)]
    table = x.permute(order).reshape(-1, *[x.shape[i] for i in order[len(places) :]])
    flat, within = used[0] * 0, used[0] == used[0]
    for i, index in zip(places, used, strict=True):
        flat = flat * x.shape[i] + torch.where(index < 0, index + x.shape[i], index)
        within = within & (index >= -x.shape[i]) & (index < x.shape[i])
    # An index that is out of range along one axis must not reach another element, so it stays out of range.
    flat = torch.where(within, flat, len(table))
    return table, flat, order, places[0] if places[-1] - places[0] == len(places) - 1 else 0


def _decompose_index(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    flattened = _flatten_indices(x, indices)
    if flattened is None:
        return NotImplemented
    table, flat, _, start = flattened
    picked = table.index_select(0, flat.reshape(-1)).reshape(*flat.shape, *table.shape[1:])
    return picked.movedim(list(range(flat.dim())), list(range(start, start + flat.dim()))).contiguous()


def _decompose_index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    flattened = _flatten_indices(x, indices)
    if flattened is None:
        return NotImplemented
    (table, flat, order, start), dims = flattened, flattened[1].dim()
    rest = table.shape[1:]
    values = values.expand(*rest[:start], *flat.shape, *rest[start:])
    values = values.movedim(list(range(start, start + dims)), list(range(dims))).reshape(-1, *rest)
    flat = flat.reshape(-1)
    written = table.index_add(0, flat, values) if accumulate else table.index_put([flat], values)
    inverse = sorted(range(x.dim()), key=order.__getitem__)
    return written.reshape([x.shape[i] for i in order]).permute(inverse).contiguous()


def _decompose_solve(a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    if a.dim() != 2 or a.is_complex():
        return NotImplemented
    lu, pivots, info = aten.linalg_lu_factor_ex.default(a)
    solution = _decompose_lu_solve(lu, pivots, b.unsqueeze(-1) if b.dim() == 1 else b, left=left)
    return solution.squeeze(-1) if b.dim() == 1 else solution, lu, pivots, info


def _decompose_lu_solve(lu: Tensor, pivots: Tensor, b: Tensor, *, left: bool = True, adjoint: bool = False) -> Any:
    # Solving by substitution would be more precise, but it is sequential. The inverse of a weight is a constant, so
    # each step is left with one product.
    if lu.dim() != 2 or lu.is_complex():
        return NotImplemented
    permuted, lower, upper = aten.lu_unpack.default(lu, pivots)
    inverse = aten.linalg_solve_triangular.default(lower, permuted.mT, upper=False, unitriangular=True)
    inverse = aten.linalg_solve_triangular.default(upper, inverse, upper=True)
    inverse = inverse.mT if adjoint else inverse
    return inverse @ b if left else b @ inverse


def _decompose_extreme(value: Any, place: Any, x: Tensor, *axis: Any) -> tuple[Tensor, Tensor]:
    return value(x, *axis), place(x, *axis)


def _decompose_hardsigmoid_backward(gradient: Tensor, x: Tensor) -> Tensor:
    # PyTorch's kernels multiply by a sixth in float32, even for float64. 1 / 6 would differ from the eager loop.
    return torch.where((x > -3) & (x < 3), gradient * _SIXTH, 0.0)
