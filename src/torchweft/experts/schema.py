"""Schemas of an expert's call: nested for the module, flat everywhere else.

    module(x, mask=m) -> {"y": y}             args_schema=(X,)  kwargs_schema={"mask": M}
                                              outputs_schema={"y": Y}
    flat inputs of a forward task             [x, m]
    flat inputs of a backward task            [x, m, gradient of y]

Everything inside works on flat tensors with the batch as axis 0. `FlatSchema.check` is the edge: tensors that pass can
be concatenated with all others that passed, if the free axes agree. Checking later, when the batch is joined, would let
one malformed task fail all of them. Schemas are hivemind's idea.
"""

import cmath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchweft.core.errors import SpecError, UsageError, join_faults
from torchweft.core.pytree import difference, flatten, map_leaves, structure_paths, unflatten
from torchweft.core.spec import TensorSpec
from torchweft.core.validation import Validator

_REPR_LENGTH = 80  # characters of a constant that an error shows


@dataclass(frozen=True)
class Column:
    """One flat tensor of a task. A gradient (``casts``) can have any floating or complex dtype, and is cast."""

    name: str
    spec: TensorSpec
    casts: bool = False

    def faults(self, tensor: Any) -> list[str]:
        if not isinstance(tensor, Tensor):
            return [f"{self.name} is of type {type(tensor).__name__}, wanted a tensor ({self.spec})"]
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
            kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else tensor.layout
            return [f"{self.name} is a {kind} tensor, wanted a dense (strided) one with values"]
        shape, seen, dtype, spec_dtype = self.spec.shape, tensor.shape, tensor.dtype, self.spec.dtype
        casts = self.casts and (dtype.is_floating_point or (dtype.is_complex and spec_dtype.is_complex))
        # The fast path, without a copy of the spec, for the many tensors without a fault.
        if (casts or dtype is spec_dtype) and len(seen) == len(shape):
            for size, seen_size in zip(shape, seen, strict=True):
                if size is not None and size != seen_size:
                    break
            else:
                if self.spec.values is None and not self.spec.most:
                    return []
        spec = replace(self.spec, dtype=dtype if casts else spec_dtype, requires_grad=tensor.requires_grad)
        faults = [f"{self.name} {fault}" for fault in spec.faults(tensor)]
        more = len(seen) - len(shape)  # rows in more than one axis, like those of sequences
        if more > 0 and tuple(seen[more + 1 :]) == shape[1:]:
            there, back = f"flatten(0, {more})", f"unflatten(0, {tuple(seen[: more + 1])})"
            faults.append(f"{self.name} would fit as {there}, and the results get their form back by {back}")
        return faults


