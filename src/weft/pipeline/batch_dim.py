"""The axis that holds the rows: where a Pipe cuts its arguments and joins its outputs, and who disagrees with it.

A recurrent network or an attention without ``batch_first=True`` has time on axis 0. Cut there, it would compute
something else without any error, so a Pipe with such a module is refused unless it was told about axes.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from weft.core.errors import UsageError, listed
from weft.core.tree import nested_flatten
from weft.core.validation import is_whole

BatchDim = int | tuple[Any, ...] | dict[int | str, Any]
OutputBatchDim = int | tuple[Any, ...] | list[Any] | dict[Any, Any]
Layers = Sequence[tuple[str, nn.Module]]

_ON_AXIS_0 = (_ConvNd, _NormBase, nn.GroupNorm)
_KEEP_AXES = (nn.Linear, nn.Embedding, nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.Dropout)


class BatchDims:
    """The batch axis of every argument and of every output.

    Args:
        arguments: an int for all of them and for the target; or a tuple with one entry per positional argument; or a
            dict by position and by keyword (``"target"`` is one). An entry is an int, ``None`` for what goes whole to
            every micro-batch, or nested as the argument is. ``None``: axis 0.
        outputs: an int, or nested as the output is. ``None``: as `arguments`, if that is an int.

    Raises UsageError that lists every entry which is no axis.
    """

    def __init__(self, arguments: Any, outputs: Any) -> None:
        self._whole: int | None = (arguments or 0) if arguments is None or is_whole(arguments) else None
        self._by_name: dict[Any, Any] = {}
        faults: list[str] = []
        if isinstance(arguments, dict):
            self._by_name = dict(cast("dict[Any, Any]", arguments))
        elif isinstance(arguments, list | tuple):
            self._by_name = dict(enumerate(cast("Sequence[Any]", arguments)))
        elif self._whole is None:
            faults.append(f"batch_dim is {arguments!r}, wanted an int, a tuple, or a dict by position and keyword")
        faults += _faults("batch_dim", self._by_name or self._whole, none=True)
        self.outputs: Any = self._whole if outputs is None else outputs
        self.outputs_assumed = outputs is None
        if self.outputs is None:
            faults.append("output_batch_dim is missing; batch_dim is nested, so it does not tell that of the output")
        else:
            faults += _faults("output_batch_dim", self.outputs, none=False)
        if faults:
            raise UsageError(listed("these axes make no sense; each is counted from the front:", faults))

    @property
    def first(self) -> Any:
        """The axis of the first positional argument, or those of what is nested in it."""
        return self._by_name.get(0) if self._whole is None else self._whole

    @property
    def extras(self) -> int:
        """The axis of what a loss returns beside its number."""
        return self.outputs if isinstance(self.outputs, int) else 0

    def of_call(self, positional: int, keywords: Collection[str], *, target: bool) -> Any:
        """The axes of a call, nested as its mini-batch (with the target) is. Raises UsageError for what is missing."""
        if self._whole is not None:
            return self._whole
        names: list[int | str] = [*range(positional), *keywords, *(["target"] if target else [])]
        if missing := [name for name in names if name not in self._by_name]:
            raise UsageError(
                listed(
                    "batch_dim says nothing of these arguments; name them all, as in {0: 1, 'mask': 0, 'target': 1}:",
                    [f"argument {name!r}" for name in missing],
                )
            )
        found = [self._by_name[name] for name in names]
        arguments = (tuple(found[:positional]), {name: self._by_name[name] for name in keywords})
        main = found[0] if positional == 1 and not keywords else arguments
        return (main, found[-1]) if target else main


def _faults(name: str, value: Any, *, none: bool) -> list[str]:
    return [
        f"{name} has {each!r}, wanted an int from 0 up"
        for each in nested_flatten(value)
        if not ((is_whole(each) and each >= 0) or (each is None and none))
    ]


def check_batch_dims(layers: Layers, arguments: Any, dims: BatchDims) -> None:
    """Raise UsageError that names each module whose batch is known to be on another axis.

    Where nothing was said of axes, that is every module anywhere in the layers with its batch not on axis 0: what is
    around it may swap axes, but nobody can see it. Where it was said, only those that the arguments reach, or that
    the output comes from, through nothing but layers which are known to leave axes as they are. A last layer that
    returns states with their batch on another axis than its output must have them said.
    """
    flat = [each for name, layer in layers for each in _opened(name, layer)]
    if arguments is None and (found := [each for name, layer in layers for each in _anywhere(name, layer)]):
        headline = (
            "these modules have their batch on axis 1, and a Pipe cuts along axis 0 where nothing is said; make "
            "them with batch_first=True, or give Pipe batch_dim=1 if the rows of the model's input are there, or "
            "batch_dim=0 if its layers swap axes before and after these:"
        )
        raise UsageError(listed(headline, found))
    faults: list[str] = []
    for value, ordered, words in (
        (dims.first, flat, "gets the input, cut along"),
        (dims.outputs, flat[::-1], "makes the output, joined along"),
    ):
        if is_whole(value):
            faults += [f"{fault}, but it {words} axis {value}" for fault in _reached(ordered, value)]
    if faults:
        headline = (
            "these modules have their batch on another axis than batch_dim or output_batch_dim says; change one of "
            "them, or if a module beside them swaps axes, put both into one module:"
        )
        raise UsageError(listed(headline, list(dict.fromkeys(faults))))
    if dims.outputs_assumed and flat and (axes := _several_axes(flat[-1][1])):
        name, layer = flat[-1]
        raise UsageError(
            f"{name} ({type(layer).__name__}), the last layer, returns tensors with their batch on different axes; say "
            f"which, as in output_batch_dim={axes}, or let a layer after it return what is wanted"
        )


def _batch_axis(module: nn.Module) -> int | None:
    """The axis of the module's input and output that holds the rows, if it is known."""
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder) and len(module.layers):
        return _batch_axis(module.layers[0])
    first = getattr(module, "batch_first", getattr(getattr(module, "self_attn", None), "batch_first", None))
    if isinstance(first, bool):
        return 0 if first else 1
    return 0 if isinstance(module, _ON_AXIS_0) else None


