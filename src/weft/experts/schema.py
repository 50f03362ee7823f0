"""Schemas of an expert's call: nested for the module, flat everywhere else.

    module(x, mask=m) -> {"y": y}             args_schema=(X,)  kwargs_schema={"mask": M}
                                              outputs_schema={"y": Y}
    flat inputs of a forward task             [x, m]
    flat inputs of a backward task            [x, m, gradient of y]

Everything behind the edge works on flat tensors whose axis 0 is the batch. `FlatSchema.check` is that edge: what
passes can be concatenated with whatever else passed, if the free axes agree (`FlatSchema.batch_key`). So a malformed
task is an error of its author alone. Schemas are hivemind's idea.
"""

import cmath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from weft.core.errors import SpecError, UsageError, listed
from weft.core.pytree import difference, flatten, map_leaves, structure_paths, unflatten
from weft.core.spec import TensorSpec
from weft.core.validation import Validator

_BRIEF = 80  # characters of a constant that an error shows


@dataclass(frozen=True)
class Column:
    """One flat tensor of a task. A gradient (``casts``) may have any floating or complex dtype; it is cast."""

    name: str
    spec: TensorSpec
    casts: bool = False

    def faults(self, tensor: Any) -> list[str]:
        """Every way in which what was sent is not what this column takes, in words; quick for the many without any."""
        if not isinstance(tensor, Tensor):
            return [f"{self.name} is of type {type(tensor).__name__}, wanted a tensor ({self.spec})"]
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
            kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else tensor.layout
            return [f"{self.name} is a {kind} tensor, wanted a dense (strided) one with values"]
        shape, seen, dtype, wanted = self.spec.shape, tensor.shape, tensor.dtype, self.spec.dtype
        casts = self.casts and (dtype.is_floating_point or (dtype.is_complex and wanted.is_complex))
        if (casts or dtype is wanted) and len(seen) == len(shape):
            for size, have in zip(shape, seen, strict=True):
                if size is not None and size != have:
                    break
            else:
                if self.spec.values is None:
                    return []
        spec = replace(self.spec, dtype=dtype if casts else wanted, requires_grad=tensor.requires_grad)
        faults = [f"{self.name} {fault}" for fault in spec.faults(tensor)]
        more = len(seen) - len(shape)  # rows in more than one axis, as those of sequences
        if more > 0 and tuple(seen[more + 1 :]) == shape[1:]:
            there, back = f"flatten(0, {more})", f"unflatten(0, {tuple(seen[: more + 1])})"
            faults.append(f"{self.name} would fit as {there}, and what comes back is brought to its form by {back}")
        return faults


