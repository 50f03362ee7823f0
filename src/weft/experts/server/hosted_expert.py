"""A hosted expert: restored at the start, saved periodically, with the step that a crash cannot take back.

    restore   newest whole checkpoint ──> weights, optimizer, schedule, steps, idempotency keys
    save      the same, all of one step, under the expert's lock; written outside of it
    durable   the step of the last checkpoint that is on the disk

An expert that other servers have too is a replica; only its owner saves, with the token under which it owns it.

Keys and weights are saved together. So a backward that is sent again after a crash either finds its key, and its
step is in the weights, or finds neither, and is applied now: once in both cases.

Hyperparameters of a checkpoint win over the configured ones; where they differ, the log and the status say so.
"""

import inspect
import json
import logging
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from torch import Tensor

from weft.core.errors import UsageError, escaped, listed
from weft.core.validation import LONGEST
from weft.experts.checkpoint import CheckpointStore, FolderLock
from weft.experts.discovery import Lease
from weft.experts.errors import ExpertError
from weft.experts.expert import ExpertBackend
from weft.experts.replication import Replica
from weft.experts.wire import LIMITS, Header, Kind, Limits
from weft.experts.wire.service import Receipt, describe, read_description, read_receipt

_LOG = logging.getLogger("weft.experts.checkpoints")


