"""One replicated expert at one server: its state, given away and taken in.

    take     mark, module, optimizer, schedule, steps, idempotency keys ──> safetensors bytes       (see checkpoint/)
    receive  the same bytes from its owner, if no newer owner was heard of ──> loaded, all of one step
    improve  the newest checkpoint, if that is newer than what is here

What is loaded comes from servers that may own the expert, and is still read as a stranger's: no code is run.
"""

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from weft.experts.checkpoint import CheckpointStore
from weft.experts.discovery import Fence, Lease, Ownership
from weft.experts.discovery.fencing import replaced
from weft.experts.expert import ExpertBackend
from weft.experts.replica.mark import Mark, newer
from weft.experts.replica.standing import Standing
from weft.experts.serialization import deserialize, serialize


class Replica:
    """A backend that others have too. Thread-safe.

    Args:
        backend: the expert. It is told to ask for a permit before every step.
        until: see `Standing`.
        save: makes durable what was reached, where that is wanted.
        store: where checkpoints lie.
        loaded: called when the state was replaced.

    ``failure`` is what last went wrong with following or taking over; None if nothing does now.
    """

    def __init__(
        self,
        backend: ExpertBackend,
        until: Callable[[Lease], float],
        *,
        save: Callable[[], object] | None = None,
        store: CheckpointStore | None = None,
        loaded: Callable[[], None] | None = None,
    ) -> None:
        self.backend = backend
        self.uid = backend.name
        self.standing = Standing(backend.name, until)
        self.lock = threading.RLock()  # between a state that comes in and a change of the standing
        self.fence = Fence()
        self.save = save or (lambda: None)
        self.incarnation = secrets.randbits(63)
        self.failure: Exception | None = None
        self.ahead = Mark()  # how far the owner is, as it last told
        self.heard = 0.0  # when it last told
        self.has_state = False  # is there more here than first weights
        self.taken = self.received = self.received_bytes = 0
        self.broken = False  # a state could not be loaded, or only in part
        self.final = False  # nothing steps it here any more
        self._seen_owner = False
        self._token = 0
        self._anew = float("-inf")  # when the directory was last seen to have begun anew
        self._store = store
        self._loaded = loaded or (lambda: None)
        backend.executor.permit = self.standing.permit

    @property
    def mark(self) -> Mark:
        """How far the state here is."""
        token = self.standing.token if self.standing.role == "owner" else self._token
        return Mark(token, self.backend.steps, self.backend.executor.backward_batches)

    @property
    def may_lead(self) -> bool:
        """Whether to claim it when it is free: not where its state was never seen, or cannot be loaded."""
        return not self.broken and (self.has_state or not self._seen_owner)

    @property
    def settled(self) -> bool:
        """Whether it is owned here, or the owner's state is here."""
        standing, owner = self.standing, self.standing.owner
        return standing.role == "owner" or (
            owner is not None and self.heard > 0 and not replaced(self._token, owner.token)
        )

    @property
    def behind(self) -> int | None:
        """Steps that the owner is ahead, as it last told; None if it has told nothing yet."""
        if self.standing.role != "follower":
            return 0
        return max(0, self.ahead.steps - self.backend.steps) if self.heard else None

    def restored(self, token: int) -> None:
        """The state was loaded from a checkpoint that was made under this token."""
        self._token, self.has_state = token, True

    def follow(self, owner: Ownership | None) -> None:
        """Another owns it, or nobody."""
        with self.lock:
            if self.standing.role != "follower":
                self._token = self.mark.token
            self._seen_owner = self._seen_owner or owner is not None
            if owner is not None and owner.token and self.fence.listed(self.uid, owner.token):
                self._anew = time.monotonic()
            self.standing.follow(owner)

    def claimed(self, ownership: Ownership, lease: Lease) -> None:
        """It is ours, but not ready; from now on no older owner's state is let in, nor one of an earlier life."""
        with self.lock:
            self._token = self.mark.token
            self.standing.claim(ownership, lease, "taking over")
            if self.fence.listed(self.uid, ownership.token, granted=True):
                self._anew = time.monotonic()

    def quiet(self, lease: Lease) -> float:
        """Seconds for which nobody may lead it yet, under this lease.

        A directory that began anew grants what the owner of before may still believe to own: until its lease, which
        is as long as this one, has surely ended.
        """
        return max(0.0, self._anew + lease.ttl - time.monotonic())

    def failed(self, error: Exception) -> None:
        """Following went wrong. It matters no more to who owns it by now."""
        with self.lock:
            if self.standing.role == "follower":
                self.failure = error

    def lead(self, ownership: Ownership, lease: Lease) -> None:
        """It is ours and ready. Mini-batches that were open under an earlier owner do not go on."""
        with self.lock:
            self.has_state, self.failure = True, None
            self.incarnation = secrets.randbits(63)
            self.standing.claim(ownership, lease, "owner")

    def take(self, patience: float = 1.0) -> tuple[Mark, memoryview] | None:
        """The state as of now; None if a batch is under way for longer than ``patience`` seconds."""
        lock = self.backend.executor.lock
        if not lock.acquire(timeout=patience):
            return None
        try:
            mark = self.mark
            state, keys = self.backend.state_dict(), self.backend.records.snapshot()
        finally:
            lock.release()
        self.taken += 1
        return mark, serialize({"state": state, "records": keys()})

    def receive(self, mark: Mark, data: bytes | memoryview, *, taking_over: bool = False) -> bool:
        """Take in what an owner has sent; False if it is not wanted any more.

        Raises ``FencedError`` for the state of an owner that was replaced, ``DamagedError`` for bytes that are no
        state, and what module and optimizer raise; then nobody makes this replica the owner any more.
        """
        value = deserialize(data)
        with self.lock:
            if not taking_over:
                self.fence.admit(self.uid, mark.token)
            if (self.standing.role == "taking over") != taking_over or self.standing.role == "owner":
                return False
            self._load(mark, value["state"], value["records"])
            self.received += 1
            self.received_bytes += len(data)
            return True

    def improve(self) -> bool:
        """Load the newest checkpoint if it is newer than what is here. Raises what `CheckpointStore` raises."""
        found = None if self._store is None else self._store.load_newest(self.uid)
        if found is None:
            return False
        extra: dict[str, Any] = {} if found.extra is None else found.extra  # None: saved by hand, without keys
        mark = Mark(extra.get("token", 0), found.step, found.state["backward_batches"])
        with self.lock:
            wanted = newer(mark, self.mark, self.standing.token) or not self.has_state or self.broken
            if wanted:
                self._load(mark, found.state, extra.get("records"))
            return wanted

    def told(self, mark: Mark) -> None:
        """The owner is as far as this."""
        self.ahead, self.heard = mark, time.monotonic()

    def _load(self, mark: Mark, state: Any, records: Any) -> None:
        self.broken = True  # until all of it is loaded
        with self.backend.executor.lock:
            self.backend.load_state_dict(state)
            if records is not None:
                self.backend.records.load_state_dict(records)
        self.broken, self.has_state, self._token = False, True, mark.token
        self._loaded()
