"""The loss as one more stage, because it can have random numbers, modes and running statistics, as layers have.

    last segment    [ stage s ]──main──[ loss ]── one number
                                target──┘

It runs in the segment of the last stage, and is recomputed with it. If the losses of the micro-batches are means, the
loss of the mini-batch is their weighted mean. The weight is the denominator of each mean. That is the number of rows,
unless some targets count less than others (`LossWeights`).
"""

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from itertools import compress
from operator import add
from types import FunctionType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchweft.core.context import is_recomputing
from torchweft.core.errors import BACKWARD_TWICE, BackwardTwiceError, SpecError, UsageError, join_faults
from torchweft.core.pytree import flatten, map_leaves, structure_paths
from torchweft.core.rng import NextLayer
from torchweft.core.segment import Gradients, MicroBatchContext
from torchweft.core.validation import Validator, is_number
from torchweft.pipeline.microbatch import JoinedOutput, MiniBatch
from torchweft.pipeline.stage import CallArguments, ModuleScan, Stage

LossFunction = Callable[[Any, Any], Any]  # (output, target) of a micro-batch -> number, or (number, extras)
LossWeight = Callable[[Any], Any]  # target of a micro-batch -> the denominator of the mean

_UNCOUNTED = (
    "a mean over targets that do not all count is not the mean of the micro-batches' means by rows, and the "
    "denominator of this loss is not known; give Pipe loss_weight=, a function of the target that returns it, such as "
    "lambda target: (target != -100).sum(), or lambda target: len(target) if every row counts the same; or let the "
    "loss return a sum, and give loss_reduction='sum':"
)
_IGNORED = -100  # the default ignore_index of PyTorch's losses
_SCALES = (2.0**-24, 2.0**64)
_FAR = 256.0
_COUNTING = (nn.functional.cross_entropy, nn.functional.nll_loss)
_COUNTING_FORWARD = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)


class LossStage(Stage):
    """``function(output, target)`` of one micro-batch. If it is a module, its tensors can be on any device."""

    def __init__(self, index: int, function: LossFunction, device: torch.device, *, guessed: bool) -> None:
        layers = [("loss", function)] if isinstance(function, nn.Module) else []
        super().__init__(index, layers, device, (), ())
        self.function = function
        self._guessed = guessed
        self.reads_targets = False  # whether a step had to look for targets that do not count
        self._modes = WeakKeyDictionary[Any, _RejectUncounted]()  # by the random numbers of their step

    def of(self, context: MicroBatchContext, output: Any, target: Any) -> Any:
        mode: AbstractContextManager[Any] = nullcontext()
        if self._guessed and context.micro_batches > 1 and not is_recomputing():
            mode = self._modes.setdefault(context.random, _RejectUncounted(context.micro_batches))
        with mode:
            result: Tensor | tuple[Tensor, Any] = self.run(context, CallArguments((output, target), {}), {})[0]
        self.reads_targets |= isinstance(mode, _RejectUncounted) and mode.has_asked
        loss = result[0] if isinstance(result, tuple) else result
        mesh = getattr(loss, "device_mesh", None)  # only a DTensor has one
        if mesh is not None and loss.requires_grad:
            loss.register_hook(partial(_as_dtensor, mesh))
        return result

    def scan(self) -> ModuleScan:
        return super().scan()._replace(misplaced=[])

    def _layers(self, value: Any, next_layer: NextLayer) -> Any:
        if next_layer is not None:
            next_layer(-1)
        try:
            return checked_loss(self.function(*value.args))
        except BaseException as error:
            error.add_note("torchweft: in the loss function")
            raise


