"""From a state and a log to the same bytes.

    state_dict of step 40 ──> backend ── replay(entries 41, 42, ...) ──> state_dict of step 57, bit for bit

For finding out who spoiled an expert, or for following a replica. Each batch runs as it ran then, with its
members in their order, its random numbers, and the number of intra-op threads, on which rounding depends. The same
kind of machine and the same PyTorch are up to the caller.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from weft.core.errors import listed
from weft.experts.accumulation import Owner
from weft.experts.errors import CommitError, ReplayError
from weft.experts.executor import TaskFault
from weft.experts.expert import ExpertBackend
from weft.experts.journal import Entry, Member
from weft.experts.task import Task

Fetch = Callable[[Member], Sequence[Tensor]]
"""Where the tensors of a task are: its flat inputs and gradients, as they were submitted."""


def replay(backend: ExpertBackend, entries: Iterable[Entry], fetch: Fetch) -> int:
    """Run logged batches on a backend that is in the state before the first of them; how many ran.

    Those after a ``state_dict`` are the entries whose ``place`` is greater than its ``(steps, backward_batches)``.
    Nobody else may use the backend meanwhile. Raises `ReplayError` if the log does not fit its state or its options,
    such as a mini-batch of which a part ran before that state, and what module and optimizer raise; the batches before
    that have run.

    Example:
        >>> import copy
        >>> rows, journal = (weft.TensorSpec((None, 8), torch.float32),), weft.experts.Journal()
        >>> expert = weft.ExpertBackend("ffn.0", nn.Linear(8, 8), torch.optim.SGD, args_schema=rows, journal=journal)
        >>> other = weft.ExpertBackend("ffn.0", copy.deepcopy(expert.module), torch.optim.SGD, args_schema=rows)
        >>> with weft.Runtime([expert]):
        ...     gradients = expert.get_pools()[1].submit_task(torch.ones(4, 8), torch.ones(4, 8)).result(10)
        >>> weft.experts.replay(other, journal.entries(), lambda member: (torch.ones(4, 8), torch.ones(4, 8)))
        1
        >>> torch.equal(other.module.weight, expert.module.weight)
        True
    """
    count = 0
    for entry in entries:
        _check(backend, entry)
        if entry.kind in ("restored", "dropped"):
            _forget_sums(backend, entry)
            continue
        tasks = [_task(backend, entry, member, fetch) for member in entry.members]
        try:
            with _threads(entry.threads):
                backend.executor.redo(entry.kind, tasks, entry.seed, entry.branch)
        except TaskFault as error:
            raise _unfit(backend, entry, next(iter(error.errors.values()))) from error
        except CommitError as error:
            raise _unfit(backend, entry, error) from error
        if backend.steps != entry.step:
            raise ReplayError(f"expert {backend.name!r} is at step {backend.steps} after a batch of step {entry.step}")
        count += 1
    return count


def _task(backend: ExpertBackend, entry: Entry, member: Member, fetch: Fetch) -> Task:
    key, mini_batch = member.key, entry.mini_batch
    if entry.kind == "commit":
        return Task((), 1, client=member.client, key=key, mini_batch=mini_batch)
    tensors = tuple(fetch(member))
    rows = backend.backward_pool.columns.check(tensors, f"the replay of {member}")
    if rows != member.rows:
        raise ReplayError(f"the tensors of {member} have {rows} rows, but had {member.rows} when it was logged")
    return Task(tensors, rows, client=member.client, key=key, mini_batch=mini_batch, evaluation=entry.evaluation)


def _check(backend: ExpertBackend, entry: Entry) -> None:
    steps = 1 if entry.kind == "commit" or (entry.mini_batch is None and backend.optimizer is not None) else 0
    steps, batches = (0, 0) if entry.kind in ("restored", "dropped") else (steps, entry.kind == "backward")
    before = backend.executor.backward_batches
    faults: list[str] = []
    if entry.failed:
        faults.append(f"the optimizer raised after step {entry.step}, and what it left then is not known")
    elif backend.steps + steps != entry.step:
        faults.append(
            f"the expert is at step {backend.steps}, but the batch led from {entry.step - steps} to {entry.step}"
        )
    if not entry.failed and entry.batch and before + batches != entry.batch:
        faults.append(f"{before} backward batches ran on the expert, but {entry.batch - batches} before this batch")
    if faults and entry.kind == "restored":
        faults.append("it went on from another state there; `read_journal` drops what did not lead to that")
    terms = backend.executor.mini_batches.terms(_owners(entry)[0]) if entry.members else 0
    if entry.kind == "commit" and entry.terms and terms != entry.terms:
        faults.append(
            f"{terms} of the {entry.terms} backward batches of mini-batch {entry.mini_batch!r} ran on the expert; "
            "begin with a state from before its first one"
        )
    if not entry.members and entry.kind != "restored":
        faults.append("the batch has no members")
    if faults:
        raise ReplayError(listed(f"a batch cannot be replayed on expert {backend.name!r}:", faults))


def _forget_sums(backend: ExpertBackend, entry: Entry) -> None:
    """Open mini-batches are no part of a state that is loaded, and their names may be used anew."""
    with backend.executor.lock:
        sums = backend.executor.mini_batches
        for owner in sums.all() if entry.kind == "restored" else _owners(entry):
            sums.remove(owner)


def _owners(entry: Entry) -> list[Owner]:
    """Whose mini-batch it is."""
    return [(member.client, entry.mini_batch or "") for member in entry.members]


def _unfit(backend: ExpertBackend, entry: Entry, error: BaseException) -> ReplayError:
    return ReplayError(
        f"the {entry.kind} batch that led to step {entry.step} cannot be replayed on expert {backend.name!r}: "
        f"{type(error).__name__}: {error}"
    )


@contextmanager
def _threads(count: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
