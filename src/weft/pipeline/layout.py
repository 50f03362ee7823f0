"""How the next step of a pipe is run: a table with three rows for ``executor="auto"``.

    serial    every stage a segment, in the caller's thread
    threads   every stage a segment, in a thread of its own
    uncut     plain autograd over all micro-batches, in the caller's thread

(`executor="graph"` is uncut as well, and has gradients of gradients.) "auto" measures them on the first steps of each
kind, and again when its choice has become slow; see `weft.core.choice`. "uncut" costs least where operators are small.
It needs one device and no recomputation, and is left out where it would not do the same:

    the schedule begins backward early     it would hold all micro-batches at once
    anomaly detection; autograd functions  an error in backward could not be told with its stage and micro-batch
    written in Python
    DistributedDataParallel                must find the same graph at every step and in every process: a parameter that
                                           got no gradient is in that of a step that was cut, and not in this
"""

from collections.abc import Hashable, Sequence

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn.parallel import DistributedDataParallel

from weft.core.choice import Choice
from weft.core.split_backward import children_first


class Layouts:
    """The layout of each step. `kind` stands for steps that take about the same time."""

    def __init__(self, executor: str, stages: int, *, one_device: bool, uncut: bool) -> None:
        self._executor = executor
        rows = {"serial": one_device, "uncut": uncut, "threads": stages > 1}
        self._candidates = [row for row, can in rows.items() if can] if executor == "auto" else [executor]
        self.choice = Choice(len(self._candidates))
        self._looked_at: set[Hashable] = set()
        self._with_cuts: set[Hashable] = set()

    def pick(self, kind: Hashable, *, watched: bool, local: bool = False) -> tuple[str, int | None]:
        """The layout for the next step of this kind, and which candidate it measures, if any.

        Who watches wants to see the stages, each in its thread. Modes and hooks of the calling thread (`local`) would
        see other operators in each layout. So both always get the same one.
        """
        if self._executor != "auto":
            return self._executor, None
        if watched or local:
            return self._candidates[-1 if watched and "threads" in self._candidates else 0], None
        if kind in self._with_cuts and "uncut" in self._candidates:
            self.choice.rule_out(kind, self._candidates.index("uncut"))
        candidate = self.choice.pick(kind)
        return self._candidates[candidate], candidate if self.choice.times(kind) else None

    def seen(self, kind: Hashable, outputs: Sequence[torch.Tensor]) -> None:
        """After an uncut step: look once whether its graph has autograd functions written in Python."""
        if kind not in self._looked_at:
            self._looked_at.add(kind)
            roots = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
            if any(isinstance(node, BackwardCFunction) for node in children_first(roots)):
                self.needs_cuts(kind)

    def needs_cuts(self, kind: Hashable) -> None:
        """Steps of this kind are never run uncut."""
        self._with_cuts.add(kind)

    def chosen(self) -> dict[str, str]:
        """For every kind of step that was measured to the end, how it is run."""
        return {str(kind): self._candidates[best] for kind, best in self.choice.decisions().items()}


def needs_cuts() -> bool:
    """Whether what surrounds this call wants every stage cut out."""
    return torch.is_anomaly_enabled() or getattr(DistributedDataParallel, "_active_ddp_module", None) is not None
