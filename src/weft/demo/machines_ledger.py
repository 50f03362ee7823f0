"""What a trainer sent to each expert and what was acknowledged: its half of the proof that a step happens once.

    mixture ── submit ──> Noted ──> GrpcTransport ──> server
                            |  <──────── answer ──────────┘
                            └── Ledger: address, expert: keys sent, keys acknowledged, last step, last durable step

So that something is proved, now and then the answer to a backward is thrown away, as a network may do: the mixture
sends the call again under its key, and the server is to answer without a second step.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from weft.experts.client import GrpcTransport
from weft.experts.client.transport import Transport, TransportStatistics
from weft.experts.wire import Call, Kind, LostError, Received
from weft.experts.wire.service import read_receipt

_WORK = (Kind.FORWARD, Kind.BACKWARD)


@dataclass
class Account:
    """One expert at one address. ``durable``: the last step that was reported to be safe there; None: none."""

    sent: set[str] = field(default_factory=set[str])
    acknowledged: set[str] = field(default_factory=set[str])
    step: int = 0
    durable: int | None = None

    def told(self) -> dict[str, Any]:
        """In plain numbers, for another process."""
        counts = {"sent": len(self.sent), "acknowledged": len(self.acknowledged)}
        return {**counts, "step": self.step, "durable": self.durable}


class Ledger:
    """Thread-safe. Of all backwards answered, the answer to every ``lose_every``-th is thrown away once; 0: none."""

    def __init__(self, lose_every: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._clock = lose_every, clock
        self._lock = threading.Lock()
        self._accounts: dict[tuple[str, str], Account] = {}
        self._first: dict[str, float] = {}
        self._errors: Counter[str] = Counter()
        self._answers = 0
        self._lost: set[str] = set()

    def open(self, address: str) -> Transport:
        """A way to this address whose calls are noted: ``open_transport`` of `Connections`."""
        return Noted(GrpcTransport(address), self)

    def sent(self, address: str, call: Call) -> None:
        """A call leaves."""
        if call.header.kind is Kind.BACKWARD:
            with self._lock:
                self._account(address, call).sent.add(call.header.key)

    def answered(self, address: str, call: Call, answer: Received) -> bool:
        """An answer came; whether it is passed on."""
        receipt, key = read_receipt(answer.header.data), call.header.key
        with self._lock:
            self._first.setdefault(address, self._clock())
            if call.header.kind is Kind.BACKWARD and self._is_lost(key):
                return False
            account = self._account(address, call)
            account.step = max(account.step, answer.header.step)
            if receipt.durable is not None:
                account.durable = max(account.durable or 0, receipt.durable)
            if call.header.kind is Kind.BACKWARD:
                account.acknowledged.add(key)
            return True

    def failed(self, error: BaseException) -> None:
        """A call ended without an answer."""
        with self._lock:
            self._errors[type(error).__name__] += 1

    def first_answers(self) -> dict[str, float]:
        """When each address answered for the first time."""
        with self._lock:
            return dict(self._first)

    def told(self) -> dict[str, Any]:
        """All of it in plain numbers: accounts by address and expert, errors by class, answers thrown away."""
        with self._lock:
            accounts: dict[str, dict[str, Any]] = {}
            for (address, uid), account in self._accounts.items():
                accounts.setdefault(address, {})[uid] = account.told()
            return {"accounts": accounts, "errors": dict(self._errors), "lost": len(self._lost)}

    def _account(self, address: str, call: Call) -> Account:
        return self._accounts.setdefault((address, call.header.uid), Account())

    def _is_lost(self, key: str) -> bool:
        self._answers += 1
        if not self._every or self._answers % self._every or key in self._lost:
            return False
        self._lost.add(key)
        return True


class Noted:
    """A `Transport` that tells a `Ledger`."""

    def __init__(self, inner: Transport, ledger: Ledger) -> None:
        self._inner, self._ledger = inner, ledger

    @property
    def address(self) -> str:
        """See `Transport.address`."""
        return self._inner.address

    def submit(self, call: Call, timeout: float) -> "Future[Received]":
        """See `Transport.submit`."""
        if call.header.kind not in _WORK:
            return self._inner.submit(call, timeout)
        self._ledger.sent(self.address, call)
        outer: Future[Received] = Future()
        inner = self._inner.submit(call, timeout)
        inner.add_done_callback(partial(self._pass_on, call, outer))
        outer.add_done_callback(lambda done: inner.cancel() if done.cancelled() else None)
        return outer

    def close(self) -> None:
        """See `Transport.close`."""
        self._inner.close()

    def statistics(self) -> TransportStatistics:
        """See `Transport.statistics`."""
        return self._inner.statistics()

    def _pass_on(self, call: Call, outer: "Future[Received]", done: "Future[Received]") -> None:
        if done.cancelled() or not outer.set_running_or_notify_cancel():
            outer.cancel()
            return
        try:
            answer = done.result()
            if not self._ledger.answered(self.address, call, answer):
                raise LostError(f"an answer of {self.address} was thrown away on purpose")
        except Exception as error:
            self._ledger.failed(error)
            outer.set_exception(error)
        else:
            outer.set_result(answer)
