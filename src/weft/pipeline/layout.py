"""Which way the next step of a pipe is run: ``executor="auto"``, mostly.

    serial    every stage a segment, in the caller's thread
    threads   every stage a segment, in a thread of its own
    merged    all stages one segment per micro-batch, in the caller's thread
    visible   nothing cut out: plain autograd over all micro-batches, in the caller's thread
    graph     the same, because the user asked for it; also gradients of gradients

The last three need no recomputation and one device. "auto" runs the first steps of each kind by turns in the
caller's thread and in threads, and keeps what was faster. The very first is "serial", where an error is
told with its stage and micro-batch; then "visible" and "merged" take turns, and the better time is that of the thread.
If it wins, "visible" costs least: a few microseconds per micro-batch over a plain loop. But where its backward ends,
autograd does not tell, which may have more to do than this step; "merged" can be timed to the end, and costs more.
What "visible" cannot do is to say where an error in backward came from; so it is left to graphs of PyTorch's own
operators (the first visible step of a kind is looked at), and not used under anomaly detection. Nor is it inside of
DistributedDataParallel, which must find the same graph at every step and in every process: a parameter that got no
gradient is in that of a step that was cut, and not in this.
"""

from collections.abc import Hashable, Sequence

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn.parallel import DistributedDataParallel

from weft.core.choice import Choice
from weft.core.split_backward import children_first


class Layouts:
    """The layout of each step. `kind` stands for steps that take about the same time."""

    def __init__(self, executor: str, stages: int, *, one_device: bool, mergeable: bool, splits: bool) -> None:
        self._executor = executor
        self._mergeable = mergeable
        self._splits = splits
        if executor == "auto":
            self._candidates = (["serial"] if one_device else []) + (["threads"] if stages > 1 else [])
        else:
            self._candidates = [executor]
        self.choice = Choice(len(self._candidates))
        self._has_python: dict[Hashable, bool] = {}

    def pick(self, kind: Hashable, *, watched: bool, local: bool = False) -> tuple[str, int | None]:
        """The layout for the next step of this kind, and which candidate it measures, if any.

        Who watches wants to see the stages, so a watched step is never merged nor measured. Modes and hooks of the
        calling thread (`local`) would count other operators in each layout, so they always get the same one.
        """
        if self._executor != "auto":
            return self._executor, None
        if local:
            return self._candidates[0], None
        if watched:
            return self._candidates[-1], None
        candidate = self.choice.pick(kind)
        measuring = not self.choice.decided(kind)
        if self._candidates[candidate] == "threads" or not self._mergeable or torch.is_anomaly_enabled():
            return self._candidates[candidate], candidate if measuring else None
        decided = self._decided(kind)
        if not measuring:
            return decided, None
        tried = self.choice.tried(kind, candidate)
        if not tried or decided == "serial":
            return "serial", candidate
        return decided if tried % 2 else "merged", candidate

    def _decided(self, kind: Hashable) -> str:
        """How the caller's thread runs a step once it has won."""
        if not self._splits or getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
            return "merged"
        return "serial" if self._has_python.get(kind) else "visible"

    def seen(self, kind: Hashable, outputs: Sequence[torch.Tensor]) -> None:
        """After a visible step: look once whether its graph has autograd functions written in Python."""
        if kind not in self._has_python:
            roots = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
            self._has_python[kind] = any(isinstance(node, BackwardCFunction) for node in children_first(roots))

    def chosen(self) -> dict[str, str]:
        """For every kind of step that was measured to the end, which executor it is run by."""
        return {str(kind): self._candidates[best] for kind, best in self.choice.decisions().items()}