def _several_axes(module: nn.Module) -> str | None:
    """The axes of what the module returns, where they are known to differ, such as those of outputs and states."""
    axis = _batch_axis(module)
    if isinstance(module, nn.RNNBase):
        return "(0, 1)" if axis == 0 else None
    if isinstance(module, nn.MultiheadAttention):
        return "(1, 0)" if axis == 1 else None
    return "(1, 0, 1)" if axis == 1 and type(module).__module__.startswith("weft.recurrent.") else None


def _anywhere(name: str, module: nn.Module) -> Iterator[str]:
    """In words, the outermost modules with their batch on axis 1."""
    axis = _batch_axis(module)
    if axis == 1:
        yield _words(name, module, axis)
    elif axis is None:
        for child, each in module.named_children():
            yield from _anywhere(f"{name}.{child}", each)


def _opened(name: str, layer: nn.Module) -> Layers:
    if type(layer) is not nn.Sequential:
        return [(name, layer)]
    return [each for child, inner in layer.named_children() for each in _opened(f"{name}.{child}", inner)]


def _reached(layers: Layers, axis: int) -> Iterator[str]:
    """In words, the modules with their batch on another axis, as far as axes are known to be left as they are."""
    for name, layer in layers:
        own = _batch_axis(layer)
        if own not in (None, axis):
            yield _words(name, layer, own)
        if own is None and type(layer) not in _KEEP_AXES and type(layer).__module__ != "torch.nn.modules.activation":
            return


def _words(name: str, module: nn.Module, axis: int | None) -> str:
    return f"{name} ({type(module).__name__}) has its batch on axis {axis}"
