"""A hosted expert: restored at the start, saved periodically, with the step that a crash cannot undo.

    restore   newest whole checkpoint ──> weights, optimizer, schedule, steps, idempotency keys
    save      the same, all of one step, copied under the expert's lock and written without it
    durable   the step of the last checkpoint that is on the disk

Keys and weights are saved together. Otherwise a backward that a client repeats after a crash could be applied twice, or
not at all. Of a replica, only the owner saves, with the token of its ownership. If hyperparameters of a checkpoint
differ from the configured ones, the checkpoint wins, and the log and the status say so.
"""

import inspect
import json
import logging
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from torch import Tensor

from torchweft.core.errors import UsageError, escape, join_faults
from torchweft.core.validation import MAX_SECONDS
from torchweft.experts.checkpoint import CheckpointLock, CheckpointStore
from torchweft.experts.discovery import Lease
from torchweft.experts.errors import ExpertError
from torchweft.experts.expert import ExpertBackend
from torchweft.experts.replication import Replica
from torchweft.experts.server.options import ServerOptions
from torchweft.experts.wire import Header, Kind, Limits
from torchweft.experts.wire.service import StepReceipt, describe, read_description, read_receipt

_LOG = logging.getLogger("torchweft.experts.checkpoints")
# Keys of saved files. The first one is older than the name `idempotency`; changing it would make files unreadable.
_KEYS, _TOKEN = "records", "token"


class HostedExpert:
    """A backend and its storage (None: it is not saved). ``incarnation``: of the server."""

    # ``until`` makes it a replica: the time until which a lease lasts, see `weft.experts.replication.Leadership`.
    def __init__(
        self,
        backend: ExpertBackend,
        store: CheckpointStore | None,
        incarnation: int,
        until: Callable[[Lease], float] | None = None,
        options: ServerOptions | None = None,
    ) -> None:
        options = options or ServerOptions()
        self.backend = backend
        self.durable: int | None = None
        self.restored: int | None = None
        self.failure: str | None = None  # checkpoints that the restore skipped
        self.notes: tuple[str, ...] = ()  # hyperparameters and dtypes that the restore changed
        self._lossy = options.lossy_restore
        self._store, self._incarnation = store, incarnation
        self._saving = threading.Lock()
        self._folder_lock: CheckpointLock | None = None  # held from the restore to the end
        self.replica = None
        if until is not None:
            self.replica = Replica(backend, until, save=self.save, store=store, loaded=self._forget_durable)
        _check_callable(backend.name, self.describe(), options.limits)

    @property
    def incarnation(self) -> int:
        # That of a replica changes whenever this server becomes its owner, which ends open mini-batches.
        return self._incarnation if self.replica is None else self.replica.incarnation

    def describe(self) -> bytes:
        return describe(self.backend.get_info(), self.durable, self.incarnation)

    def receipt(self) -> bytes:
        token = 0 if self.replica is None else self.replica.leadership.token
        return StepReceipt(self.durable, self.incarnation, token).to_bytes()

    def admit(self, header: Header) -> None:
        if self.replica is not None:
            steps = header.kind is not Kind.FORWARD
            carried = read_receipt(header.data).token if steps and header.data else 0
            self.replica.leadership.check(steps=steps, carried=carried)

    def restore(self) -> None:
        """Load the newest checkpoint, or make the first one, so that even the first weights survive a crash."""
        # The checkpoints stay locked until `close`.
        if self._store is not None:
            self._folder_lock = self._store.lock(self.backend.name, shared=self.replica is not None)
            with ExitStack() as on_error:
                on_error.callback(self._folder_lock.release)
                self._load_or_save(self._store)
                on_error.pop_all()

    def _load_or_save(self, store: CheckpointStore) -> None:
        found = store.load_newest(self.backend.name)
        if found is None:
            self.save()  # does nothing for a replica, which is not an owner yet
            return
        configured = read_hyperparameters(self.backend)
        try:
            extra: dict[str, Any] = {} if found.extra is None else found.extra  # None: saved by hand, without keys
            casts = self.backend.load_state_dict(found.state, lossy=self._lossy)
            if _KEYS in extra:
                self.backend.idempotency.load_state_dict(extra[_KEYS])
            token: int = extra.get(_TOKEN, 0)
        except Exception as error:  # modules and optimizers raise anything for the state of another kind
            raise UsageError(
                f"expert {self.backend.name!r} cannot go on from {found.location}: {error}. Configure it as it was "
                "when that was saved, or give it another folder"
            ) from error
        self.durable = self.restored = found.step
        if found.skipped:
            self.failure = join_faults(f"at step {found.step}, as newer checkpoints cannot be read:", found.skipped)
            _LOG.warning("restore of expert %r: %s", self.backend.name, escape(self.failure))
        self.notes = (*casts, *describe_changes(configured, read_hyperparameters(self.backend)))
        for note in self.notes:
            _LOG.warning("expert %r: %s", self.backend.name, escape(note))
        if self.replica is not None:
            self.replica.restored(token)

    def save(self, max_wait: float = MAX_SECONDS) -> bool:
        """Make the present state durable. Returns False if it is already, or if another server owns the expert."""
        # Raises ``ExpertError`` if a batch runs for longer than ``max_wait`` seconds.
        store, uid = self._store, self.backend.name
        if store is None:
            return False
        with _acquire(self._saving, max_wait, uid):
            if not self._owns or (self.durable == self.backend.steps and store.has(uid, self.backend.steps)):
                return False
            begin = time.monotonic()
            with _acquire(self.backend.executor.lock, max_wait, uid):
                self.backend.check_weights()
                # `snapshot` defers the conversion of the keys, so that batches wait as short as possible.
                state, keys = self.backend.state_dict(), self.backend.idempotency.snapshot()
                token = 0 if self.replica is None else self.replica.version.token
            step: int = state["steps"]
            encoded = store.encode(uid, state, step, {_KEYS: keys(), _TOKEN: token})
            # Encoding can take seconds. The lease can have lapsed in the meantime, or the server ended.
            if not self._owns or self._store is None:
                return False
            if self._folder_lock is not None:
                self._folder_lock.hold()  # raises if the folder was removed and another server has started on it
            store.write(encoded)
            self.durable = step
            # Step 0 is saved during the start. The address must stay the first line of the log, which programs read.
            level = logging.INFO if step else logging.DEBUG
            _LOG.log(level, "saved expert %r: step %d, in %.2f s", uid, step, time.monotonic() - begin)
            return True

    def close(self) -> None:
        self._store = None
        if self._folder_lock is not None:
            self._folder_lock.release()

    @property
    def _owns(self) -> bool:
        return self.replica is None or self.replica.leadership.may_step

    def _forget_durable(self) -> None:
        # The state of another server was loaded, and there is no checkpoint of it.
        self.durable = None


