"""Exchanges of a process group through its store, for calls that replicas of a pipe make together.

A walk reaches the ranks of one pipe only. A collective of gloo reaches all, but its errors name no rank, and a rank
that waits for a third one notices the loss after the timeout. Here every wait looks for lost ranks, and the first rank
that finds one leaves a note for all others.
"""

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.distributed import ProcessGroup, get_process_group_ranks

from torchweft.core.errors import RankLostError
from torchweft.pipeline.processes.lanes import PrefixStore, store_of, timeout_of
from torchweft.pipeline.processes.membership import RankProcess

_POLL_SECONDS, _LEAVE_SECONDS = 0.02, 5.0
_NOTE = "lost"


class StoreExchange:
    """One call of all ranks of `group`, named `what`. `find_lost` gives the ranks known to be gone, in words."""

    def __init__(self, group: ProcessGroup, what: str, find_lost: Callable[[], list[str]]) -> None:
        self.rank, self._size, self._what, self._find_lost = group.rank(), group.size(), what, find_lost
        self._ranks, self._timeout, self._count = get_process_group_ranks(group), timeout_of(group), 0
        store = store_of(group)
        # Calls follow each other in one order on all ranks. Each has its own keys.
        uses = store.add(f"torchweft/exchange/{self.rank}", 1)
        self._store: Any = PrefixStore(f"torchweft/exchange/{uses}", store)
        me = RankProcess(self._ranks[self.rank], socket.gethostname(), os.getpid())
        self._store.set(f"member/{self.rank}", str(me))

    def gather(self, content: bytes) -> list[bytes]:
        """The contents of all ranks. Raises RankLostError on all of them if one is gone or does not come in time."""
        keys = [f"{self._count}/{rank}" for rank in range(self._size)]
        deadline, pause = time.monotonic() + self._timeout, 1e-3
        try:
            self._store.set(keys[self.rank], content)
            while not self._store.check(keys):
                text = self._loss(keys, late=time.monotonic() > deadline)
                # Asked again, because a rank can leave right after its last exchange.
                if text and not self._store.check(keys):
                    self._store.set(_NOTE, text)
                    raise RankLostError(f"{text} (found in {self._what})")
                time.sleep(pause)
                pause = min(2 * pause, _POLL_SECONDS)
            contents: list[bytes] = [self._store.get(key) for key in keys]
            # All ranks have read the exchange before this one, because all have begun this one.
            if self._count:
                self._store.delete_key(f"{self._count - 1}/{self.rank}")
        except RuntimeError as error:
            if isinstance(error, RankLostError):
                raise
            raise RankLostError(f"the process with the store of the group is gone, in {self._what}: {error}") from error
        except KeyboardInterrupt:
            with suppress(RuntimeError):
                self._store.set(_NOTE, f"{self._name_of(self.rank)} was interrupted")
            raise
        self._count += 1
        return contents

    def close(self) -> None:
        """Leave after the last exchange. The first rank leaves last, because its process can have the store."""
        deadline = time.monotonic() + _LEAVE_SECONDS
        with suppress(RuntimeError):
            left = self._store.add("left", 1)
            while not self.rank and left < self._size and time.monotonic() < deadline and not self._find_lost():
                time.sleep(_POLL_SECONDS)
                left = self._store.add("left", 0)

    def _loss(self, keys: list[str], *, late: bool) -> str:
        if self._store.check([_NOTE]):
            return self._store.get(_NOTE).decode()
        if found := next(iter(self._find_lost()), ""):
            return found
        missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])] if late else []
        names = [self._name_of(rank) for rank in missing]
        return f"{', '.join(names)} did not take part within {self._timeout:g} s" if names else ""

    def _name_of(self, rank: int) -> str:
        key = f"member/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else f"rank {self._ranks[rank]}"
