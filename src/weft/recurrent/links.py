"""Links: which output of a step net feeds which state, by name.

    step({"x": x_t}, {"h": ..., "past": ...})  ->  {"hidden": ..., "score": ...}

    links = {"h": "hidden",                    the state h of step t+1 is the output hidden of step t
             "past": Window("hidden", 3)}      past holds the outputs hidden of steps t-2, t-1, t, stacked

    not every output is a state ("score"), and one output may feed several states.

A window is k x N x ..., oldest first; the user's initial state has the same k values, and so has `last`. Inside
the loop it is a tuple of k tensors, so that a step drops one and adds one without copying, and every one of them
has rows like any other state.

Links with offsets, and windows over a state, are Caffe2's (`recurrent_net`, `link_window`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from weft.core.errors import SpecError, listed
from weft.core.pytree import flatten, map_leaves, structure_paths, unflatten
from weft.core.validation import Validator
from weft.recurrent.cell import Cell


@dataclass(frozen=True)
class Window:
    """A link to the last ``k`` values of the output ``name``.

    Example:
        >>> def step(inputs, states):  # the sum of an input and of the last two outputs
        ...     return {"y": inputs["x"] + states["past"].sum(0)}
        >>> start = {"past": torch.zeros(2, 1, 1)}
        >>> result = weft.recurrent_net(step, {"x": torch.ones(4, 1, 1)}, start, {"past": weft.Window("y", 2)})
        >>> result.outputs["y"].flatten()
        tensor([1., 2., 4., 7.])
    """

    name: str
    k: int


Links = Mapping[str, str | Window]


def check_links(check: Validator, links: object) -> None:
    """Validate links by themselves."""
    if not isinstance(links, Mapping):
        check.add(f"links is of type {type(links).__name__}, wanted a dict: for every state the output that feeds it")
        return
    for state, link in cast("Mapping[object, object]", links).items():
        if isinstance(link, Window):
            check.that(link.k >= 1, f"links[{state!r}] is a window over {link.k} steps, wanted at least 1")
        elif not isinstance(link, str):
            kind = type(link).__name__
            check.add(f"links[{state!r}] is of type {kind}, wanted the name of an output, or a Window over it")


class Linked(Cell):
    """A step net over named values, with its links and what else it reads, as a cell."""

    def __init__(
        self,
        step: Callable[..., Any],
        links: Links,
        *,
        references: Mapping[str, Any] | None = None,
        time_step: bool = False,
    ) -> None:
        super().__init__(step, time_step=time_step)
        self.links = links
        self.references = references
        self.form = (type(self), time_step, *links.items())

    def __call__(self, x: Any, state: Any, t: int | Tensor) -> Any:
        extra = () if self.references is None else (self.references,)
        seen = self.leave(state)
        outputs = self.function(x, seen, *extra, t) if self.time_step else self.function(x, seen, *extra)
        self._check(outputs, t)
        return dict(outputs), {name: self._next(name, state[name], outputs) for name in self.links}

    def bound(self, references: Mapping[str, Any]) -> "Linked":
        """The same step net with other references."""
        return Linked(self.function, self.links, references=references, time_step=self.time_step)

    def enter(self, state: Any, check: Validator) -> Any:
        """States by name, windows as tuples, in the order of the links."""
        if not isinstance(state, Mapping):
            check.mismatch(f"state is of type {type(state).__name__}, wanted a dict with keys {list(self.links)}")
            return state
        named = cast("Mapping[str, Any]", state)
        missing = [name for name in self.links if name not in named]
        check.mismatch(*(f"state[{name!r}] is missing: links have that state" for name in missing))
        check.mismatch(
            *(
                f"state[{name!r}] is too much: links say not which output feeds it"
                for name in named
                if name not in self.links
            )
        )
        return {name: self._split(name, named[name], check) for name in self.links if name in named}

    def leave(self, state: Any, axis: int = 0) -> Any:
        """Windows stacked along ``axis``."""

        def stacked(*values: Tensor) -> Tensor:
            return torch.stack(values, axis)

        return {
            name: map_leaves(stacked, *value) if isinstance(self.links[name], Window) else value
            for name, value in state.items()
        }

    def _split(self, name: str, value: Any, check: Validator) -> Any:
        link = self.links[name]
        if not isinstance(link, Window):
            return value
        leaves, structure = flatten(value)
        wrong = [
            f"{path} has shape {tuple(leaf.shape)}, wanted {link.k} values first: it is a window over {link.k} steps"
            if isinstance(leaf, Tensor)
            else f"{path} is of type {type(leaf).__name__}, wanted a tensor of {link.k} values"
            for path, leaf in zip(structure_paths(structure, f"state[{name!r}]"), leaves, strict=True)
            if not isinstance(leaf, Tensor) or leaf.shape[:1] != (link.k,)
        ]
        check.mismatch(*wrong)
        if wrong:
            return value
        return tuple(unflatten(structure, [leaf[i] for leaf in leaves]) for i in range(link.k))

    def _next(self, name: str, old: Any, outputs: Mapping[str, Any]) -> Any:
        link = self.links[name]
        return (*old[1:], outputs[link.name]) if isinstance(link, Window) else outputs[link]

    def _check(self, outputs: Any, t: int | Tensor) -> None:
        if not isinstance(outputs, Mapping):
            raise SpecError(
                f"the step net {self.name} returned a {type(outputs).__name__} at step {t}, "
                "wanted a dict of outputs by name"
            )
        targets = {state: link.name if isinstance(link, Window) else link for state, link in self.links.items()}
        missing = [f"links[{state!r}] wants {name!r}" for state, name in targets.items() if name not in outputs]
        if missing:
            seen = list(cast("Mapping[str, Any]", outputs))
            raise SpecError(listed(f"the step net {self.name} returned {seen} at step {t}, but:", missing))