class FlatSchema:
    """The flat tensors of one kind of task."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = tuple(columns)
        # Places and axes whose sizes may differ from task to task, but for the batch.
        shapes = [(i, axis, size) for i, c in enumerate(self.columns) for axis, size in enumerate(c.spec.shape)]
        self.free = [(i, axis) for i, axis, size in shapes if axis and size is None]

    def check(self, tensors: Sequence[Any], where: str) -> int:
        """The number of rows of all these tensors; 1 without any. Raises a ``SpecError`` that lists every mismatch."""
        if len(tensors) == len(self.columns):
            rows = [0 if c.faults(x) else x.shape[0] for c, x in zip(self.columns, tensors, strict=True)] or [1]
            if rows[0] and rows.count(rows[0]) == len(rows):
                return rows[0]
        raise SpecError(listed(f"{where} does not take these tensors:", self._faults(tensors)))

    def batch_key(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """What must be equal for two tasks to share a batch: the sizes of all free axes but the batch."""
        return tuple([tensors[i].shape[axis] for i, axis in self.free])

    def _faults(self, tensors: Sequence[Any]) -> list[str]:
        if len(tensors) != len(self.columns):
            names = ", ".join(column.name for column in self.columns)
            return [f"{len(tensors)} tensors were given, wanted {len(self.columns)}: {names}"]
        pairs = list(zip(self.columns, tensors, strict=True))
        faults = [fault for column, tensor in pairs for fault in column.faults(tensor)]
        rows = {c.name: t.shape[0] for c, t in pairs if isinstance(t, Tensor) and not t.is_nested and t.dim()}
        if len(set(rows.values())) > 1:
            sizes = ", ".join(f"{name} has {count}" for name, count in rows.items())
            faults.append(f"axis 0 is the batch and must have one size everywhere: {sizes}")
        elif 0 in rows.values():
            faults.append("axis 0 is the batch and has 0 rows, wanted at least 1")
        return faults


class NestedSchema:
    """A nested value whose tensors are described by specs; other leaves are constants that never travel."""

    def __init__(self, tree: Any, root: str, names: Sequence[str] = ()) -> None:
        self.tree, self.root = tree, root
        self.leaves, self.structure = flatten(tree)
        every = enumerate(zip(names or structure_paths(self.structure, root), self.leaves, strict=True))
        entries = [(place, name, leaf) for place, (name, leaf) in every]
        self.constants = [entry for entry in entries if not isinstance(entry[2], TensorSpec)]
        self._columns = [Column(name, leaf) for _, name, leaf in entries if isinstance(leaf, TensorSpec)]
        self.places = [place for place, _, leaf in entries if isinstance(leaf, TensorSpec)]
        self.names = [column.name for column in self._columns]
        self.specs = [column.spec for column in self._columns]
        self.sample_rows: int | None = None  # of the sample tensors that it was made of, if they had one number
        self._plain = root == "call" and self.structure == flatten((tuple(self.specs), {}))[1]
        self._single = isinstance(tree, TensorSpec)  # as the outputs of most modules

    def pack(self, tensors: Sequence[Any]) -> Any:
        """The flat tensors, nested, with the constants among them."""
        if self._plain:  # tensors by position alone, as in most calls; saves some microseconds of each
            return (tuple(tensors), {})
        if self._single:
            return tensors[0]
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return unflatten(self.structure, leaves)

    def columns(self, *, casts: bool = False, prefix: str = "") -> list[Column]:
        """One column per tensor; with ``casts``, where a gradient is read. That of an integer never is."""
        return [Column(f"{prefix}{c.name}", c.spec, casts and _differentiable(c.spec)) for c in self._columns]

    def constant_faults(self, leaves: Sequence[Any]) -> list[str]:
        """Which leaves of a value that is nested like this should be constants, but are others, in words."""
        return [
            f"{name} is {_brief(leaves[place])}, wanted {_brief(leaf)}: what is no tensor is a constant, the same in "
            "every call. Return it as a tensor with one row per sample, or not at all"
            for place, name, leaf in self.constants
            if not _same(leaf, leaves[place])
        ]

    def differences(self, other: "NestedSchema") -> list[str]:
        """In what another value is not like this one, but for the sizes of tensors: nesting, and constants."""
        fault = difference(self.structure, other.structure, self.root)
        return [fault] if fault else self.constant_faults(other.leaves) or other.constant_faults(self.leaves)

    def tensors(self, value: Any, rows: int) -> list[Tensor]:
        """The flat tensors of a value that the module returned. Raises ``SpecError`` that lists what does not fit."""
        if self._single and not self._columns[0].faults(value) and len(value) == rows:
            return [value]
        leaves, structure = flatten(value)
        with Validator("the module did not return what its outputs_schema says", SpecError) as check:
            fault = difference(self.structure, structure, self.root)
            check.add(*([fault] if fault else self.constant_faults(leaves)))
            found = [] if fault else [leaves[place] for place in self.places]
            for column, leaf in zip(self._columns, found, strict=not fault):
                faults = column.faults(leaf)
                if not faults and len(leaf) != rows:
                    faults = [f"{column.name} has {len(leaf)} rows for a batch of {rows}"]
                check.add(*faults)
        return found


def call_schema(name: str, args: Any, kwargs: Any) -> NestedSchema:
    """The schemas of a call as one nest ``(args, kwargs)``. Raises ``UsageError`` that lists all that is wrong.

    If no spec says ``requires_grad``, every tensor whose dtype can carry a gradient gets one; else only those that do.
    """
    if args is None and kwargs is None:
        raise UsageError(
            f"expert {name!r} has neither args_schema nor kwargs_schema: give a tuple (or dict) of TensorSpec, one for "
            "each argument that its module takes"
        )
    with Validator(f"the schemas of expert {name!r} cannot be used") as check:
        check.instance("args_schema", args, (list, tuple), "a tuple with one entry per argument", optional=True)
        check.instance("kwargs_schema", kwargs, Mapping, "a dict by the names of the arguments", optional=True)
    given = cast("tuple[Sequence[Any], Mapping[str, Any]]", (args or (), kwargs or {}))
    tree = _as_specs((tuple(given[0]), dict(given[1])))
    names = [*structure_paths(flatten(tree[0])[1], "args"), *structure_paths(flatten(tree[1])[1], "kwargs")]
    nest = NestedSchema(tree, "call", names)
    _check_batch_axis(f"the schemas of expert {name!r} cannot be used", nest)
    explicit = any(spec.requires_grad for spec in nest.specs)
    specs = [replace(s, requires_grad=_differentiable(s) and (s.requires_grad or not explicit)) for s in nest.specs]
    found = NestedSchema(nest.pack(specs), "call", names)
    samples = {len(leaf) for leaf in flatten(given)[0] if isinstance(leaf, Tensor)} - {0}
    found.sample_rows = samples.pop() if len(samples) == 1 else None
    return found


def check_ranges(name: str, call: NestedSchema, module: nn.Module, device: torch.device) -> None:
    """Raise ``UsageError`` for integers without a range where an expert looks up rows on a GPU: an index out of range
    fails an assertion on the device, after which no expert of the process can use it."""
    looks_up = any(isinstance(each, nn.Embedding | nn.EmbeddingBag) for each in module.modules())
    whole = [c for c in call.columns() if not _differentiable(c.spec) and c.spec.dtype is not torch.bool]
    free = [column.name for column in whole if column.spec.values is None]
    if device.type == "cuda" and looks_up and free:
        raise UsageError(
            f"expert {name!r} has embeddings on {device}, where one index out of range would end all experts of the "
            f"process; give the TensorSpec of {', '.join(free)} a range, such as values=range(1000) for 1000 rows"
        )


def output_schema(name: str, outputs: Any) -> NestedSchema:
    """A schema of outputs as a nest. Raises ``UsageError`` that lists all that is wrong."""
    nest = NestedSchema(_as_specs(outputs), "output")
    _check_batch_axis(f"the outputs_schema of expert {name!r} cannot be used", nest)
    return nest


def _check_batch_axis(title: str, nest: NestedSchema) -> None:
    """Raise ``UsageError`` that lists which specs have no free axis 0."""
    with Validator(title) as check:
        check.that(bool(nest.specs), "there is no tensor in them, wanted at least one TensorSpec")
        for name, spec in zip(nest.names, nest.specs, strict=True):
            valid = spec.shape[:1] == (None,)
            check.that(valid, f"{name} has shape {spec.shape}, wanted None as size of axis 0, the batch")


def _same(constant: Any, leaf: Any) -> bool:
    """Whether a leaf is the constant, also where that is NaN."""
    if leaf is constant:
        return True
    if type(leaf) is not type(constant) or isinstance(leaf, Tensor):
        return False
    if isinstance(constant, float | complex) and cmath.isnan(constant):
        return cmath.isnan(leaf)
    try:
        return bool(leaf == constant)
    except Exception:  # such as arrays, which compare by their elements
        return False


def _brief(leaf: Any) -> str:
    return "a tensor" if isinstance(leaf, Tensor | TensorSpec) else " ".join(repr(leaf).split())[:_BRIEF]


def _differentiable(spec: TensorSpec) -> bool:
    return spec.dtype.is_floating_point or spec.dtype.is_complex


def _as_specs(tree: Any, batch_axis: int | None = 0) -> Any:
    """The tree with specs in the place of tensors."""

    def as_spec(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_nested:
            raise SpecError("a nested tensor has no spec: give, or return, dense ones, padded and with their lengths")
        return TensorSpec.of(leaf, batch_axis) if isinstance(leaf, Tensor) else leaf

    return map_leaves(as_spec, tree)


_ROWS = 3  # of a dummy run: more than one, since batch norm in training refuses a single row
_SIZES = [(3, 3), (4, 16), (2, 64)]  # rows and all other free axes; the larger for modules that want even batches


def infer_outputs(
    name: str, call: NestedSchema, given: Any, device: torch.device, run: Callable[[list[Tensor]], Any]
) -> NestedSchema:
    """The schema of the outputs: ``run`` on zeros, compared with what the user gave if that is not None.

    An axis is free if it follows a free axis of the inputs. Raises ``SpecError``, and what the module raises.
    """
    rows, first, other = _dummy_outputs(name, call, device, run)
    with Validator(f"axis 0 of all outputs of expert {name!r} must be the batch", SpecError) as check:
        for path, spec in zip(first.names, first.specs, strict=True):
            check.that(spec.shape[:1] == (rows,), f"{path} has shape {spec.shape} for {rows} rows")
    with Validator(f"expert {name!r} must return the same for all sizes but in tensors", SpecError) as check:
        check.add(*first.differences(other))
    freed: list[TensorSpec] = []
    for spec, larger in zip(first.specs, other.specs, strict=True):  # with axis 0 free, and each in which they differ
        sizes = enumerate(zip(spec.shape, larger.shape, strict=True))
        shape = [size if axis and size == more else None for axis, (size, more) in sizes]
        freed.append(TensorSpec(tuple(shape), spec.dtype))
    found = output_schema(name, first.pack(freed))
    if given is None:
        return found
    schema = output_schema(name, given)
    try:
        schema.tensors(found.pack([spec.empty(_ROWS) for spec in found.specs]), _ROWS)
    except SpecError as error:
        raise SpecError(f"the outputs_schema of expert {name!r} is not what its module returns. {error}") from None
    return schema


def _dummy_outputs(
    name: str, call: NestedSchema, device: torch.device, run: Callable[[list[Tensor]], Any]
) -> tuple[int, NestedSchema, NestedSchema]:
    """Of the first sizes that the module takes: rows, outputs, and those of larger sizes; the same if none matter."""

    def outputs(rows: int, size: int) -> NestedSchema:
        specs = [replace(spec, shape=(rows, *spec.shape[1:])) for spec in call.specs]
        value = run([spec.empty(size, device).detach() for spec in specs])
        return NestedSchema(_as_specs(value, batch_axis=None), "output")

    sizes = list(_SIZES)
    if call.sample_rows is not None:
        sizes.insert(1, (call.sample_rows, 16))
    free = any(None in spec.shape[1:] for spec in call.specs)
    errors: list[Exception] = []
    for rows, size in sizes:
        try:
            first = outputs(rows, size)
            more = (rows + 2, size + 2) if size == _ROWS else (2 * rows, 2 * size)
            return rows, first, outputs(*more) if first.constants or free else first
        except Exception as error:
            errors.append(error)
    errors[0].add_note(
        f"in the dummy run of expert {name!r} on zeros with {_ROWS} rows, as its schemas say; nor did it run with "
        f"{' or '.join(str(rows) for rows, _ in sizes[1:])} rows, and larger sizes of its other free axes. Fix in the "
        "schemas what the module wants fixed, or give it as sample tensors with as many rows as it takes"
    )
    raise errors[0]
