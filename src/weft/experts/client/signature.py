"""Signature of a remote expert: checks a call before anything is sent, and an answer before it is used.

    expert(x, mask=m) ── nested as the schema says? ── flat [x, m] ── fits? ──> sent
    flat outputs ── fit? ──> nested as the module returns them, on the device of the inputs

Values may be nested in other containers of the same names (a list for a tuple, a named tuple of one's own).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import SpecError, listed
from weft.core.pytree import difference, flatten, structure_paths
from weft.core.spec import TensorSpec
from weft.experts.errors import MalformedError
from weft.experts.schema import FlatSchema, NestedSchema, call_schema, gradient_columns, output_schema
from weft.experts.wire import Received
from weft.experts.wire.service import Description


class Signature:
    """Of one expert, from its description."""

    def __init__(self, description: Description) -> None:
        self.name = description.name
        self.trained = description.trained
        self.max_batch_size = description.max_batch_size
        self.inputs: NestedSchema = call_schema(description.name, description.args, description.kwargs)
        self.outputs: NestedSchema = output_schema(description.name, description.outputs)
        self.tracked = [spec.dtype.is_floating_point or spec.dtype.is_complex for spec in self.outputs.specs]
        self._columns = FlatSchema(self.inputs.columns())
        self._answers = FlatSchema(self.outputs.columns())
        self._gradients = FlatSchema(gradient_columns(self.outputs))
        self._paths = structure_paths(self.inputs.structure, "call")
        self._plain = self._paths == [f"call[0][{place}]" for place in range(len(self.inputs.specs))]
        self._constants = [
            (place, leaf) for place, leaf in enumerate(flatten(self.inputs.tree)[0]) if not isinstance(leaf, TensorSpec)
        ]

    def flat(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call, in order. Raises one ``SpecError`` that lists all that does not fit.

        Under autocast, floating point tensors are cast to the dtypes of the schema, as autocast does for layers.
        """
        where = f"expert {self.name!r}"
        tensors = self._tensors(args, kwargs, where)
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            tensors = [_cast(leaf, spec) for leaf, spec in zip(tensors, self.inputs.specs, strict=True)]
        self._columns.check(tensors, where)
        return tensors

    def _tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> list[Any]:
        """The leaves where tensors are wanted. Raises ``SpecError`` if the call is nested otherwise."""
        if self._plain and not kwargs and len(args) == len(self.inputs.specs) and all(type(x) is Tensor for x in args):
            return list(args)  # the common case, and on the path of every call
        named = {name: kwargs[name] for name in self.inputs.tree[1] if name in kwargs}
        rest = {name: value for name, value in kwargs.items() if name not in named}
        leaves, structure = flatten((tuple(args), {**named, **rest}))
        if structure != self.inputs.structure and structure_paths(structure, "call") != self._paths:
            fault = difference(self.inputs.structure, structure, "the call (args, kwargs)")
            raise SpecError(f"{where} was called with other arguments: {fault}")
        wrong = [(place, leaf) for place, leaf in self._constants if not _same(leaf, leaves[place])]
        if wrong:
            faults = [f"{self._paths[place]} is {leaves[place]!r}, wanted {leaf!r}" for place, leaf in wrong]
            raise SpecError(listed(f"{where} takes only these constants:", faults))
        return [leaves[place] for place in self.inputs.places]

    def results(self, answer: Received, device: torch.device) -> list[Tensor]:
        """The flat outputs. Raises ``MalformedError`` if they are not what the expert said it returns."""
        return self._checked(answer, self._answers, device)

    def input_gradients(self, answer: Received, inputs: Sequence[Tensor]) -> list[Tensor]:
        """One gradient per flat input, like it in shape, dtype and device. Raises as `results`."""
        found = self._checked(answer, self._columns, torch.device("cpu"))
        if any(gradient.shape != tensor.shape for gradient, tensor in zip(found, inputs, strict=True)):
            raise MalformedError(f"expert {self.name!r} returned gradients of other shapes", reason="shape")
        return [g.to(device=x.device, dtype=x.dtype) for g, x in zip(found, inputs, strict=True)]

    def nested(self, outputs: Sequence[Tensor]) -> Any:
        """The outputs as the module returns them."""
        return self.outputs.pack(outputs)

    def _checked(self, answer: Received, columns: FlatSchema, device: torch.device) -> list[Tensor]:
        tensors = answer.tensors()
        try:
            columns.check(tensors, f"the answer of expert {self.name!r}")
        except SpecError as error:
            raise MalformedError(str(error), reason="answer") from None
        return tensors if device.type == "cpu" else [tensor.to(device) for tensor in tensors]


def _cast(leaf: Any, spec: TensorSpec) -> Any:
    if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point and spec.dtype.is_floating_point:
        return leaf.to(spec.dtype)
    return leaf


def _same(wanted: Any, seen: Any) -> bool:
    return type(seen) is type(wanted) and seen == wanted
