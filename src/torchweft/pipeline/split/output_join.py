"""Join the outputs of micro-batches by rules that are found by running the model on other rows, never guessed.

    rows of      one micro-batch    another one, twice    both together
    a number     a                  b                     mean of a and b by rows, or their sum; else rejected
    a tensor     k rows for each row that came in; else rejected

The obvious rule, a mean by rows, is wrong for a loss that leaves out tokens (a mask, ``ignore_index``) unless all
micro-batches leave out equal numbers. So the two micro-batches are those that differ most in how often an input holds
a value that can mark such tokens. As long as the micro-batches never differed in an input, each step checks whether
they do, and then compares again.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import isfinite
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from torchweft.core.errors import BatchError, join_faults
from torchweft.core.pytree import broadcast_prefix, flatten, structure_paths, unflatten
from torchweft.core.rng import generators_of, get_states
from torchweft.pipeline.microbatch import SplitPlan
from torchweft.pipeline.split.isolation import copies, undisturbed
from torchweft.pipeline.split.program import Recording
from torchweft.pipeline.split.record import ForwardRecorder
from torchweft.pipeline.split.verify import difference

Reduction = Literal["mean", "sum"]
Quiet = Literal["none", "blocks", "all"]  # the modules that run in eval mode
RunQuietly = Callable[[Any, Quiet], tuple[Any, bool]]
QUIET: tuple[Quiet, ...] = ("none", "blocks", "all")

IGNORED = -100  # PyTorch's default of ignore_index
# Functions that compare with a number, which can mark the tokens that a loss leaves out.
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "cross_entropy", "nll_loss"}


class _Outputs(NamedTuple):
    """Output of the model for some rows: its leaves by name, the axis of the rows of each, and whether it drew."""

    rows: int
    leaves: dict[str, Any]
    axes: Sequence[int]
    drew: bool


class OutputJoin:
    """Rules by which the outputs of one kind of call are joined."""

    def __init__(self, recorder: ForwardRecorder, run: RunQuietly, axes: Any, stated: Reduction | None) -> None:
        """`run` runs the model. `axes` are the axes of the rows in the output. `stated` is the caller's reduction."""
        self._model, self._run_model, self._axes = recorder.model, run, axes
        self._stated: Reduction | None = stated
        self._reduction: Reduction | None = None
        self._rows_checked = False
        indices = (getattr(module, "ignore_index", None) for module in self._model.modules())
        self._marks: set[int | float] = {IGNORED, *(index for index in indices if isinstance(index, int))}
        # By the number of an input: the marks of which unequal numbers were in two micro-batches that were compared.
        self._compared_marks: dict[int, set[Any]] = {}

    def add_marks(self, recording: Recording) -> None:
        """Add the numbers of a recording that can mark tokens left out by a loss."""
        steps = [step for step in recording.steps if step.name.strip("_") in _COMPARISONS]
        numbers = {leaf for step in steps for leaf in step.leaves if type(leaf) in (int, float)}
        # 0.0 is often a label_smoothing. Zeros and ones are marks only in inputs that have no other values.
        self._marks |= numbers - {0.0}

    def reduction(self, plan: SplitPlan, leaves: Sequence[Any], *, numbers: bool) -> Reduction:
        """The reduction of `numbers` in the output, if there are any, after the comparisons that are due.

        Raises BatchError. It names each tensor with a length that is not proportional to the rows. It also names each
        number that is neither the mean by rows nor the sum over the micro-batches.
        """
        if len(plan.sizes) > 1:
            if not self._rows_checked:
                self._check_rows(plan, leaves)
                self._rows_checked = True
            if numbers and self._stated is None:
                self._compare_where_due(plan, leaves)
        return self._stated or self._reduction or "mean"

    def _compare_where_due(self, plan: SplitPlan, leaves: Sequence[Any]) -> None:
        due: list[tuple[int, Any, list[float]]] = []  # input, mark, its rate in each micro-batch
        pairs = enumerate(zip(leaves, plan.axes, strict=True))
        tables = {k: _by_rows(x, axis) for k, (x, axis) in pairs if isinstance(x, Tensor) and axis is not None}
        tables = {k: x for k, x in tables.items() if x.numel() and not (x.is_meta or x.is_complex())}
        for (k, x), span in zip(tables.items(), _spans(list(tables.values())), strict=True):
            known = self._compared_marks.setdefault(k, set())
            due += [(k, mark, rates) for mark, rates in _uneven(x, span, plan.sizes, self._marks, known)]
        while due or self._reduction is None:
            # The two micro-batches that differ most in the first mark. The same pair can settle other marks too.
            rates = due[0][2] if due else [1.0, 0.0]
            pair = rates.index(max(rates)), rates.index(min(rates))
            reduction = self._compare(plan, leaves, pair)
            if reduction is None:
                break  # all numbers are zero or not finite, so the next step compares again
            self._reduction = reduction
            for k, mark, rates in due:
                if rates[pair[0]] != rates[pair[1]]:
                    self._compared_marks[k].add(mark)
            due = [(k, mark, rates) for k, mark, rates in due if mark not in self._compared_marks[k]]

    def _check_rows(self, plan: SplitPlan, leaves: Sequence[Any]) -> None:
        few, many = (self._run(plan, leaves, _rows_of(plan, parts)) for parts in ([0], [0, 1]))
        faults: list[str] = []
        several = False
        for (name, one), axis in zip(few.leaves.items(), few.axes, strict=True):
            other = many.leaves.get(name)
            if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.dim() <= axis:
                continue
            one_shape, other_shape = list(one.shape), list(other.shape)
            lengths = one_shape.pop(axis), other_shape.pop(axis) if len(other_shape) > axis else 0
            several |= lengths[0] > few.rows
            if one_shape != other_shape or lengths[0] * many.rows != lengths[1] * few.rows:
                shapes = f"{tuple(one.shape)} for {few.rows} rows, and {tuple(other.shape)} for {many.rows}"
                faults.append(f"{name} has shape {shapes}")
        _refuse(
            "these do not have the same number of rows for each input row, so their pieces would not make the result "
            "for all rows. Leave them out of the output, compute them outside from outputs that have rows, or inside "
            "with loss= and target=:",
            faults,
        )
        if several:
            self._check_order(plan, leaves)

    def _check_order(self, plan: SplitPlan, leaves: Sequence[Any]) -> None:
        """Raise BatchError if an output has several rows for each that came in, and these are not adjacent."""
        # Rows of tokens are adjacent. Others would be joined in another order than the model's.
        one, other = (self._run(plan, leaves, order, "all") for order in ([0, 1], [1, 0]))
        faults: list[str] = []
        for (name, x), y, axis in zip(one.leaves.items(), other.leaves.values(), one.axes, strict=True):
            several = isinstance(x, Tensor) and x.dim() and not axis and len(x) > 2 and x.shape == y.shape
            if several and (len(x) % 2 or difference(x, y.unflatten(0, (2, -1)).flip(0).flatten(0, 1))):
                faults.append(f"{name} has {len(x)} rows for 2")
        _refuse(
            "output rows of one input row are not adjacent, as those of its tokens would be. Let the model return one "
            "row for each input row, and regroup outside:",
            faults,
        )

    def _compare(self, plan: SplitPlan, leaves: Sequence[Any], pair: tuple[int, int]) -> Reduction | None:
        """The reduction that fits the numbers of a pair of micro-batches. None if both fit, BatchError if neither."""
        first, second = pair
        fault = ""
        # Dropout and batch norm change numbers from run to run. So if neither reduction fits, blocks run in eval mode,
        # and then all modules. The run with blocks is needed because the code between blocks can compute a loss in
        # training mode only.
        for quiet in QUIET:
            # The second one twice: for equal rows, the mean by rows is also the plain mean of the two numbers.
            groups = [first], [second, second], [first, second, second]
            one, other, joint = (self._run(plan, leaves, _rows_of(plan, group), quiet) for group in groups)
            fits: set[Reduction] = {"mean", "sum"} if self._reduction is None else {self._reduction}
            decided = False
            faults: list[str] = []
            for name, number in joint.leaves.items():
                if not _is_number(number):
                    continue
                parts = [(outputs.leaves.get(name), outputs.rows) for outputs in (one, other)]
                fitting = _fitting(parts, number, self._tolerance(number))
                decided |= fitting is not None
                fits &= {"mean", "sum"} if fitting is None else fitting
                words = [f"{x.item():.6g} for {rows}" for x, rows in parts if x is not None]
                faults.append(f"{name} is {number.item():.6g} for {joint.rows} rows, and {', '.join(words)} of them")
            if fits:
                return fits.pop() if decided and len(fits) == 1 else None
            fault = fault or join_faults(self._refusal(plan, leaves), faults)
        raise BatchError(fault)

    def _refusal(self, plan: SplitPlan, leaves: Sequence[Any]) -> str:
        draws = self._run(plan, leaves, [0], "all").drew
        why = " (it draws random numbers in eval mode too, so it cannot be compared)" if draws else ""
        return (
            f"{type(self._model).__name__} returns numbers that are neither a mean by rows nor a sum{why}: "
            "labels or masks leave out unequal numbers in the micro-batches, classes have weights, or the number is "
            "another function of all rows. Give num_items_in_batch= if the model divides its loss by it, such as "
            "(labels[:, 1:] != -100).sum() for a causal one; or compute the loss inside, with loss= and loss_weight=, "
            "or outside, from outputs that have rows. If you want the numbers of micro-batches, choose how to combine "
            "them: loss_reduction='mean' (by rows) or 'sum'. Compared were:"
        )

    def _tolerance(self, number: Tensor) -> float:
        """The relative rounding error that is accepted, by the least precise dtype of the model."""
        dtypes = {number.dtype, *(x.dtype for x in self._model.parameters() if x.is_floating_point())}
        dtypes |= {torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}
        eps = max(torch.finfo(dtype).eps for dtype in dtypes)
        return 3e-2 if eps > 1e-4 else 1e-4 if eps > 1e-8 else 1e-6

    def _run(self, plan: SplitPlan, leaves: Sequence[Any], rows: Sequence[int], quiet: Quiet = "none") -> _Outputs:
        pairs = zip(leaves, plan.axes, strict=True)
        taken = [x if axis is None else x.index_select(axis, torch.tensor(rows, device=x.device)) for x, axis in pairs]
        output, drew = self._run_model(unflatten(plan.structure, taken), quiet)
        result, structure = flatten(output)
        names, axes = structure_paths(structure, "output"), broadcast_prefix(self._axes, structure, "output")
        return _Outputs(len(rows), dict(zip(names, result, strict=True)), axes, drew)


