"""A hosted expert: restored at the start, saved periodically, with the step that a crash cannot undo.

    restore   newest whole checkpoint ──> weights, optimizer, schedule, steps, idempotency keys
    save      the same, all of one step, copied under the expert's lock and written without it
    durable   the step of the last checkpoint that is on the disk
    change    hyperparameters, between two batches ──> save
    return    a kept checkpoint ──> weights, optimizer, ... in a new incarnation ──> save

Keys and weights are saved together. Otherwise a backward that a client repeats after a crash could be applied twice, or
not at all. Of a replica, only the owner saves, with the token of its ownership. If hyperparameters of a checkpoint
differ from the configured ones, the checkpoint wins, unless the backend says otherwise. The log and the status note it.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torchweft.core.errors import UsageError, escape, join_faults
from torchweft.core.validation import MAX_SECONDS
from torchweft.experts.checkpoint import Checkpoint, CheckpointLock, CheckpointStore
from torchweft.experts.discovery import Lease, Ownership
from torchweft.experts.errors import ExpertError
from torchweft.experts.expert import ExpertBackend
from torchweft.experts.hyperparameters import HyperparameterSettings, describe_changes, read_hyperparameters
from torchweft.experts.optimizer_state import check_state
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
        self._saved_changes = 0  # of hyperparameters, in the last checkpoint
        self._saving = threading.Lock()
        self._folder_lock: CheckpointLock | None = None  # held from the restore to the end
        self.replica = None
        if until is not None:
            if backend.prefer_configured:
                raise UsageError(
                    f"expert {backend.name!r} is a replica, so its hyperparameters are those of its owner: remove "
                    'prefer = "file" (prefer_configured=), and change them by `torchweft set`'
                )
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
        backend = self.backend
        configured = read_hyperparameters(backend.optimizer, backend.schedule)
        preferred = None
        if backend.prefer_configured and backend.optimizer is not None:
            preferred = HyperparameterSettings(backend.optimizer, backend.schedule)
        casts, token = self._load(found, "Configure it as it was when that was saved, or give it another folder")
        self.durable = self.restored = found.step
        if found.skipped:
            self.failure = join_faults(f"at step {found.step}, as newer checkpoints cannot be read:", found.skipped)
            _LOG.warning("restore of expert %r: %s", backend.name, escape(self.failure))
        saved = read_hyperparameters(backend.optimizer, backend.schedule)
        changes = describe_changes(configured, saved, prefer_configured=preferred is not None)
        self._saved_changes = backend.executor.stepper.changes
        if preferred is not None:
            preferred.put_back()
            if changes:
                backend.executor.stepper.count_change()
        self.notes = (*casts, *changes)
        for note in self.notes:
            _LOG.warning("expert %r: %s", backend.name, escape(note))
        if self.replica is not None:
            self.replica.state.confirm(token)

    def _load(self, found: Checkpoint, advice: str) -> tuple[list[str], int]:
        """Load state and keys of a checkpoint. Returns notes, and the token of its owner."""
        try:
            extra: dict[str, Any] = {} if found.extra is None else found.extra  # None: saved by hand, without keys
            casts = self.backend.load_state_dict(found.state, lossy=self._lossy)
            if _KEYS in extra:
                self.backend.idempotency.load_state_dict(extra[_KEYS])
        except Exception as error:  # modules and optimizers raise anything for the state of another kind
            text = f"expert {self.backend.name!r} cannot go on from {found.location}: {error}. {advice}"
            raise UsageError(text) from error
        return casts, extra.get(_TOKEN, 0)

    def set_hyperparameters(self, values: Mapping[str, Any], group: int | None, max_wait: float) -> None:
        """Set hyperparameters between two batches, and save. Raises ``NotOwnerError`` at a server that follows."""
        self._check_owner()
        with _acquire(self.backend.executor.lock, max_wait, self.backend.name, "changed"):
            self.backend.set_hyperparameters(values, group=group)
        self.save(max_wait)

    def copy_module(self, max_wait: float) -> tuple[int, dict[str, Any]]:
        """The steps, and the state of the module between two batches."""
        with _acquire(self.backend.executor.lock, max_wait, self.backend.name, "copied"):
            self.backend.check_weights()
            state = self.backend.state_dict()
        return state["steps"], dict(state["module"])

    def roll_back(self, step: int, claim: Callable[[Replica], Ownership], max_wait: float) -> None:
        """Go back to the checkpoint of a step, and save it as the newest. ``claim``: makes a larger token."""
        # Raises ``NotOwnerError`` at a server that follows, or has been replaced.
        store, backend = self._store, self.backend
        if store is None:
            raise UsageError(f"expert {backend.name!r} has no checkpoints to go back to: there is no checkpoints=")
        self._check_owner()
        found = store.load(backend.name, step)
        check_state(backend.name, found.state, backend.optimizer, backend.schedule)

        def load() -> None:
            with _acquire(backend.executor.lock, max_wait, backend.name, "rolled back"):
                self._load(found, "Nothing was changed")

        with _acquire(self._saving, max_wait, backend.name, "rolled back"):
            if self.replica is None:
                load()
                # So that clients notice it, and no open mini-batch is committed.
                self._incarnation = secrets.randbits(63)
            else:
                self.replica.replace_state(claim(self.replica), load)
            self.durable = None
        self.save(max_wait)

    def _check_owner(self) -> None:
        if self.replica is not None:
            self.replica.leadership.check(steps=True)

    def save(self, max_wait: float = MAX_SECONDS) -> bool:
        """Make the present state durable. Returns False if it is already, or if another server owns the expert."""
        # Raises ``ExpertError`` if a batch runs for longer than ``max_wait`` seconds.
        store, uid = self._store, self.backend.name
        if store is None:
            return False
        with _acquire(self._saving, max_wait, uid):
            stepper = self.backend.executor.stepper
            is_saved = (self.durable, self._saved_changes) == (stepper.steps, stepper.changes)
            if not self._owns or (is_saved and store.has(uid, stepper.steps)):
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
            self.durable, self._saved_changes = step, state["changes"]
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
def _acquire(
    lock: "threading.Lock | threading.RLock", max_wait: float, uid: str, what: str = "saved"
) -> Generator[None]:
    if not lock.acquire(timeout=max_wait):
        raise ExpertError(f"expert {uid!r} was not {what}: its module ran for longer than {max_wait:g} s")
    try:
        yield
    finally:
        lock.release()