def _as_dtensor(mesh: Any, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of a loss that is a DTensor, as a DTensor. An early backward starts with a plain number."""
    if hasattr(gradient, "device_mesh"):
        return gradient
    from torch.distributed.tensor import DTensor, Replicate  # noqa: PLC0415 - slow to import, and rarely needed

    return DTensor.from_local(gradient, mesh, [Replicate()] * mesh.ndim, run_check=False)


class LossWeights:
    """The weights of the micro-batches' losses in the loss of the mini-batch. Without a function `given` by the user,
    those of a loss that is not PyTorch's are `guessed` to be the rows."""

    def __init__(self, function: Any, reduction: str, given: LossWeight | None) -> None:
        self._sum = reduction == "sum"
        self._given = given
        called = _bound(function)[0]
        kind = cast("type[Any]", type(called))
        counts = called in _COUNTING or getattr(kind, "forward", None) in _COUNTING_FORWARD
        self._counting = function if counts and own_reduction(function) == "mean" else None
        of_torch = (called if isinstance(called, FunctionType) else kind).__module__.startswith("torch.nn.")
        self.guessed = not (self._sum or given or counts or of_torch)

    def of(self, mini_batch: MiniBatch, target: Any) -> list[float]:
        """One weight per micro-batch, with sum one unless the losses are summed. Raises UsageError or SpecError."""
        if self._sum or mini_batch.micro_batches == 1:
            return [1.0] * mini_batch.micro_batches
        numbers: Sequence[float] = mini_batch.rows
        with torch.no_grad():
            if weigh := self._given or self._weighing(target):
                numbers = _numbers([weigh(parts[-1]) for parts in mini_batch.pieces()])
        total = sum(numbers)
        # If all are 0, every loss is a mean over nothing (NaN), and so is the mean of the losses.
        return [number / total if total else 1 / len(numbers) for number in numbers]

    def _weighing(self, target: Any) -> LossWeight | None:
        if self._counting is None:
            _reject_padding(target)
            return None
        if not isinstance(target, Tensor) or target.is_floating_point():
            return None  # class probabilities, of which every row counts
        loss, words = _bound(self._counting)
        weight = words.get("weight", getattr(loss, "weight", None))
        ignored = words.get("ignore_index", getattr(loss, "ignore_index", _IGNORED))
        # Reading a value from a GPU waits for it. So a GPU is not asked for `any` here, only once for the counts.
        if weight is None and not target.is_cuda and not _numbers_in([(target == ignored).any()])[0]:
            return None
        return partial(_counted, ignored, weight)


class LossScale:
    """The assumed loss gradient with which a schedule like 1F1B starts backward, before ``loss.backward()`` is called.
    It is a power of two near the scale that is `given`, or else near the last true loss gradient."""

    def __init__(self, given: Any, loss: Any) -> None:
        self._given = given
        # Half precision then overflows and underflows no more than in plain PyTorch with a GradScaler, and gradients
        # are rescaled without rounding.
        self._last = torch.ones((), dtype=torch.float64)  # moves to CUDA: reading it would wait
        self._compared = False
        if given is not None and loss is None:
            raise UsageError(f"loss_scale is {given!r}, but there is no loss; give the pipe one, or leave it out")
        if not callable(given):
            self.seed()

    def seed(self) -> Tensor:
        """The loss gradient with which the next step starts backward. Raises UsageError for an invalid scale."""
        if self._given is None:
            return self._last
        value = self._given() if callable(self._given) else self._given
        scale = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if not is_number(scale) or not 0 < scale < math.inf:
            raise UsageError(
                f"loss_scale is {scale!r}; give a finite number above 0, such as 65536.0, or a function that returns "
                "one, such as the get_scale of a GradScaler"
            )
        return _power_of_two(torch.tensor(scale, dtype=torch.float64), self._last)

    def factor(self, gradient: Tensor, seed: Tensor) -> Tensor | float:
        """The factor for gradients that were made with `seed`, now that the true `gradient` of the loss is known."""
        if hasattr(gradient, "full_tensor"):  # a DTensor, which cannot be multiplied with plain gradients
            gradient = cast(Tensor, cast(Any, gradient).full_tensor())
        true = gradient.detach().to(torch.float64)
        self._last = _power_of_two(true, self._last.to(true.device))
        factor = true / seed.to(true.device)
        # Once, because reading the factor from a GPU waits for it.
        if not self._compared:
            self._compared = True
            if abs(factor.item()) >= _FAR:
                warnings.warn(
                    f"backward started before the loss gradient was known. It assumed {seed.item():g}, but it is "
                    f"{true.item():g}. In half precision, gradients of this step may have underflowed. Later steps "
                    "assume the loss gradient of the step before. With a GradScaler, Pipe(loss_scale=scaler.get_scale) "
                    "is right from the first step",
                    stacklevel=2,
                )
        return factor if factor.is_cuda else factor.item()


class LossSeed:
    """An assumed gradient of the loss, and the gradients that a walk made from it before ``loss.backward()``."""

    def __init__(self, scale: LossScale, agreed: float | None) -> None:
        # Ranks agree on one number. Each of them would otherwise assume the loss gradient that it saw last.
        self.value = scale.seed() if agreed is None else torch.tensor(agreed, dtype=torch.float64)
        self._scale = scale
        self._gradients: Sequence[Tensor | None] | None = None

    def keep(self, gradients: Sequence[Tensor | None]) -> None:
        self._gradients = gradients

    def rescale(self, gradient: Tensor | None, *, retain: bool) -> list[Tensor | None]:
        gradients = self._gradients
        if gradients is None:
            raise BackwardTwiceError(BACKWARD_TWICE)
        if not retain:
            self._gradients = None
        if gradient is None:
            return [None] * len(gradients)
        factor = self._scale.factor(gradient, self.value)
        if isinstance(factor, Tensor):
            # On a GPU the factor is not read, because that would wait for the device.
            return [None if x is None else x * factor.to(x.device) for x in gradients]
        return [None if x is None else x * factor for x in gradients] if factor != 1 else list(gradients)


def _power_of_two(value: Tensor, otherwise: Tensor) -> Tensor:
    """The largest power of two up to the value, clamped. `otherwise` if the value is zero or not finite."""
    size = value.abs()
    power = size / torch.frexp(size).mantissa / 2  # both divisions are exact in binary floating point
    return torch.where(size.isfinite() & (size > 0), power.clamp(*_SCALES), otherwise)


def own_reduction(loss: Any) -> Any:
    called, words = _bound(loss)
    return words.get("reduction", getattr(called, "reduction", "mean"))


def _bound(loss: Any) -> tuple[Any, dict[str, Any]]:
    if isinstance(loss, partial):
        bound = cast("partial[Any]", loss)
        return bound.func, bound.keywords
    return loss, {}


def _counted(ignored: int, weight: Tensor | None, target: Tensor) -> Tensor:
    """The denominator of PyTorch's mean over these targets."""
    counts = target != ignored
    if weight is None:
        return counts.sum()
    of_targets = weight.detach().to(target.device, torch.float64)[target.clamp(0, len(weight) - 1)]
    return of_targets.where(counts, 0).sum()


def _numbers(values: Sequence[Any]) -> list[float]:
    numbers = _numbers_in(values)
    with Validator("loss_weight must return a finite number from 0 up, but returned", SpecError) as check:
        for index, number in enumerate(numbers):
            check.require(is_number(number) and 0 <= number < math.inf, f"micro-batch {index}: {number!r}")
    return [float(number) for number in numbers]


def _numbers_in(values: Sequence[Any]) -> list[Any]:
    # If all have one dtype and device, it is one transfer, because each transfer from a GPU waits for all its work.
    whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]
    ones = [x for x in whole if isinstance(x, Tensor) and x.numel() == 1]
    if len(ones) == len(whole) and len({(x.dtype, x.device) for x in ones}) == 1:
        return cast("list[Any]", torch.stack([x.reshape(()) for x in ones]).tolist())
    return [x.item() if isinstance(x, Tensor) and x.numel() == 1 else x for x in whole]


