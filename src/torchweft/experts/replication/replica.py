"""A replicated expert at one server: its options, the role of the server, and the versioned state.

    encode   module, optimizer, schedule, steps, idempotency keys ──> safetensors bytes      (see `serialization`)
    load     the same bytes from the owner, if no newer owner is known ──> loaded, all of one step
    restore  the newest checkpoint, if it is newer than the present state

Copying weights alone is not enough: without the idempotency keys, a new owner would repeat steps that clients retry.

    StateVersion(token 7, steps 20)  <  StateVersion(token 7, steps 21)  <  StateVersion(token 12, steps 15)

A later owner has a larger token, so its state is newer even with fewer steps: the additional steps of the earlier
owner never reached any later owner. Tokens of different epochs of the directory have no order (see `newer`).
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, NamedTuple

from torchweft.core.validation import Validator, token_fault
from torchweft.experts.checkpoint import CheckpointStore
from torchweft.experts.discovery import Fence, Lease, Ownership
from torchweft.experts.discovery.fencing import epoch_of, number_of, replaced
from torchweft.experts.errors import NotOwnerError
from torchweft.experts.expert import ExpertBackend
from torchweft.experts.serialization import deserialize, serialize
from torchweft.experts.tls import ClientTls

Role = Literal["owner", "taking over", "follower"]


@dataclass(frozen=True)
class ReplicaOptions:
    """Which experts of a server are replicas, and how closely a follower keeps to the owner.

    A follower lags by at most ``follow_steps`` steps or ``follow_seconds``, whichever is less, plus the time of one
    transfer. That much is lost if an owner crashes. An owner that shuts down loses nothing.

    Args:
        experts: patterns (``*``, ``?``, ``[ab]``) of the names of experts that other servers have too.
        first_seconds: longest wait for the owners' states when a server starts. After it, the server starts without.
        state_bytes: largest state of one expert. A larger one is rejected before memory is allocated.
        tls, token: credentials for the other servers, where this server needs `Role.ADMIN` (see `GrpcTransport`).

    Raises ``UsageError`` that lists all invalid values.

    Example:
        >>> from torchweft.experts.replication import ReplicaOptions
        >>> closely = ReplicaOptions(["ffn.*"], follow_seconds=1.0)  # weft.Server(..., replicas=closely)
    """

    experts: Sequence[str] = ("*",)
    follow_seconds: float = 2.0
    follow_steps: int = 100
    first_seconds: float = 10.0
    state_bytes: int = 16 << 30
    tls: ClientTls | None = None
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        with Validator("invalid replica options") as check:
            for name in ("follow_seconds", "first_seconds"):
                check.seconds(name, getattr(self, name))
            for name in ("follow_steps", "state_bytes"):
                check.count(name, getattr(self, name))
            check.add(*token_fault(self.token))
            patterns: Any = self.experts
            is_list = not isinstance(patterns, str) and bool(patterns)
            valid = is_list and all(isinstance(pattern, str) and pattern for pattern in patterns)
            check.require(valid, f"experts is {patterns!r}, wanted a list of patterns such as ['ffn.*']")

    def covers(self, uid: str) -> bool:
        return any(fnmatchcase(uid, pattern) for pattern in self.experts)


class StateVersion(NamedTuple):
    """The owner's ``token`` when the state was made, its optimizer ``steps``, and its ``revision``."""

    # The revision counts backward batches and changes of hyperparameters.
    token: int = 0
    steps: int = 0
    revision: int = 0


def newer(one: StateVersion, other: StateVersion, token: int) -> bool:
    """Whether state ``one`` is newer than ``other``, for a server that claimed the expert with ``token``."""
    epochs = epoch_of(one.token), epoch_of(other.token)
    if epochs[0] == epochs[1]:
        return one > other
    # A state of the present epoch is newer than any other: its owner looked for states of earlier epochs first.
    if epoch_of(token) in epochs:
        return epochs[0] == epoch_of(token)
    # The order of two earlier epochs is not known, so the larger number of steps decides.
    return one[1:] > other[1:]


