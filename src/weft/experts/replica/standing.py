"""Owner or follower: what a server may do with one replicated expert now.

    follower ── claimed ──> taking over ── led ──> owner ── lease ends ──> owner whose lease has lapsed
       ^                        |                    |                       |  answers forwards,
       '──────── another owns it ────────────────────┴───────────────────────┘  refuses to step

    may step     owner, and its lease, by the own clock and counted from before each renewal, lasts
    may answer   owner, also if its lease has lapsed: nobody is known to have replaced it

The check stands twice: where a call comes in, so that it is refused early, and where a step is about to be applied,
so that what waited too long is refused as well. Only the directory makes a server owner or follower; what a caller
says of a newer owner is believed for the caller's own call. Leases and fencing are as in `weft.experts.discovery`.
"""

import threading
import time
from collections.abc import Callable
from typing import Literal

from weft.experts.discovery import Lease, Ownership
from weft.experts.discovery.fencing import epoch_of, number_of, replaced
from weft.experts.wire import NotOwnerError

Role = Literal["owner", "taking over", "follower"]


class Standing:
    """Of one expert at one server. Thread-safe.

    Args:
        uid: the expert.
        until: until when (`time.monotonic`) a lease of this server surely lasts.
    """

    def __init__(self, uid: str, until: Callable[[Lease], float]) -> None:
        self.uid = uid
        self.role: Role = "follower"
        self.owner: Ownership | None = None
        self.lease: Lease | None = None
        self._until = until
        self._lock = threading.Lock()
        self._life = 0  # of the directory, as the last owner's token tells
        self._past: set[int] = set()  # its lives before

    @property
    def token(self) -> int:
        """The own fencing token; 0 for who does not own it."""
        owner = self.owner
        return owner.token if owner is not None and self.role != "follower" else 0

    @property
    def lasts(self) -> bool:
        """Whether the own lease surely lasts."""
        lease = self.lease
        return lease is not None and time.monotonic() < self._until(lease)

    @property
    def may_step(self) -> bool:
        """Whether it is the owner, for sure."""
        return self.role == "owner" and self.lasts

    def claim(self, ownership: Ownership, lease: Lease, role: Role) -> None:
        """The directory says that it is ours, under this lease; ``role`` says whether all is ready."""
        with self._lock:
            self.role, self.owner, self.lease = role, ownership, lease
            self._heard(ownership)

    def follow(self, owner: Ownership | None) -> None:
        """The directory says that it is another's, or nobody's."""
        with self._lock:
            self.role, self.owner, self.lease = "follower", owner, None
            self._heard(owner)

    def check(self, *, steps: bool, carried: int = 0) -> None:
        """Raise ``NotOwnerError`` if a call is not for this server.

        Args:
            steps: whether the call changes the expert, or only reads it.
            carried: the largest fencing token that its author knows; 0: none. One of a life of the directory that
                is known here to be over counts as none: the author made the call before it heard of that.
        """
        with self._lock:
            role, owner, token, lasts = self.role, self.owner, self.token, self.lasts
        where = {} if owner is None or role == "taking over" else {"address": owner.address}
        if role == "taking over":
            raise self._refusal(f"this server has claimed it with token {number_of(token)}, and is taking over", where)
        if role == "follower":
            who = "nobody is known to own it now" if owner is None else f"{owner.address} owns it"
            raise self._refusal(f"this server follows; {who}", where)
        if carried and replaced(token, carried) and epoch_of(carried) not in self._past:
            mine, yours = number_of(token), number_of(carried)
            text = f"it was replaced: this server owns it with token {mine}, and you know of token {yours}"
            raise self._refusal(text, {})
        if steps and not lasts:
            text = (
                f"the lease under which it has token {number_of(token)} has lapsed, so that another may own it by now"
            )
            raise self._refusal(text, {})

    def permit(self) -> None:
        """`check` for a step that is about to be applied."""
        self.check(steps=True)

    def _heard(self, owner: Ownership | None) -> None:
        life = 0 if owner is None else epoch_of(owner.token)
        if life and life != self._life:
            self._past = (self._past | {self._life}) - {0, life}
            self._life = life

    def _refusal(self, why: str, details: dict[str, str]) -> NotOwnerError:
        return NotOwnerError(
            f"expert {self.uid!r} cannot do this here: {why}. Nothing was changed; ask its owner, or again in a while",
            details,
        )
