"""One expert as its server keeps it: restored at the start, saved now and then, with what is durable.

    restore   newest whole checkpoint ──> weights, optimizer, schedule, steps, idempotency keys
    save      the same, all of one step, under the expert's lock; written outside of it
    durable   the step of the last checkpoint that is on the disk: what a crash cannot take back

Keys and weights are saved together. So a backward that is sent again after a crash either finds its key, and its
step is in the weights, or finds neither, and is applied now: once in both cases.
"""

import threading
from typing import Any

from weft.core.errors import UsageError
from weft.experts.backend import ExpertBackend
from weft.experts.checkpoint import CheckpointStore
from weft.experts.service import Description, Receipt, describe, read_description


class Served:
    """A backend, and where it is saved (None: nowhere). ``incarnation`` is the server's."""

    def __init__(self, backend: ExpertBackend, store: CheckpointStore | None, incarnation: int) -> None:
        self.backend = backend
        self.durable: int | None = None
        self.restored: int | None = None
        self._store = store
        self._incarnation = incarnation
        self._saving = threading.Lock()
        self._check()

    def describe(self) -> bytes:
        """What an ``info`` call answers."""
        return describe(self.backend.get_info(), self.durable, self._incarnation)

    def receipt(self) -> bytes:
        """What goes with every result."""
        return Receipt(self.durable, self._incarnation).to_bytes()

    def restore(self) -> None:
        """Go on from the newest checkpoint; or make the first one, so that a crash keeps even the first weights.

        Raises what `CheckpointStore` raises, ``UsageError`` if the checkpoint is of another kind of expert, and what
        module and optimizer raise when they load it.
        """
        if self._store is None:
            return
        found = self._store.load_newest(self.backend.name)
        if found is None:
            self.save()
            return
        try:
            self.backend.load_state_dict(found.state)
        except Exception as error:
            error.add_note(f"while expert {self.backend.name!r} was restored from {found.path}")
            raise
        self.backend.records.load_state_dict(found.extra["records"])
        self.durable = self.restored = found.step

    def save(self) -> bool:
        """Make what was reached durable; False if it is already. Raises what `CheckpointStore.save` raises."""
        if self._store is None:
            return False
        with self._saving:
            if self.durable == self.backend.steps:
                return False
            with self.backend.engine.lock:
                state, keys = self.backend.state_dict(), self.backend.records.state_dict()
            step: int = state["steps"]
            self._store.save(self.backend.name, state, step, {"records": keys})
            self.durable = step
            return True

    def statistics(self) -> dict[str, Any]:
        """What the checkpoints of this expert are at."""
        return {"durable": self.durable, "restored": self.restored}

    def _check(self) -> None:
        """What cannot be told to a client had better be known before one asks."""
        found: Description = read_description(self.describe())
        if found.name != self.backend.name:
            raise UsageError(f"expert {self.backend.name!r} has a name that does not survive the wire")
