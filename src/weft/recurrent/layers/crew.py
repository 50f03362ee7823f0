"""What a stack needs to run waves and does not save: threads, and what it has learned about its layers.

A copy of a stack, or one that was loaded, begins anew.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.choice import Choice
from weft.core.executor import Executor, SerialExecutor, ThreadExecutor
from weft.core.rng import RandomUse, generators
from weft.core.tree import flatten
from weft.recurrent.layers.reverse import Axes


class Crew:
    """Executors, random use per layer, what was measured; `last` says in words how the last call was run."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._threads = ThreadExecutor("stack")
        self._tried: set[Hashable] = set()
        self.uses = [RandomUse(generators([torch.device("cpu")])) for _ in range(layers)]
        self.searched: set[int] = set()
        self.choice = Choice(2)
        self.refused: dict[Hashable, str] = {}
        self.last = "no call yet"

    def executor(self, kind: Hashable) -> Executor:
        """Who walks a call of this kind. The first one stays in the caller's thread: a layer may derive its plan there,
        and tracing concerns the whole process."""
        if kind in self._tried:
            return self._threads
        self._tried.add(kind)
        return SerialExecutor()

    def __reduce__(self) -> tuple[Any, ...]:
        return (Crew, (self._layers,))


def kind_of(layers: nn.Module, inputs: Any, states: Any, tables: tuple[bool, ...], axes: Axes) -> Hashable:
    """What a layer may make a plan for: how one step looks, what the layers consist of, and the surroundings."""
    of_step = [_look(leaf, axes.time_of_input(leaf) if isinstance(leaf, Tensor) else -1) for leaf in flatten(inputs)[0]]
    of_states = [_look(leaf, -1) for leaf in flatten(states)[0]]
    owned = tuple((id(each), each.requires_grad) for each in (*layers.parameters(), *layers.buffers()))
    surroundings = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))
    return (flatten(inputs)[1], *of_step, *of_states, owned, configuration(layers), tables, surroundings)


def configuration(module: nn.Module) -> Hashable:
    """What may change whether a module draws random numbers: training flags, and numbers such as probabilities."""
    return tuple(value for each in module.modules() for value in vars(each).values() if type(value) in (bool, float))


def _look(leaf: Any, time: int) -> Hashable:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__
    return (
        *(size for axis, size in enumerate(leaf.shape) if axis != time),
        leaf.dtype,
        leaf.device,
        leaf.requires_grad,
    )
