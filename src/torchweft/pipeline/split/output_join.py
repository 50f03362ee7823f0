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
Quiet = Literal["none", "blocks", "all"]
"""The modules that run in eval mode."""
RunQuietly = Callable[[Any, Quiet], tuple[Any, bool]]
QUIET: tuple[Quiet, ...] = ("none", "blocks", "all")

IGNORED = -100
"""PyTorch's default of ``ignore_index``."""
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "cross_entropy", "nll_loss"}
"""Functions that compare with a number, which can mark the tokens that a loss leaves out."""


class _Outputs(NamedTuple):
    """Output of the model for some rows: its leaves by name, and the axis of the rows of each."""

    rows: int
    leaves: dict[str, Any]
    axes: Sequence[int]


class OutputJoin:
    """Rules by which the outputs of one kind of call are joined."""

    def __init__(self, recorder: ForwardRecorder, run: RunQuietly, axes: Any, stated: Reduction | None) -> None:
        """`run` runs the model. `axes` are the axes of the rows in the output. `stated` is the caller's reduction, or
        None."""
        self._recorder, self._run_model, self._axes = recorder, run, axes
        self._stated: Reduction | None = stated
        self._reduction: Reduction | None = None
        self._rows_checked = False
        layers = recorder.model.modules()
        self._marks: set[int | float] = {
            IGNORED,
            *(index for m in layers if isinstance(index := getattr(m, "ignore_index", None), int)),
        }
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

        Raises BatchError that names each tensor with a length that is not proportional to the rows, and each number
        that is neither the mean by rows nor the sum of the numbers of the micro-batches.
        """
        if len(plan.sizes) > 1:
            if not self._rows_checked:
                self._check_rows(plan, leaves)
                self._rows_checked = True
            if numbers and self._stated is None:
                self._compare_where_due(plan, leaves)
        if self._stated is not None:
            return self._stated
        return "mean" if self._reduction is None else self._reduction

    def _compare_where_due(self, plan: SplitPlan, leaves: Sequence[Any]) -> None:
        due: list[tuple[int, Any, list[float]]] = []  # input, mark, its rate in each micro-batch
        pairs = enumerate(zip(leaves, plan.axes, strict=True))
        tables = {k: _by_rows(x, axis) for k, (x, axis) in pairs if isinstance(x, Tensor) and axis is not None}
        tables = {k: x for k, x in tables.items() if x.numel() and not (x.is_meta or x.is_complex())}
        for (k, x), span in zip(tables.items(), _spans(list(tables.values())), strict=True):
            known = self._compared_marks.setdefault(k, set())
            due += [(k, *each) for each in _uneven(x, span, plan.sizes, self._marks, known)]
        while due or self._reduction is None:
            rates = due[0][2] if due else [1.0, 0.0]
            pair = rates.index(max(rates)), rates.index(min(rates))
            found = self._compared(plan, leaves, pair)
            if found is None:
                break  # all numbers are zero or not finite, so the next step compares again
            self._reduction = found
            for k, mark, seen in due:
                if seen[pair[0]] != seen[pair[1]]:
                    self._compared_marks[k].add(mark)
            due = [each for each in due if each[1] not in self._compared_marks[each[0]]]

    def _check_rows(self, plan: SplitPlan, leaves: Sequence[Any]) -> None:
        few, many = self._run(plan, leaves, [0]), self._run(plan, leaves, [0, 1])
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
                faults.append(
                    f"{name} has shape {tuple(one.shape)} for {few.rows} rows, and {tuple(other.shape)} for {many.rows}"
                )
        if faults:
            headline = (
                "the results of the micro-batches cannot be joined: these do not have the same number of rows for "
                "each input row, so their pieces would not make the result for all rows. Leave them out of the output, "
                "compute them outside from outputs that have rows, or inside with loss= and target=:"
            )
            raise BatchError(join_faults(headline, faults))
        if several:
            self._check_order(plan, leaves)

    def _check_order(self, plan: SplitPlan, leaves: Sequence[Any]) -> None:
        """Raise BatchError if an output has several rows for each that came in, and these are not adjacent.

        Rows of tokens are adjacent. Others would be joined in another order than the model's. Running two rows in both
        orders shows it.
        """
        one, other = (self._run_rows(plan, leaves, order, "all")[0] for order in ([0, 1], [1, 0]))
        faults: list[str] = []
        for (name, x), y, axis in zip(one.leaves.items(), other.leaves.values(), one.axes, strict=True):
            several = isinstance(x, Tensor) and x.dim() and not axis and len(x) > 2 and x.shape == y.shape
            if several and (len(x) % 2 or difference(x, y.unflatten(0, (2, -1)).flip(0).flatten(0, 1))):
                faults.append(f"{name} has {len(x)} rows for 2")
        if faults:
            headline = (
                "the results of the micro-batches cannot be joined: output rows of one input row are not adjacent, as "
                "those of its tokens would be. Let the model return one row for each input row, and regroup outside:"
            )
            raise BatchError(join_faults(headline, faults))

    def _compared(self, plan: SplitPlan, leaves: Sequence[Any], pair: tuple[int, int]) -> Reduction | None:
        """The reduction that turns the numbers of each micro-batch into the number for both. None if all of them are
        zero or not finite, so that both reductions fit. Raises BatchError if neither reduction fits.

        Dropout and batch norm change numbers from run to run. So if neither fits, the comparison is repeated with
        blocks in eval mode, and then with all modules in eval mode. The run with blocks is needed because the code
        between blocks can compute a loss in training mode only.
        """
        first, second = pair
        seen = ""
        for quiet in QUIET:
            alone = [self._run(plan, leaves, each, quiet) for each in ([first], [second, second])]
            joint = self._run(plan, leaves, [first, second, second], quiet)
            fits: set[Reduction] = {"mean", "sum"} if self._reduction is None else {self._reduction}
            told = False
            faults: list[str] = []
            for name, whole in joint.leaves.items():
                if not _is_number(whole):
                    continue
                parts = [(each.leaves.get(name), each.rows) for each in alone]
                found = _fitting(parts, whole, self._tolerance(whole))
                told |= found is not None
                fits &= {"mean", "sum"} if found is None else found
                words = [f"{x.item():.6g} for {rows}" for x, rows in parts if x is not None]
                faults.append(f"{name} is {whole.item():.6g} for {joint.rows} rows, and {', '.join(words)} of them")
            if fits:
                return fits.pop() if told and len(fits) == 1 else None
            seen = seen or join_faults(self._refusal(plan, leaves), faults)
        raise BatchError(seen)

    def _refusal(self, plan: SplitPlan, leaves: Sequence[Any]) -> str:
        draws = self._run_rows(plan, leaves, [0], "all")[1]
        why = " (it draws random numbers in eval mode too, so it cannot be compared)" if draws else ""
        return (
            f"{type(self._recorder.model).__name__} returns numbers that are neither a mean by rows nor a sum{why}: "
            "labels or masks leave out unequal numbers in the micro-batches, classes have weights, or the number is "
            "another function of all rows. Give num_items_in_batch= if the model divides its loss by it, such as "
            "(labels[:, 1:] != -100).sum() for a causal one; or compute the loss inside, with loss= and loss_weight=, "
            "or outside, from outputs that have rows. If you want the numbers of micro-batches, choose how to combine "
            "them: loss_reduction='mean' (by rows) or 'sum'. Compared were:"
        )

    def _tolerance(self, number: Tensor) -> float:
        """The relative rounding error that is accepted, by the least precise dtype of the model."""
        dtypes = {number.dtype, *(x.dtype for x in self._recorder.model.parameters() if x.is_floating_point())}
        dtypes |= {torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}
        eps = max(torch.finfo(dtype).eps for dtype in dtypes)
        return 3e-2 if eps > 1e-4 else 1e-4 if eps > 1e-8 else 1e-6

    def _run(
        self, plan: SplitPlan, leaves: Sequence[Any], micro_batches: Sequence[int], quiet: Quiet = "none"
    ) -> _Outputs:
        return self._run_rows(plan, leaves, _rows_of(plan, micro_batches), quiet)[0]

    def _run_rows(
        self, plan: SplitPlan, leaves: Sequence[Any], rows: Sequence[int], quiet: Quiet
    ) -> tuple[_Outputs, bool]:
        """Run the model on these rows of the mini-batch. Also whether it drew random numbers."""
        pairs = zip(leaves, plan.axes, strict=True)
        taken = [x if axis is None else x.index_select(axis, torch.tensor(rows, device=x.device)) for x, axis in pairs]
        whole, drew = self._run_model(unflatten(plan.structure, taken), quiet)
        result, structure = flatten(whole)
        axes = (
            [self._axes] * len(result)
            if isinstance(self._axes, int)
            else broadcast_prefix(self._axes, structure, "output")
        )
        return _Outputs(len(rows), dict(zip(structure_paths(structure, "output"), result, strict=True)), axes), drew


def run_quietly(recorder: ForwardRecorder, call: Any, quiet: Quiet) -> tuple[Any, bool]:
    """Run the model without gradients, with the modules `quiet` in eval mode. Returns the result, and whether it drew
    random numbers. Leaves the model and the generators unchanged."""
    modules = [] if quiet == "none" else list(recorder.model.modules())
    before = [(module, module.training) for module in modules if quiet == "all" or module not in recorder.open]
    sources = generators_of(recorder.devices)
    leaves, structure = flatten(call)
    isolated = undisturbed(recorder.model, recorder.devices)
    with torch.inference_mode(False), isolated, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as warnings about gradients, which this run does not compute
        drawn = get_states(sources)
        try:
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
    for mark in ("sum", *(each for each in marks if least <= each <= largest)):
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
    """The reductions that turn the numbers of two parts, each with its rows, into the number of the whole. None if all
    numbers are zero or not finite."""
    if not all(_is_number(number) for number, _ in parts):
        return set()
    (a, rows), (b, other_rows) = ((number.double().item(), rows) for number, rows in parts)
    both = whole.double().item()
    if not any(isfinite(each) and each for each in (a, b, both)):
        return None
    made: dict[Reduction, float] = {"mean": (a * rows + b * other_rows) / (rows + other_rows), "sum": a + b}
    scale = max(abs(a), abs(b), abs(both))
    return {reduction for reduction, number in made.items() if abs(both - number) <= tolerance * scale}