class FlatSchema:
    """The flat tensors of one kind of task."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = tuple(columns)
        # Columns and axes, except the batch, with sizes that can differ from task to task.
        shapes = [(i, axis, size) for i, c in enumerate(self.columns) for axis, size in enumerate(c.spec.shape)]
        self.free = [(i, axis) for i, axis, size in shapes if axis and size is None]

    def check(self, tensors: Sequence[Any], where: str) -> int:
        # All faults are collected only after a first pass has failed, because nearly all tasks are valid.
        if len(tensors) == len(self.columns):
            rows = [0 if c.faults(x) else x.shape[0] for c, x in zip(self.columns, tensors, strict=True)] or [1]
            if rows[0] and rows.count(rows[0]) == len(rows):
                return rows[0]
        raise SpecError(join_faults(f"{where} does not take these tensors:", self._list_faults(tensors)))

    def batch_key(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        return tuple([tensors[i].shape[axis] for i, axis in self.free])

    def _list_faults(self, tensors: Sequence[Any]) -> list[str]:
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
    """A nested value with specs in place of tensors. Other leaves are constants, which are never sent."""

    # ``sample_rows``: the rows of the sample tensors that it was made of, if all had the same number.
    def __init__(self, tree: Any, root: str, names: Sequence[str] = (), sample_rows: int | None = None) -> None:
        self.tree, self.root = tree, root
        self.leaves, self.structure = flatten(tree)
        named = enumerate(zip(names or structure_paths(self.structure, root), self.leaves, strict=True))
        entries = [(place, name, leaf) for place, (name, leaf) in named]
        self.constants = [entry for entry in entries if not isinstance(entry[2], TensorSpec)]
        self._columns = [Column(name, leaf) for _, name, leaf in entries if isinstance(leaf, TensorSpec)]
        self.places = [place for place, _, leaf in entries if isinstance(leaf, TensorSpec)]
        self.names = [column.name for column in self._columns]
        self.specs = [column.spec for column in self._columns]
        self.sample_rows = sample_rows
        self._positional = root == "call" and self.structure == flatten((tuple(self.specs), {}))[1]
        self._single = isinstance(tree, TensorSpec)  # like the outputs of most modules

    def pack(self, tensors: Sequence[Any]) -> Any:
        if self._positional:  # like most calls; saves some microseconds of each
            return (tuple(tensors), {})
        if self._single:
            return tensors[0]
        # A copy of the leaves: the constants stay, and the tensors take the places of their specs.
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return unflatten(self.structure, leaves)

    def columns(self, *, casts: bool = False, prefix: str = "") -> list[Column]:
        """One column per tensor. With ``casts``: for its gradient, which for an integer is never read, nor cast."""
        return [Column(f"{prefix}{c.name}", c.spec, casts and _can_have_gradient(c.spec)) for c in self._columns]

    def constant_faults(self, leaves: Sequence[Any]) -> list[str]:
        return [
            f"{name} is {_short_repr(leaves[place])}, wanted {_short_repr(leaf)}: a leaf that is not a tensor must be "
            "the same in every call. Return it as a tensor with one row per sample, or not at all"
            for place, name, leaf in self.constants
            if not _equals_constant(leaf, leaves[place])
        ]

    def differences(self, other: "NestedSchema") -> list[str]:
        """Differences to another value in nesting and constants, but not in sizes of tensors."""
        fault = difference(self.structure, other.structure, self.root)
        return [fault] if fault else self.constant_faults(other.leaves) or other.constant_faults(self.leaves)

    def flatten_outputs(self, value: Any, rows: int) -> list[Tensor]:
        """The flat tensors of a value that the module returned. Raises ``SpecError`` that lists every mismatch."""
        # The common case, without flattening.
        if self._single and not self._columns[0].faults(value) and len(value) == rows:
            return [value]
        leaves, structure = flatten(value)
        with Validator("the outputs of the module do not match its outputs_schema", SpecError) as check:
            fault = difference(self.structure, structure, self.root)
            check.add(*([fault] if fault else self.constant_faults(leaves)))
            tensors = [] if fault else [leaves[place] for place in self.places]
            for column, leaf in zip(self._columns, tensors, strict=not fault):
                faults = column.faults(leaf)
                if not faults and len(leaf) != rows:
                    faults = [f"{column.name} has {len(leaf)} rows for a batch of {rows}"]
                check.add(*faults)
        return tensors


def call_schema(name: str, args: Any, kwargs: Any) -> NestedSchema:
    """The schemas of a call as one nest ``(args, kwargs)``. Raises ``UsageError`` that lists every fault."""
    if args is None and kwargs is None:
        raise UsageError(
            f"expert {name!r} has neither args_schema nor kwargs_schema: give a tuple (or dict) of TensorSpec, one for "
            "each argument of its module"
        )
    with Validator(f"the schemas of expert {name!r} cannot be used") as check:
        check.instance("args_schema", args, (list, tuple), "a tuple with one entry per argument", optional=True)
        check.instance("kwargs_schema", kwargs, Mapping, "a dict by the names of the arguments", optional=True)
    samples = cast("tuple[Sequence[Any], Mapping[str, Any]]", (args or (), kwargs or {}))
    tree = _as_specs((tuple(samples[0]), dict(samples[1])))
    names = [*structure_paths(flatten(tree[0])[1], "args"), *structure_paths(flatten(tree[1])[1], "kwargs")]
    nest = NestedSchema(tree, "call", names)
    _check_batch_axis(f"the schemas of expert {name!r} cannot be used", nest)
    # If no spec says ``requires_grad``, every tensor that can have a gradient gets one.
    explicit = any(spec.requires_grad for spec in nest.specs)
    specs = [replace(s, requires_grad=_can_have_gradient(s) and (s.requires_grad or not explicit)) for s in nest.specs]
    rows = {len(leaf) for leaf in flatten(samples)[0] if isinstance(leaf, Tensor)} - {0}
    return NestedSchema(nest.pack(specs), "call", names, rows.pop() if len(rows) == 1 else None)


def check_ranges(name: str, call: NestedSchema, module: nn.Module, device: torch.device) -> None:
    """Raise ``UsageError`` for integers without a range if an expert has embeddings on a GPU."""
    # An index out of range fails an assertion on the device, after which no expert of the process can use it.
    looks_up = any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in module.modules())
    integers = [c for c in call.columns() if not _can_have_gradient(c.spec) and c.spec.dtype is not torch.bool]
    free = [column.name for column in integers if column.spec.values is None]
    if device.type == "cuda" and looks_up and free:
        raise UsageError(
            f"expert {name!r} has embeddings on {device}, where one index out of range would end all experts of the "
            f"process; give the TensorSpec of {', '.join(free)} a range, such as values=range(1000) for 1000 rows"
        )


def output_schema(name: str, outputs: Any) -> NestedSchema:
    nest = NestedSchema(_as_specs(outputs), "output")
    _check_batch_axis(f"the outputs_schema of expert {name!r} cannot be used", nest)
    return nest


def _check_batch_axis(title: str, nest: NestedSchema) -> None:
    with Validator(title) as check:
        check.require(bool(nest.specs), "they hold no tensor, wanted at least one TensorSpec")
        for name, spec in zip(nest.names, nest.specs, strict=True):
            valid = spec.shape[:1] == (None,)
            check.require(valid, f"{name} has shape {spec.shape}, wanted None as size of axis 0, the batch")


def _equals_constant(constant: Any, leaf: Any) -> bool:
    """Whether a leaf equals the constant. NaN equals NaN here."""
    if leaf is constant:
        return True
    if type(leaf) is not type(constant) or isinstance(leaf, Tensor):
        return False
    if isinstance(constant, float | complex) and cmath.isnan(constant):
        return cmath.isnan(leaf)
    try:
        return bool(leaf == constant)
    except Exception:  # for example of arrays, which compare element by element
        return False


def _short_repr(leaf: Any) -> str:
    return "a tensor" if isinstance(leaf, Tensor | TensorSpec) else " ".join(repr(leaf).split())[:_REPR_LENGTH]


def _can_have_gradient(spec: TensorSpec) -> bool:
    return spec.dtype.is_floating_point or spec.dtype.is_complex


def _as_specs(tree: Any, batch_axis: int | None = 0) -> Any:
    def as_spec(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_nested:
            raise SpecError("a nested tensor has no spec: use dense tensors, padded, and a tensor of their lengths")
        return TensorSpec.of(leaf, batch_axis) if isinstance(leaf, Tensor) else leaf

    return map_leaves(as_spec, tree)


_ROWS = 3  # of a dummy run: more than one, because batch norm in training mode rejects a single row
_SIZES = [(3, 3), (4, 16), (2, 64)]  # rows and all other free axes; even ones for modules that need even batches


def infer_outputs(
    name: str, call: NestedSchema, outputs_schema: Any, device: torch.device, run: Callable[[list[Tensor]], Any]
) -> NestedSchema:
    """The schema of the outputs: ``run`` on zeros, compared with the user's ``outputs_schema`` unless that is None."""
    # An axis is free if it follows a free axis of the inputs.
    rows, first, other = _dummy_outputs(name, call, device, run)
    with Validator(f"axis 0 of all outputs of expert {name!r} must be the batch", SpecError) as check:
        for path, spec in zip(first.names, first.specs, strict=True):
            check.require(spec.shape[:1] == (rows,), f"{path} has shape {spec.shape} for {rows} rows")
    with Validator(f"expert {name!r} must return the same for all sizes but in tensors", SpecError) as check:
        check.add(*first.differences(other))
    freed: list[TensorSpec] = []
    for spec, larger in zip(first.specs, other.specs, strict=True):
        sizes = enumerate(zip(spec.shape, larger.shape, strict=True))
        # Free are the batch, and all axes that differ between the two dummy runs.
        shape = [size if axis and size == more else None for axis, (size, more) in sizes]
        freed.append(TensorSpec(tuple(shape), spec.dtype))
    inferred = output_schema(name, first.pack(freed))
    if outputs_schema is None:
        return inferred
    schema = output_schema(name, outputs_schema)
    try:
        schema.flatten_outputs(inferred.pack([spec.empty(_ROWS) for spec in inferred.specs]), _ROWS)
    except SpecError as error:
        raise SpecError(f"the outputs_schema of expert {name!r} does not match its module. {error}") from None
    return schema


