"""A replicated expert at one server: its options, its role, and its state, sent and loaded, with its version.

    encode   module, optimizer, schedule, steps, idempotency keys ──> safetensors bytes      (see `serialization`)
    load     the same bytes from its owner, if no newer owner is known ──> loaded, all of one step
    restore  the newest checkpoint, if that is newer than the state here

States come from servers that may own the expert, and are still read as untrusted data: no code is run.

    StateVersion(token 7, steps 20)  <  StateVersion(token 7, steps 21)  <  StateVersion(token 12, steps 15)

A later owner has a larger token, so its state is the newer one even if it has fewer steps: what the earlier owner
stepped beyond it never reached any later owner. Tokens of different epochs of the directory have no order; see `newer`.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, NamedTuple

from weft.core.validation import Validator, token_fault
from weft.experts.checkpoint import CheckpointStore
from weft.experts.discovery import Fence, Lease, Ownership
from weft.experts.discovery.fencing import epoch_of, number_of, replaced
from weft.experts.expert import ExpertBackend
from weft.experts.serialization import deserialize, serialize
from weft.experts.tls import ClientTls
from weft.experts.wire import NotOwnerError

Role = Literal["owner", "taking over", "follower"]


@dataclass(frozen=True)
class ReplicaOptions:
    """Which experts of a server are replicas, and how closely a follower keeps to the owner.

    A follower is behind by at most ``follow_steps`` steps or ``follow_seconds``, whichever comes first, and what one
    transfer takes: so much may be lost when an owner dies. An owner that shuts down loses nothing.

    Args:
    experts: patterns (``*``, ``?``, ``[ab]``) of the names of experts that other servers have too.
    follow_seconds: after so long a follower fetches the state of an owner that has stepped.
    follow_steps: after so many steps it fetches at once.
    first_seconds: how long a server waits, when it starts, for the owners' states; then it starts without.
    state_bytes: of one expert's state at most; more is refused before it is held.
    tls, token: how this server proves itself to the others, where it needs `Role.ADMIN`; see `GrpcTransport`.

    Raises ``UsageError`` that lists all invalid values.

    Example:
        >>> from weft.experts.replication import ReplicaOptions
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
            some: Any = self.experts
            valid = not isinstance(some, str) and bool(some) and all(isinstance(each, str) and each for each in some)
            check.that(valid, f"experts is {some!r}, wanted a list of patterns such as ['ffn.*']")

    def covers(self, uid: str) -> bool:
        """Whether this expert is a replica."""
        return any(fnmatchcase(uid, pattern) for pattern in self.experts)


class StateVersion(NamedTuple):
    """``token`` of the owner under whom the state was made, its optimizer ``steps`` and backward ``batches``."""

    token: int = 0
    steps: int = 0
    batches: int = 0


def newer(one: StateVersion, other: StateVersion, token: int) -> bool:
    """Whether state ``one`` is newer than ``other``, for a server that claimed the expert with ``token``.

    States of the epoch in which ``token`` was granted go before all others: their owners had what there was of these.
    Of two other epochs it is not known which was later; then the steps decide.
    """
    epochs = epoch_of(one.token), epoch_of(other.token)
    if epochs[0] == epochs[1]:
        return one > other
    if epoch_of(token) in epochs:
        return epochs[0] == epoch_of(token)
    return one[1:] > other[1:]