def _refuse(headline: str, faults: list[str]) -> None:
    if faults:
        raise BatchError(join_faults(f"the results of the micro-batches cannot be joined: {headline}", faults))


def run_quietly(recorder: ForwardRecorder, call: Any, quiet: Quiet) -> tuple[Any, bool]:
    """The result of the model without gradients and with the modules `quiet` in eval mode, and whether it drew."""
    modules = [] if quiet == "none" else list(recorder.model.modules())
    before = [(module, module.training) for module in modules if quiet == "all" or module not in recorder.modules.open]
    sources = generators_of(recorder.devices)
    leaves, structure = flatten(call)
    with undisturbed(recorder.model, recorder.devices), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as warnings about gradients, which this run does not compute
        drawn = get_states(sources)
        try:
            # Not module.eval(), which a model can override, and which would reach the open modules as well.
            for module, _ in before:
                module.training = False
            result = recorder.plain(*unflatten(structure, copies(leaves)))
        finally:
            for module, mode in before:
                module.training = mode
        return result, any(not torch.equal(x, y) for x, y in zip(drawn, get_states(sources), strict=True))


def _rows_of(plan: SplitPlan, micro_batches: Sequence[int]) -> list[int]:
    ends = list(accumulate(plan.sizes))
    return [row for i in micro_batches for row in range(ends[i] - plan.sizes[i], ends[i])]


