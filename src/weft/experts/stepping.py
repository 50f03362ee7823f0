"""What training leaves: optimizer steps, and the log of the batches that led to them.

gradients ── own ──> .grad ── hooks ── apply_gradients ──> weights, steps + 1    .grad is empty before and after,
                                 '────────raises──> StepError                    whatever happens
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from secrets import token_hex
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.experts.entry import Entry, Member
from weft.experts.errors import StepError
from weft.experts.gradients import own
from weft.experts.journal import Journal
from weft.experts.task import Task

Kind = Literal["backward", "commit"]


class Stepper:
    """Applies gradients to ``parameters``, asked for anew each time. Belongs to whoever holds the expert's lock."""

    def __init__(
        self,
        name: str,
        parameters: Callable[[], Iterable[nn.Parameter]],
        apply: Callable[[], None] | None,
        journal: Journal | None,
    ) -> None:
        self.steps = self.batches = 0
        self.branch = self._next_branch = ""
        self.journal_failures = 0
        self._name = name
        self._parameters = parameters
        self._apply = apply
        self.journal = journal
        if journal is not None:
            journal.own(name)
        self.restored(0, "")

    @property
    def trains(self) -> bool:
        """Whether there is anything that applies gradients."""
        return self._apply is not None

    def step(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], held: set[int]) -> None:
        """One optimizer step. Raises `StepError` if the optimizer does, or a hook; then it does not count.

        ``held``: the addresses of the storages that others go on using. What looks into them is not written to.
        """
        self._clear()  # of what was left there by others: the optimizer may hold parameters that are frozen now
        try:
            for parameter, gradient in zip(parameters, own(parameters, gradients, held), strict=True):
                parameter.grad = gradient
                if gradient is not None and parameter._post_accumulate_grad_hooks:
                    _hear(parameter)
            if self._apply is not None:
                self._apply()
        except Exception as error:
            raise StepError(
                f"applying the gradients of expert {self._name!r} raised {type(error).__name__}: {error}. The weights "
                "may have changed in part; load a checkpoint"
            ) from error
        finally:
            self._clear()
        self.steps += 1

    def _clear(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None

    def restored(self, batches: int, branch: str) -> None:
        """The expert goes on after so many backward batches, the last of this branch, and now from there."""
        self.batches, self.branch, self._next_branch = batches, branch, token_hex(8)
        if self.journal is not None:
            self.journal.restored(self.steps, batches, branch)

    @contextmanager
    def replaying(self, branch: str) -> Generator[None]:
        """What runs within is of this branch, which ran before."""
        self._next_branch = branch
        try:
            yield
        finally:
            self._next_branch = token_hex(8)

    def log(self, kind: Kind, tasks: Sequence[Task], seed: int, *, failed: bool = False, terms: int = 0) -> None:
        """Put a batch into the journal. ``terms``: of the sum that a commit applied."""
        if failed:  # a commit stays at its place: what a state of there has in it is told by its branch
            self._next_branch = token_hex(8)
        self.branch = self._next_branch
        self._write(Entry.of(kind, tasks, self.steps, seed, failed, self.batches, self.branch, terms), tasks)

    def log_dropped(self, client: str | None, mini_batch: str) -> None:
        """Put into the journal that the sum of a mini-batch is gone, and was not applied."""
        members = (Member(client, None, 1, 0),)
        entry = Entry("dropped", self.steps, 0, mini_batch, members, torch.get_num_threads(), batch=self.batches)
        self._write(replace(entry, branch=self.branch), ())

    def _write(self, entry: Entry, tasks: Sequence[Task]) -> None:
        """A full disk must not make a step that was taken look like one that was not."""
        if self.journal is None:
            return
        try:
            self.journal.write(entry, tasks)
        except Exception:
            self.journal_failures += 1


def _hear(parameter: nn.Parameter) -> None:
    """Its post-accumulate hooks: autograd calls them only where it puts the gradient there itself."""
    hooks: Any = parameter._post_accumulate_grad_hooks
    with torch.no_grad():
        for hook in list(hooks.values()):
            hook(parameter)