class Leadership:
    """The role of one server for one expert, and what that allows. Thread-safe.

        follower ── claimed ──> taking over ── led ──> owner ── lease ends ──> owner whose lease has lapsed
           ^                        |                    |                       |  answers forwards,
           '──────── another owns it ────────────────────┴───────────────────────┘  refuses to step

        may step     owner, and its lease, by the own clock and counted from before each renewal, lasts
        may answer   owner, also if its lease has lapsed: no other owner is known

    It is checked twice: where a call comes in, so that it is refused early, and where a step is about to be applied, so
    that a call which waited too long is refused as well. Only the directory makes a server owner or follower; what a
    caller says of a newer owner is believed for the caller's own call. ``until``: until when (`time.monotonic`) a lease
    of this server surely lasts.
    """

    def __init__(self, uid: str, until: Callable[[Lease], float]) -> None:
        self.uid = uid
        self.role: Role = "follower"
        self.owner: Ownership | None = None
        self.lease: Lease | None = None
        self._until = until
        self._lock = threading.Lock()
        self._epoch = 0  # of the directory, by the last owner's token
        self._past: set[int] = set()  # its epochs before

    @property
    def token(self) -> int:
        """This server's fencing token; 0 for a follower."""
        owner = self.owner
        return owner.token if owner is not None and self.role != "follower" else 0

    @property
    def lasts(self) -> bool:
        """Whether the own lease surely lasts."""
        lease = self.lease
        return lease is not None and time.monotonic() < self._until(lease)

    @property
    def may_step(self) -> bool:
        """Whether it surely is the owner."""
        return self.role == "owner" and self.lasts

    def become(self, role: Role, owner: Ownership | None, lease: Lease | None = None) -> None:
        """Take a role. ``lease``: under which this server owns it; a follower has none."""
        with self._lock:
            self.role, self.owner, self.lease = role, owner, lease
            epoch = 0 if owner is None else epoch_of(owner.token)
            if epoch and epoch != self._epoch:
                self._past = (self._past | {self._epoch}) - {0, epoch}
                self._epoch = epoch

    def check(self, *, steps: bool, carried: int = 0) -> None:
        """Raise ``NotOwnerError`` if a call is not for this server; ``steps``: whether it changes the expert.

        ``carried``: the largest fencing token that its author knows; 0: none. One of an epoch of the directory that is
        known here to be over counts as none: the author made the call before it heard of that.
        """
        with self._lock:
            role, owner, token, lasts = self.role, self.owner, self.token, self.lasts
        mine, where = number_of(token), {}
        if role == "taking over":
            why = f"this server has claimed it with token {mine}, and is taking over"
        elif role == "follower":
            where = {} if owner is None else {"address": owner.address}
            who = "nobody is known to own it now" if owner is None else f"{owner.address} owns it"
            why = f"this server follows; {who}"
        elif carried and replaced(token, carried) and epoch_of(carried) not in self._past:
            yours = number_of(carried)
            why = f"it was replaced: this server owns it with token {mine}, and you know of token {yours}"
        elif steps and not lasts:
            why = f"the lease under which it has token {mine} has lapsed, so that another may own it by now"
        else:
            return
        raise NotOwnerError(
            f"expert {self.uid!r} cannot do this here: {why}. Nothing was changed; ask its owner, or again in a while",
            where,
        )


