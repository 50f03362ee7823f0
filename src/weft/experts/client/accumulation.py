"""The mini-batch that a remote expert is in the middle of: which gradients are waiting for its commit.

backward ─┐
backward ─┼─ one name, one incarnation of the server ── commit ──> one step, and a new name
backward ─┘
             a backward failed, or the server was started again in between: torn; nothing of it is applied
"""

import threading
import uuid

from weft.experts.errors import CommitError


class Accumulation:
    """Thread-safe: the micro-batches of a mini-batch may come from several threads."""

    def __init__(self, uid: str) -> None:
        self._uid = uid
        self._lock = threading.Lock()
        self._renew()

    @property
    def name(self) -> str:
        """What the mini-batch is called."""
        return self._name

    def added(self, name: str, incarnation: int) -> None:
        """A gradient was added at this incarnation of the server."""
        with self._lock:
            if name == self._name:
                self._incarnations.add(incarnation)

    def failed(self, name: str, error: BaseException) -> None:
        """A gradient of this mini-batch was not added."""
        with self._lock:
            if name == self._name:
                self._failure = self._failure or f"{type(error).__name__}: {error}"

    @property
    def fault(self) -> str | None:
        """Why a part of the gradients is missing; None if all are there."""
        with self._lock:
            return self._torn()

    def ready(self) -> tuple[str, int] | None:
        """The name and incarnation to commit; None if nothing was added.

        Raises ``CommitError`` if the mini-batch is torn: then a part of its gradients is missing.
        """
        with self._lock:
            why = self._torn()
            if why is not None:
                raise CommitError(
                    f"a mini-batch of expert {self._uid!r} is not whole: {why}. Call discard() and run it again"
                )
            return None if not self._incarnations else (self._name, next(iter(self._incarnations)))

    def end(self, name: str) -> None:
        """This mini-batch was committed, or given up: begin the next."""
        with self._lock:
            if name == self._name:
                self._renew()

    def give_up(self) -> str | None:
        """Begin the next; the name of this one, if a server may have something of it."""
        with self._lock:
            name = self._name if self._incarnations or self._failure is not None else None
            self._renew()
            return name

    def _torn(self) -> str | None:
        return "the server was started again in the middle of it" if len(self._incarnations) > 1 else self._failure

    def _renew(self) -> None:
        self._name = uuid.uuid4().hex
        self._incarnations: set[int] = set()
        self._failure: str | None = None