class Leadership:
    """The role of one server for one expert, and the calls that it may execute. Thread-safe.

        follower ── claimed ──> taking over ── led ──> owner ── lease ends ──> owner whose lease has lapsed
           ^                        |                    |                       |  answers forwards,
           '──────── another owns it ────────────────────┴───────────────────────┘  refuses to step

    It is checked twice: when a call arrives, to reject it early, and before a step is applied, to reject a call that
    waited too long. Only the directory changes a role. A newer owner that a caller names affects that call alone.
    ``until`` returns the time (`time.monotonic`) up to which a lease of this server certainly lasts.
    """

    def __init__(self, uid: str, until: Callable[[Lease], float]) -> None:
        self.uid = uid
        self.role: Role = "follower"
        self.owner: Ownership | None = None
        self.lease: Lease | None = None
        self._until = until
        self._lock = threading.Lock()
        self._epoch = 0  # of the directory, from the last owner's token
        self._past_epochs: set[int] = set()

    @property
    def token(self) -> int:
        owner = self.owner
        return owner.token if owner is not None and self.role != "follower" else 0

    @property
    def lasts(self) -> bool:
        # By its own clock, counted from before each renewal.
        lease = self.lease
        return lease is not None and time.monotonic() < self._until(lease)

    @property
    def may_step(self) -> bool:
        return self.role == "owner" and self.lasts

    def become(self, role: Role, owner: Ownership | None, lease: Lease | None = None) -> None:
        with self._lock:
            self.role, self.owner, self.lease = role, owner, lease
            epoch = 0 if owner is None else epoch_of(owner.token)
            if epoch and epoch != self._epoch:
                self._past_epochs = (self._past_epochs | {self._epoch}) - {0, epoch}
                self._epoch = epoch

    def check(self, *, steps: bool, carried: int = 0) -> None:
        """Raise ``NotOwnerError`` if this server may not execute a call. ``steps``: whether it changes the expert."""
        # ``carried``: the largest fencing token that the caller knows, or 0.
        # One consistent view of the four. `until` takes no lock, so this order of locks cannot deadlock.
        with self._lock:
            role, owner, token, lasts = self.role, self.owner, self.token, self.lasts
        mine, where = number_of(token), {}
        if role == "taking over":
            why = f"this server has claimed it with token {mine} and is taking over"
        elif role == "follower":
            where = {} if owner is None else {"address": owner.address}
            known = "its owner is not known now" if owner is None else f"{owner.address} owns it"
            why = f"this server is a follower, and {known}"
        # A token of a past epoch is ignored: the caller sent it before it learned of the new epoch.
        elif carried and replaced(token, carried) and epoch_of(carried) not in self._past_epochs:
            why = f"this server was replaced: it has token {mine}, and the call has token {number_of(carried)}"
        elif steps and not lasts:
            why = f"its lease (token {mine}) has lapsed, so another server may own the expert by now"
        else:
            return
        raise NotOwnerError(
            f"expert {self.uid!r} cannot do this here: {why}. Nothing was changed. Call its owner, or retry later",
            where,
        )


class ReplicaState:
    """The state of an expert at this server, and its version. `Replica` decides which states are admitted."""

    # ``token``: of the owner when it was made. ``is_loaded``: it is more than initial weights. ``is_broken``: a load
    # failed, possibly in the middle.
    def __init__(self, backend: ExpertBackend, store: CheckpointStore | None, on_load: Callable[[], None]) -> None:
        self.token = 0
        self.is_loaded = self.is_broken = False
        self.sent = self.received = self.received_bytes = 0
        self._backend, self._store, self._on_load = backend, store, on_load

    @property
    def version(self) -> StateVersion:
        return StateVersion(self.token, self._backend.steps, self._backend.executor.stepper.revision)

    def confirm(self, token: int) -> None:
        self.token, self.is_loaded = token, True

    def encode(self, max_wait: float = 1.0) -> tuple[StateVersion, memoryview] | None:
        """The present state as bytes, or None if a batch runs for longer than ``max_wait`` seconds."""
        lock = self._backend.executor.lock
        if not lock.acquire(timeout=max_wait):
            return None
        # Only the copies are made under the lock. Serialization takes far longer, and would hold up every batch.
        try:
            self._backend.check_weights()
            version = self.version
            state, keys = self._backend.state_dict(), self._backend.idempotency.snapshot()
        finally:
            lock.release()
        self.sent += 1
        return version, serialize({"state": state, "records": keys()})

    def newest_checkpoint(self) -> tuple[StateVersion, Any, Any] | None:
        checkpoint = None if self._store is None else self._store.load_newest(self._backend.name)
        if checkpoint is None:
            return None
        extra: dict[str, Any] = {} if checkpoint.extra is None else checkpoint.extra  # None: saved by hand, no keys
        revision = checkpoint.state["backward_batches"] + checkpoint.state.get("changes", 0)
        version = StateVersion(extra.get("token", 0), checkpoint.step, revision)
        return version, checkpoint.state, extra.get("records")

    def replace(self, version: StateVersion, state: Any, records: Any, nbytes: int | None = None) -> None:
        # ``nbytes`` is None for a checkpoint.
        # Set before the first write and cleared after the last one, so that an exception in between leaves a replica
        # that is never led: its module can hold a mixture of two states.
        self.is_broken = True
        with self._backend.executor.lock:
            self._backend.load_state_dict(state)
            if records is not None:
                self._backend.idempotency.load_state_dict(records)
        self.is_broken = False
        self.confirm(version.token)
        self._on_load()
        if nbytes is not None:
            self.received += 1
            self.received_bytes += nbytes


class OwnerReport(NamedTuple):
    """The version that an owner last reported, and when (`time.monotonic`)."""

    version: StateVersion
    heard_at: float


