"""How far an expert is, as of the last answer: its optimizer steps, and which of them a crash cannot take back.

steps 41, incarnation 7 ── answers may overtake each other ──> the larger number
steps 35, incarnation 8 ── the server was started again ─────> what it says now
"""

import threading

from weft.experts.service import Receipt


class Progress:
    """Of one expert. Thread-safe. Both are None before the first answer."""

    def __init__(self) -> None:
        self.steps: int | None = None
        self.receipt: Receipt | None = None
        self._lock = threading.Lock()

    @property
    def durable_step(self) -> int | None:
        """The last step that a crash of the server does not lose; None: not known, or none."""
        receipt = self.receipt
        return None if receipt is None else receipt.durable

    def heard(self, steps: int, receipt: Receipt) -> None:
        """An answer said so."""
        with self._lock:
            if self.receipt is None or self.receipt.incarnation != receipt.incarnation:
                self.steps = steps
            else:
                self.steps = max(self.steps or 0, steps)
            self.receipt = receipt