class Replica:
    """A backend that others have too. Thread-safe.

    ``backend`` asks for a permit before every step from now on. ``save`` makes durable what was reached, in ``store``;
    ``loaded`` is called when the state was replaced. ``failure``: what last went wrong with following or taking over.
    """

    def __init__(
        self,
        backend: ExpertBackend,
        until: Callable[[Lease], float],
        *,
        save: Callable[[float], object] = lambda max_wait: None,
        store: CheckpointStore | None = None,
        loaded: Callable[[], None] = lambda: None,
    ) -> None:
        self.backend = backend
        self.uid = backend.name
        self.leadership = Leadership(backend.name, until)
        self._lock = threading.RLock()  # between a state that comes in and a change of the role
        self._fence = Fence(backend.name)
        self.save = save
        self.incarnation = secrets.randbits(63)
        self.failure: Exception | None = None
        self.owner_version = StateVersion()  # as the owner last reported
        self.heard_at = 0.0  # when it last did
        self.has_state = False  # is there more here than first weights
        self.sent = self.received = self.received_bytes = 0
        self.broken = False  # a state could not be loaded, or only in part
        self.final = False  # nothing steps it here any more
        self.next_try = 0.0  # when to try again what failed
        self._seen_owner = False
        self._token = 0
        self._anew = float("-inf")  # when the directory was last seen to have begun anew
        self._store = store
        self._loaded = loaded
        backend.executor.updates.require_permit(partial(self.leadership.check, steps=True))

    @property
    def version(self) -> StateVersion:
        """The version of the state here."""
        token = self.leadership.token if self.leadership.role == "owner" else self._token
        return StateVersion(token, self.backend.steps, self.backend.executor.backward_batches)

    @property
    def may_lead(self) -> bool:
        """Whether to claim it when it is free: not where its state was never seen, or cannot be loaded."""
        return not self.broken and (self.has_state or not self._seen_owner)

    @property
    def settled(self) -> bool:
        """Whether it is owned here, or the owner's state is here."""
        leadership, owner = self.leadership, self.leadership.owner
        return leadership.role == "owner" or (
            owner is not None and self.heard_at > 0 and not replaced(self._token, owner.token)
        )

    @property
    def behind(self) -> int | None:
        """Steps that the owner is ahead, as it last reported; None before that."""
        if self.leadership.role != "follower":
            return 0
        return max(0, self.owner_version.steps - self.backend.steps) if self.heard_at else None

    def restored(self, token: int) -> None:
        """The state was loaded from a checkpoint that was made under this token."""
        self._token, self.has_state = token, True

    def follow(self, owner: Ownership | None) -> None:
        """Another server owns it, or none."""
        with self._lock:
            self._token = self.version.token
            self._seen_owner = self._seen_owner or owner is not None
            if owner is not None and owner.token and self._fence.listed(owner.token):
                self._anew = time.monotonic()
            self.leadership.become("follower", owner)

    def claimed(self, ownership: Ownership, lease: Lease) -> None:
        """This server owns it, but is not ready; no state of an older owner or epoch is loaded any more."""
        with self._lock:
            self._token = self.version.token
            self.leadership.become("taking over", ownership, lease)
            if self._fence.listed(ownership.token, granted=True):
                self._anew = time.monotonic()

    def quiet(self, lease: Lease) -> float:
        """Seconds for which no server may lead it yet, under this lease.

        A directory that began anew grants what the owner of before may still believe to own: until its lease, which
        is as long as this one, has surely ended.
        """
        return max(0.0, self._anew + lease.ttl - time.monotonic())

    def failed(self, error: Exception) -> None:
        """Following failed. Ignored if this server owns it by now."""
        with self._lock:
            if self.leadership.role == "follower":
                self.failure = error

    def lead(self, ownership: Ownership, lease: Lease) -> None:
        """This server owns it and is ready. Mini-batches that were open under an earlier owner do not go on."""
        with self._lock:
            self.has_state, self.failure = True, None
            self.incarnation = secrets.randbits(63)
            self.leadership.become("owner", ownership, lease)

    def encode(self, max_wait: float = 1.0) -> tuple[StateVersion, memoryview] | None:
        """The state as of now, as bytes; None if a batch is under way for longer than ``max_wait`` seconds."""
        lock = self.backend.executor.lock
        if not lock.acquire(timeout=max_wait):
            return None
        try:
            version = self.version
            state, keys = self.backend.state_dict(), self.backend.records.snapshot()
        finally:
            lock.release()
        self.sent += 1
        return version, serialize({"state": state, "records": keys()})

    def load(self, version: StateVersion, data: bytes | bytearray | memoryview, *, taking_over: bool = False) -> bool:
        """Load the state that an owner has sent; False if it is not wanted any more.

        Raises ``FencedError`` for the state of an owner that was replaced, ``DamagedError`` for bytes that are no
        state, and what module and optimizer raise; then this replica never becomes the owner.
        """
        value = deserialize(data)
        with self._lock:
            if not taking_over:
                self._fence.admit(version.token)
            if (self.leadership.role == "taking over") != taking_over or self.leadership.role == "owner":
                return False
            self._load(version, value["state"], value["records"])
            self.received += 1
            self.received_bytes += len(data)
            return True

    def restore(self) -> bool:
        """Load the newest checkpoint if it is newer than what is here. Raises what `CheckpointStore` raises."""
        found = None if self._store is None else self._store.load_newest(self.uid)
        if found is None:
            return False
        extra: dict[str, Any] = {} if found.extra is None else found.extra  # None: saved by hand, without keys
        version = StateVersion(extra.get("token", 0), found.step, found.state["backward_batches"])
        with self._lock:
            wanted = newer(version, self.version, self.leadership.token) or not self.has_state or self.broken
            if wanted:
                self._load(version, found.state, extra.get("records"))
            return wanted

    def _load(self, version: StateVersion, state: Any, records: Any) -> None:
        self.broken = True  # until all of it is loaded
        with self.backend.executor.lock:
            self.backend.load_state_dict(state)
            if records is not None:
                self.backend.records.load_state_dict(records)
        self.broken, self.has_state, self._token = False, True, version.token
        self._loaded()
