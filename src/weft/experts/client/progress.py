"""How far an expert is, as of the last answer: its optimizer steps, and which of them a crash cannot take back.

steps 41, incarnation 7 ── answers may overtake each other ──> the larger number
steps 35, incarnation 8 ── the server was started again ─────> what it says now; fewer: a `StepsLostWarning`
steps 42, incarnation 7 ── a late answer of the one before ──> passed over
"""

import threading
import warnings
from collections import deque
from collections.abc import Callable

from weft.core.errors import WeftError
from weft.experts.errors import StepsLostWarning
from weft.experts.wire.service import Receipt

_PAST = 16  # incarnations whose late answers are known


class Progress:
    """Of one expert; ``server`` gives the address of its server now. Thread-safe. Both numbers are None before the
    first answer; ``steps_lost`` counts steps that servers came back without."""

    def __init__(self, uid: str, server: Callable[[], str]) -> None:
        self.steps: int | None = None
        self.receipt: Receipt | None = None
        self.steps_lost = 0
        self._uid, self._server = uid, server
        self._past: deque[int] = deque(maxlen=_PAST)
        self._lock = threading.Lock()

    @property
    def durable_step(self) -> int | None:
        """The last step that a crash of the server does not lose; None: not known, or none."""
        receipt = self.receipt
        return None if receipt is None else receipt.durable

    def heard(self, steps: int, receipt: Receipt) -> None:
        """An answer said so. Warns with `StepsLostWarning` if the expert has gone back."""
        with self._lock:
            if receipt.incarnation in self._past:
                return
            before = self.steps or 0
            if self.receipt is None or self.receipt.incarnation == receipt.incarnation:
                self.steps, lost = max(before, steps), 0
            else:
                self._past.append(self.receipt.incarnation)
                self.steps, lost = steps, max(0, before - steps)
                self.steps_lost += lost
            self.receipt = receipt
        if lost:
            warnings.warn(StepsLostWarning(self._uid, before, steps, self._address()), stacklevel=2)

    def _address(self) -> str:
        try:
            return self._server()
        except WeftError:  # the directory knows nobody any more
            return "an address that is not known now"