def _reject_padding(target: Any) -> None:
    leaves, structure = flatten(target)
    if not any(isinstance(leaf, Tensor) and not leaf.is_floating_point() for leaf in leaves):
        return
    several = sum(isinstance(leaf, Tensor) for leaf in leaves) > 1
    asked: dict[str, Tensor] = {}
    for name, leaf in zip(structure_paths(structure, "target"), leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.dim() and not (leaf.is_floating_point() or leaf.is_complex()):
            if leaf.dtype is not torch.bool:
                asked[f"{name} has entries that are {_IGNORED}, PyTorch's ignore_index"] = (leaf == _IGNORED).any()
            elif several:
                asked[f"{name} is a mask with entries that are False"] = leaf.logical_not().any()
    if faults := list(compress(asked, _numbers_in(list(asked.values())))):
        raise UsageError(join_faults(_UNCOUNTED, faults))


class _RejectUncounted(TorchFunctionMode):
    """Raises UsageError if a loss function of the user calls a PyTorch loss that is a mean over some of the targets."""

    def __init__(self, micro_batches: int) -> None:
        super().__init__()
        # The targets of all micro-batches are read together, because reading one waits for the GPU.
        self._left = micro_batches
        self._asked: list[tuple[str, Tensor]] = []
        self.has_asked = False

    def __exit__(self, kind: Any, *exception: Any) -> None:
        super().__exit__(kind, *exception)
        self._left -= kind is None
        if self._left <= 0:
            faults, flags = zip(*self._asked, strict=True) if self._asked else ((), ())
            self._asked.clear()
            if present := set(compress(faults, _numbers_in(flags))):
                raise UsageError(join_faults(_UNCOUNTED, sorted(present)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        words: dict[str, Any] = kwargs or {}
        target = args[1] if func in _COUNTING and len(args) > 1 else None
        if isinstance(target, Tensor) and not target.is_floating_point():
            name, ignored = func.__name__, words.get("ignore_index", _IGNORED)
            if words.get("weight") is not None and words.get("reduction", "mean") == "mean":
                raise UsageError(join_faults(_UNCOUNTED, [f"{name} has class weights"]))
            fault = f"{name} gets targets that are {ignored}, its ignore_index"
            self._asked.append((fault, (target == ignored).any()))
            self.has_asked = True
        return func(*args, **words)


class WeightedLoss(JoinedOutput):
    """The losses of the micro-batches as one weighted sum, or pairs (loss, extras) as one pair. Extras are joined as
    outputs are, except numbers: integers are added up, and other numbers are combined as the losses are."""

    _where = "the loss function's result"

    def __init__(
        self, weights: Sequence[float], given: Sequence[Tensor] = (), axis: int = 0, rows: Sequence[int] | None = None
    ) -> None:
        super().__init__(given, axis, rows, weights)

    def gather(self, results: Sequence[Any]) -> tuple[list[Tensor], list[bool]]:
        tensors, tracked = super().gather(results)
        return tensors, [*tracked[:1], *[False] * (len(tensors) - 1)]

    def scatter_gradients(self, gradients: Sequence[Tensor | None]) -> list[Gradients]:
        gradient = gradients[0]
        return [[gradient * weight if weight and gradient is not None else None] for weight in self.weights]

    def _number(self, leaf: int, column: Sequence[Any]) -> Any:
        if not all(x.dim() == 0 if isinstance(x, Tensor) else is_number(x) for x in column):
            return None
        if leaf and not any(
            x.is_floating_point() or x.is_complex() if isinstance(x, Tensor) else isinstance(x, float) for x in column
        ):
            # sum() turns a bool into a count.
            return reduce(add, [x.sum() if isinstance(x, Tensor) else x for x in column])
        # A loss with weight zero is left out, because the mean over no targets is NaN.
        weighted = [x * weight for x, weight in zip(column, self.weights, strict=True) if weight]
        return reduce(add, weighted) if leaf else torch.stack(weighted).sum(0)


def checked_loss(value: Any) -> Any:
    """The loss of one micro-batch, or the pair (loss, detached extras). Raises SpecError for any other result."""
    kind = type(value).__name__
    if isinstance(value, tuple) and len(cast("tuple[Any, ...]", value)) == 2:
        loss, extras = cast("tuple[Any, Any]", value)
        if not isinstance(loss, tuple):
            return checked_loss(loss), map_leaves(_detached, extras)
    if not isinstance(value, Tensor) or value.dim() != 0 or value.is_complex():
        is_tensor = isinstance(value, Tensor)
        seen = f"a {value.dtype} tensor of shape {tuple(value.shape)}" if is_tensor else kind
        raise SpecError(
            f"the loss function returned {seen}; it must return one real number, a tensor of shape (), or a pair "
            "(number, extras): the mean over the rows that it was given (or their sum, with loss_reduction='sum')"
        )
    return value


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
