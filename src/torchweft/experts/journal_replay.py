"""Replay of a journal: the logged batches run again, so that a backend reaches the same weights.

    state_dict of step 40 ──> backend ── replay(entries 41, 42, ...) ──> state_dict of step 57, bit for bit

Separate from `weft.experts.journal`, which a backend writes to: a replay needs the backend itself.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from torchweft.core.validation import Validator
from torchweft.experts.errors import GradientError, RefusedError, ReplayError
from torchweft.experts.expert import ExpertBackend
from torchweft.experts.journal import Entry, Member
from torchweft.experts.task import Task

# Loads the tensors of a task: its flat inputs and gradients, as they were submitted.
Fetch = Callable[[Member], Sequence[Tensor]]


def replay(backend: ExpertBackend, entries: Iterable[Entry], fetch: Fetch) -> int:
    """Run logged batches on a backend in the state before the first of them. Returns the number of batches that ran.

    After a ``state_dict``, replay the entries whose ``place`` is beyond its ``(steps, backward_batches)``. Rounding
    depends on the number of intra-op threads, which is logged, and on machine and PyTorch, which the caller provides.
    Nothing else can use the backend during the replay.

    Raises `ReplayError` if an entry does not fit the backend, and the errors of module and optimizer. The batches
    before the failed one stay applied.

    Example:
        >>> from torchweft.experts import Entry, Member, replay
        >>> rows = (weft.TensorSpec((None, 8), torch.float32),)
        >>> expert = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), torch.optim.SGD, args_schema=rows)
        >>> entry = Entry("backward", step=1, seed=0, mini_batch=None, members=(Member("a", "1", 4, 0),), threads=1)
        >>> replay(expert, [entry], lambda member: (torch.ones(4, 8), torch.ones(4, 8)))
        1
    """
    batches, executor = 0, backend.executor
    for entry in entries:
        # Another branch means that a state was loaded at this point, and a loaded state has no open mini-batches.
        if entry.branch != executor.stepper.branch:
            executor.mini_batches.forget_sums(list(executor.mini_batches))
        _check_entry(backend, entry)
        if entry.kind in ("restored", "dropped"):
            executor.mini_batches.forget_sums(_mini_batch_owners(entry))
            continue
        tasks = [_rebuild_task(backend, entry, member, fetch) for member in entry.members]
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(entry.threads)
            executor.redo(entry.kind, tasks, entry.seed, entry.branch)
        except (RefusedError, GradientError) as error:
            raise ReplayError(
                f"the {entry.kind} batch that led to step {entry.step} cannot be replayed on expert "
                f"{backend.name!r}: {type(error).__name__}: {error}"
            ) from error
        finally:
            torch.set_num_threads(threads)
        if backend.steps != entry.step:
            raise ReplayError(f"expert {backend.name!r} is at step {backend.steps} after a batch of step {entry.step}")
        batches += 1
    return batches


def _rebuild_task(backend: ExpertBackend, entry: Entry, member: Member, fetch: Fetch) -> Task:
    key, mini_batch = member.key, entry.mini_batch
    if entry.kind == "commit":
        return Task((), 1, client=member.client, key=key, mini_batch=mini_batch)
    tensors = tuple(fetch(member))
    rows = backend.backward_pool.columns.check(tensors, f"the replay of {member}")
    if rows != member.rows:
        raise ReplayError(f"the tensors of {member} have {rows} rows, but had {member.rows} when it was logged")
    return Task(tensors, rows, client=member.client, key=key, mini_batch=mini_batch, evaluation=entry.evaluation)


def _check_entry(backend: ExpertBackend, entry: Entry) -> None:
    takes_step = entry.kind == "commit" or (
        entry.kind == "backward" and entry.mini_batch is None and backend.optimizer is not None
    )
    before_step = entry.step - takes_step
    batches, batches_before = backend.executor.backward_batches, entry.batch - (entry.kind == "backward")
    sums = [backend.executor.mini_batches.get(owner) for owner in _mini_batch_owners(entry)]
    terms = sums[0].terms if sums and sums[0] is not None else 0
    with Validator(f"a batch cannot be replayed on expert {backend.name!r}", ReplayError) as check:
        failure = f"the optimizer failed after step {entry.step}, so the state it left is unknown"
        if check.require(not entry.failed, failure):
            check.require(
                backend.steps == before_step,
                f"the expert is at step {backend.steps}, but the batch led from {before_step} to {entry.step}",
            )
            check.require(
                batches == batches_before or not entry.batch,
                f"{batches} backward batches ran on the expert, but {batches_before} before this batch",
            )
        if check.faults and entry.kind == "restored":
            check.add("another state was loaded at this entry; `read_journal` drops entries that did not lead to it")
        check.require(
            entry.kind != "commit" or terms == entry.terms,
            f"{terms} of the {entry.terms} backward batches of mini-batch {entry.mini_batch!r} ran on the expert; "
            "start from a state before its first one",
        )
        check.require(bool(entry.members) or entry.kind == "restored", "the batch has no members")


def _mini_batch_owners(entry: Entry) -> list[tuple[str | None, str]]:
    return [(member.client, entry.mini_batch or "") for member in entry.members]