def _check_callable(name: str, description: bytes, limits: Limits) -> None:
    if read_description(description).name != name:
        raise UsageError(f"expert {name!r} has a name that does not survive the wire")
    if (size := len(name.encode())) > limits.name_bytes:
        raise UsageError(
            f"expert {name[:80]!r}... has a name of {size} bytes, but a call can name at most {limits.name_bytes} "
            "(Limits.name_bytes); give it a shorter one"
        )


@contextmanager
def _acquire(lock: "threading.Lock | threading.RLock", max_wait: float, uid: str) -> Generator[None]:
    if not lock.acquire(timeout=max_wait):
        raise ExpertError(f"expert {uid!r} was not saved: its module ran for longer than {max_wait:g} s")
    try:
        yield
    finally:
        lock.release()


_IMPLEMENTATION = {"params", "foreach", "fused", "capturable", "differentiable"}  # they do not change results
_SCHEDULED = {"lr", "momentum", "betas"}  # a schedule changes them at every step


def read_hyperparameters(backend: ExpertBackend) -> dict[tuple[int, str], str]:
    """The present hyperparameters as JSON, by parameter group and name. Those of the schedule follow at group -1."""
    if backend.optimizer is None:
        return {}
    schedule = backend.schedule
    # A schedule changes some at every step, so they always differ from the configured ones.
    left_out = _IMPLEMENTATION if schedule is None else _IMPLEMENTATION | _SCHEDULED
    values: dict[tuple[int, str], Any] = {
        (number, name): value
        for number, group in enumerate(backend.optimizer.param_groups)
        for name, value in group.items()
        if name not in left_out
    }
    if schedule is not None:
        kind, state = type(schedule), schedule.state_dict()
        arguments = inspect.signature(kind).parameters.keys() - {"optimizer", "last_epoch"}
        values |= {(-1, f"{name} of {kind.__name__}"): value for name, value in state.items() if name in arguments}
    return {key: json.dumps(value, sort_keys=True, default=_to_plain) for key, value in values.items()}


def describe_changes(configured: Mapping[tuple[int, str], str], restored: Mapping[tuple[int, str], str]) -> list[str]:
    texts = [
        f"{key[1]} is {restored[key]}, as in its checkpoint, and not {value} as asked for; to change it, write it into "
        "the checkpoint (docs/experts.md), or begin in another folder"
        for key, value in configured.items()
        if key in restored and value != restored[key]
    ]
    return list(dict.fromkeys(texts))


def _to_plain(value: Any) -> Any:
    return cast("Any", value).tolist() if isinstance(value, Tensor) else type(value).__name__