class Replica:
    """An expert that other servers have too: the role of this server, and which states it admits. Thread-safe."""

    # ``save`` makes the present state durable, in ``store``. ``loaded`` is called after the state was replaced.
    # ``failure``: the last failure of following or taking over.
    def __init__(
        self,
        backend: ExpertBackend,
        until: Callable[[Lease], float],
        *,
        save: Callable[[float], object] = lambda max_wait: None,
        store: CheckpointStore | None = None,
        loaded: Callable[[], None] = lambda: None,
    ) -> None:
        self.backend, self.uid = backend, backend.name
        self.leadership = Leadership(backend.name, until)
        self.state = ReplicaState(backend, store, loaded)
        self.save = save
        self.incarnation = secrets.randbits(63)
        self.report: OwnerReport | None = None
        self.failure: Exception | None = None
        self.next_try = 0.0  # when to repeat a failed operation
        self.is_final = False  # this server will not step it again
        # Makes "check the role, then load" one operation; without it, a state of the replaced owner could overwrite the
        # state of a server that has just claimed the expert. Order of locks: this one, that of the executor, that of
        # the leadership. The permit is asked for under the executor's lock, so it must not take this one.
        self._lock = threading.RLock()
        self._fence = Fence(backend.name)
        self._owner_was_seen = False
        self._epoch_changed_at = float("-inf")  # when the directory was last seen to have begun again
        # Asked before every step, because the lease can lapse while a task waits.
        backend.executor.updates.require_permit(partial(self.leadership.check, steps=True))

    @property
    def version(self) -> StateVersion:
        return self.state.version

    @property
    def may_lead(self) -> bool:
        # Not if an owner's state was never received, or could not be loaded: its steps would be lost.
        return not self.state.is_broken and (self.state.is_loaded or not self._owner_was_seen)

    @property
    def is_settled(self) -> bool:
        leadership, owner = self.leadership, self.leadership.owner
        return leadership.role == "owner" or (
            owner is not None and self.report is not None and not replaced(self.state.token, owner.token)
        )

    @property
    def steps_behind(self) -> int | None:
        """Steps that the owner is ahead, according to its last report, or None before the first."""
        if self.leadership.role != "follower":
            return 0
        return None if self.report is None else max(0, self.report.version.steps - self.backend.steps)

    def record_report(self, version: StateVersion) -> None:
        self.report = OwnerReport(version, time.monotonic())

    def record_failure(self, error: Exception | None) -> None:
        self.failure = error

    def postpone(self, seconds: float) -> None:
        self.next_try = time.monotonic() + seconds

    def mark_final(self) -> None:
        self.is_final = True

    def follow(self, owner: Ownership | None) -> None:
        with self._lock:
            self._owner_was_seen = self._owner_was_seen or owner is not None
            if owner is not None and owner.token and self._fence.listed(owner.token):
                self._epoch_changed_at = time.monotonic()
            self.leadership.become("follower", owner)

    def claimed(self, ownership: Ownership, lease: Lease) -> None:
        # From now on, states of an older owner or epoch are rejected.
        with self._lock:
            self.leadership.become("taking over", ownership, lease)
            if self._fence.listed(ownership.token, granted=True):
                self._epoch_changed_at = time.monotonic()

    def quiet(self, lease: Lease) -> float:
        """Seconds for which no server may lead it yet, under this lease."""
        # After a directory has begun again, the previous owner still relies on its lease, which is as long as this one.
        return max(0.0, self._epoch_changed_at + lease.ttl - time.monotonic())

    def failed(self, error: Exception) -> None:
        with self._lock:
            # Ignored if this server has claimed it since: the failure is of the stream from the former owner.
            if self.leadership.role == "follower":
                self.failure = error

    def lead(self, ownership: Ownership, lease: Lease) -> None:
        # The new incarnation ends mini-batches that were open under an earlier owner.
        with self._lock:
            # The token goes first: a state that is sent to followers in between must not bear the old token.
            self.state.confirm(ownership.token)
            self.failure = None
            self.incarnation = secrets.randbits(63)
            self.leadership.become("owner", ownership, lease)

    def replace_state(self, ownership: Ownership, load: Callable[[], object]) -> None:
        """Call ``load``, which loads an older state, as a new owner: its claim makes the state the newest of all."""
        with self._lock:
            self._fence.listed(ownership.token, granted=True)
            self.leadership.become("owner", ownership, self.leadership.lease)
            self.state.confirm(ownership.token)
            load()
            self.incarnation = secrets.randbits(63)

    def load(self, version: StateVersion, data: bytes | bytearray | memoryview, *, taking_over: bool = False) -> bool:
        """Load a state that an owner has sent. Returns False if the role has changed, so that it is not needed."""
        # After an error of module or optimizer the replica is broken and never becomes the owner.
        value = deserialize(data)  # outside of the lock: it can take seconds, and changes nothing
        with self._lock:
            if not taking_over:
                self._fence.admit(version.token)
            if (self.leadership.role == "taking over") != taking_over or self.leadership.role == "owner":
                return False
            self.state.replace(version, value["state"], value["records"], len(data))
            self.failure = None
            return True

    def restore(self) -> bool:
        checkpoint = self.state.newest_checkpoint()
        if checkpoint is None:
            return False
        with self._lock:
            is_newer = newer(checkpoint[0], self.version, self.leadership.token)
            if not (is_newer or not self.state.is_loaded or self.state.is_broken):
                return False
            self.state.replace(*checkpoint)
            return True