def _dummy_outputs(
    name: str, call: NestedSchema, device: torch.device, run: Callable[[list[Tensor]], Any]
) -> tuple[int, NestedSchema, NestedSchema]:
    """Rows, outputs, and the outputs for larger sizes. The sizes are the first that the module accepts."""

    def run_with(rows: int, size: int) -> NestedSchema:
        specs = [replace(spec, shape=(rows, *spec.shape[1:])) for spec in call.specs]
        value = run([spec.empty(size, device).detach() for spec in specs])
        return NestedSchema(_as_specs(value, batch_axis=None), "output")

    sizes = list(_SIZES)
    if call.sample_rows is not None:
        sizes.insert(1, (call.sample_rows, 16))
    free = any(None in spec.shape[1:] for spec in call.specs)
    # The error of the smallest sizes is reported, because the schemas allow them.
    errors: list[Exception] = []
    for rows, size in sizes:
        try:
            first = run_with(rows, size)
            # The second run shows which axes and constants depend on sizes. Even sizes stay even.
            more = (rows + 2, size + 2) if size == _ROWS else (2 * rows, 2 * size)
            return rows, first, run_with(*more) if first.constants or free else first
        except Exception as error:
            errors.append(error)
    errors[0].add_note(
        f"in the dummy run of expert {name!r} on zeros with {_ROWS} rows, as its schemas say; nor did it run with "
        f"{' or '.join(str(rows) for rows, _ in sizes[1:])} rows, and larger sizes of its other free axes. If the "
        "module needs fixed sizes, fix them in the schemas, or give sample tensors with as many rows as it accepts"
    )
    raise errors[0]