class HostedExpert:
    """A backend, and where it is saved (None: nowhere). ``incarnation`` is the server's.

    ``until`` makes it a replica: until when a lease of the server lasts; see `weft.experts.replication.Leadership`.
    ``limits``: of the frames by which it is called.
    """

    def __init__(
        self,
        backend: ExpertBackend,
        store: CheckpointStore | None,
        incarnation: int,
        until: Callable[[Lease], float] | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        self.backend = backend
        self.durable: int | None = None
        self.restored: int | None = None
        self.failure: str | None = None  # of the start, which passed over checkpoints
        self.notes: tuple[str, ...] = ()  # on how it was restored
        self._store = store
        self._incarnation = incarnation
        self._saving = threading.Lock()
        self._folder: FolderLock | None = None  # held from the restore to the end
        self.replica = (
            None if until is None else Replica(backend, until, save=self.save, store=store, loaded=self._replaced)
        )
        # What no client could receive or call.
        name, most = backend.name, limits.name_bytes
        if read_description(self.describe()).name != name:
            raise UsageError(f"expert {name!r} has a name that does not survive the wire")
        if (size := len(name.encode())) > most:
            raise UsageError(
                f"expert {name[:80]!r}... has a name of {size} bytes, and nobody can call one of more than {most} "
                "(Limits.name_bytes); give it a shorter one"
            )

    @property
    def incarnation(self) -> int:
        """The server's; or that of the time since it owns this replica."""
        return self._incarnation if self.replica is None else self.replica.incarnation

    def describe(self) -> bytes:
        """What an ``info`` call answers."""
        return describe(self.backend.get_info(), self.durable, self.incarnation)

    def receipt(self) -> bytes:
        """The receipt that goes with every result."""
        token = 0 if self.replica is None else self.replica.leadership.token
        return Receipt(self.durable, self.incarnation, token).to_bytes()

    def admit(self, header: Header) -> None:
        """Raise ``NotOwnerError`` if this call is for another server."""
        if self.replica is not None:
            steps = header.kind is not Kind.FORWARD
            carried = read_receipt(header.data).token if steps and header.data else 0
            self.replica.leadership.check(steps=steps, carried=carried)

    def restore(self) -> None:
        """Go on from the newest checkpoint; or make the first one, so that a crash keeps even the first weights.

        The folder of its checkpoints is locked until `close`. Raises what `CheckpointStore` raises, also if another
        server has locked it, and ``UsageError`` if the checkpoint is of another kind of expert.
        """
        if self._store is not None:
            self._folder = self._store.lock(self.backend.name, shared=self.replica is not None)
            with ExitStack() as failed:
                failed.callback(self._folder.release)
                self._restore(self._store)
                failed.pop_all()

    def _restore(self, store: CheckpointStore) -> None:
        found = store.load_newest(self.backend.name)
        if found is None:
            self.save()  # a replica refuses
            return
        asked = hyperparameters(self.backend)
        try:
            extra: dict[str, Any] = {} if found.extra is None else found.extra  # None: saved by hand, without keys
            self.backend.load_state_dict(found.state)
            if "records" in extra:
                self.backend.idempotency.load_state_dict(extra["records"])
            token: int = extra.get("token", 0)
        except Exception as error:  # whatever module and optimizer raise: it is not of this expert
            raise UsageError(
                f"expert {self.backend.name!r} cannot go on from {found.path}: {error}. Configure it as it was when "
                "that was saved, or give it another folder"
            ) from error
        self.durable = self.restored = found.step
        if found.skipped:
            self.failure = listed(
                f"it went on from step {found.step}, as newer checkpoints cannot be read:", found.skipped
            )
            _LOG.warning("restore of expert %r: %s", self.backend.name, escaped(self.failure))
        self.notes = tuple(changed(asked, hyperparameters(self.backend)))
        for note in self.notes:
            _LOG.warning("expert %r: %s", self.backend.name, escaped(note))
        if self.replica is not None:
            self.replica.restored(token)

    def save(self, max_wait: float = LONGEST) -> bool:
        """Make what was reached durable; False if it is already, or is another server's to do.

        Raises what `CheckpointStore.save` raises, and ``ExpertError`` if the module holds its expert for longer than
        ``max_wait`` seconds.
        """
        store, uid = self._store, self.backend.name
        if store is None:
            return False
        with _held(self._saving, max_wait, uid):
            if not self._owns or (self.durable == self.backend.steps and store.has(uid, self.backend.steps)):
                return False
            with _held(self.backend.executor.lock, max_wait, uid):
                state, keys = self.backend.state_dict(), self.backend.idempotency.snapshot()
                token = 0 if self.replica is None else self.replica.version.token
            step: int = state["steps"]
            encoded = store.encode(uid, state, step, {"records": keys(), "token": token})
            if not self._owns or self._store is None:  # the lease may have lapsed meanwhile, or the server ended
                return False
            if self._folder is not None:
                self._folder.hold()  # it may have been removed, and another server begun in its place
            store.write(encoded)
            self.durable = step
            return True

    def close(self) -> None:
        """Save no more, and let the folder of its checkpoints go. May be called twice."""
        self._store = None
        if self._folder is not None:
            self._folder.release()

    @property
    def _owns(self) -> bool:
        return self.replica is None or self.replica.leadership.may_step

    def _replaced(self) -> None:
        """Another server's state was loaded: no checkpoint of it is on the disk."""
        self.durable = None


@contextmanager
def _held(lock: "threading.Lock | threading.RLock", max_wait: float, uid: str) -> Generator[None]:
    """Hold a lock of an expert. Raises ``ExpertError`` if another holds it for longer than ``max_wait`` seconds."""
    if not lock.acquire(timeout=max_wait):
        raise ExpertError(f"expert {uid!r} was not saved: its module ran for longer than {max_wait:g} s")
    try:
        yield
    finally:
        lock.release()


_HOW = {"params", "foreach", "fused", "capturable", "differentiable"}  # not what is computed, but how
_MOVED = {"lr", "momentum", "betas"}  # by schedules, as they go


def hyperparameters(backend: ExpertBackend) -> dict[tuple[int, str], str]:
    """Those of now, as JSON, by group of parameters and name, but for what a schedule changes as it goes.

    Those of a schedule come last: what it was made with, as far as it keeps that.
    """
    if backend.optimizer is None:
        return {}
    schedule = backend.schedule
    left_out = _HOW if schedule is None else _HOW | _MOVED
    found: dict[tuple[int, str], Any] = {
        (at, name): value
        for at, group in enumerate(backend.optimizer.param_groups)
        for name, value in group.items()
        if name not in left_out
    }
    if schedule is not None:
        kind = type(schedule)
        asked = inspect.signature(kind).parameters.keys() - {"optimizer", "last_epoch"}
        found |= {(-1, f"{name} of {kind.__name__}"): v for name, v in schedule.state_dict().items() if name in asked}
    return {key: json.dumps(value, sort_keys=True, default=_plain) for key, value in found.items()}


def changed(asked: Mapping[tuple[int, str], str], found: Mapping[tuple[int, str], str]) -> list[str]:
    """What a checkpoint has changed, in words, each once."""
    texts = [
        f"{key[1]} is {found[key]}, as in its checkpoint, and not {before} as asked for; to change it, write it into "
        "the checkpoint (docs/experts.md), or begin in another folder"
        for key, before in asked.items()
        if key in found and before != found[key]
    ]
    return list(dict.fromkeys(texts))


def _plain(value: Any) -> Any:
    return cast("Any", value).tolist() if isinstance(value, Tensor) else type(value).__name__