def _by_rows(x: Tensor, axis: int) -> Tensor:
    """All values of each row of an input."""
    x = x.detach().movedim(axis, 0)
    return x.reshape(len(x), x[:1].numel()).to(torch.uint8 if x.dtype is torch.bool else x.dtype)


def _spans(tables: Sequence[Tensor]) -> list[list[float]]:
    """The least and largest value of each table, with a single wait for the device."""
    ends = [end.double().to(tables[0].device) for table in tables for end in table.aminmax()]
    return cast("list[list[float]]", torch.stack(ends).reshape(-1, 2).tolist()) if ends else []


def _uneven(
    x: Tensor, span: Sequence[float], sizes: Sequence[int], marks: set[int | float], known: set[Any]
) -> Iterator[tuple[Any, list[float]]]:
    """Marks not in `known` whose number per row differs between micro-batches, each with these numbers.

    One more mark, "sum", stands for the sum of all values, because weights of rows have no value that marks them.
    """
    least, largest = span
    if least == largest:
        return
    if least >= 0 and largest <= 1:
        marks = marks | {0, 1}
    # A causal loss does not count the first token, so rates are looked at without it, too.
    views = [x, x[:, 1:]] if x.shape[1] > 1 else [x]
    for mark in ("sum", *(number for number in marks if least <= number <= largest)):
        for view in () if mark in known else views:
            of_rows = view.sum(1, dtype=torch.float64) if mark == "sum" else (view == mark).sum(1)
            parts = cast("Sequence[Tensor]", of_rows.split(list(sizes)))
            rates = [part.sum().item() / len(part) for part in parts]
            if max(rates) > min(rates):
                yield mark, rates
                break


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.dim() and value.is_floating_point() and not value.is_meta


def _fitting(parts: Sequence[tuple[Any, int]], whole: Tensor, tolerance: float) -> set[Reduction] | None:
    """The reductions that fit the numbers of two parts, each with its rows. None if all are zero or not finite."""
    if not all(_is_number(number) for number, _ in parts):
        return set()
    (a, rows), (b, other_rows) = ((number.double().item(), rows) for number, rows in parts)
    both = whole.double().item()
    if not any(isfinite(number) and number for number in (a, b, both)):
        return None
    expected: dict[Reduction, float] = {"mean": (a * rows + b * other_rows) / (rows + other_rows), "sum": a + b}
    scale = max(abs(a), abs(b), abs(both))
    return {reduction for reduction, number in expected.items() if abs(both - number) <= tolerance * scale}
