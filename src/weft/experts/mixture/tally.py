"""What a mixture did so far, in figures. Calls of several threads may be counted at once."""

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

from weft.experts.errors import reason_of

Direction = Literal["forward", "backward", "commit"]


@dataclass(frozen=True)
class MixtureStatistics:
    """Figures since the mixture was made.

    ``failed`` counts calls without a good answer, and those with bad rows, by `weft.experts.errors.reason_of`.
    ``dropped`` are pairs (sample, expert) beyond the capacity; ``zeroed`` samples that too few experts answered for;
    ``left_out`` experts that a commit went on without.
    ``living`` experts are in the directory's last snapshot.
    """

    forwards: int
    backwards: int
    commits: int
    forward_calls: int
    backward_calls: int
    commit_calls: int
    rows: int
    failed: dict[str, int]
    dropped: int
    zeroed: int
    left_out: int
    living: int


class Tally:
    """The counters behind `MixtureStatistics`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()

    def passed(self, direction: Direction, calls: int, rows: int, faults: Iterable[BaseException]) -> None:
        """One passage in a direction."""
        with self._lock:
            self._counts.update({f"{direction}s": 1, f"{direction}_calls": calls, "rows": rows})
            self._failed.update(reason_of(fault) for fault in faults)

    def count(self, what: str, many: int) -> None:
        """ "dropped", "zeroed" or "left_out"."""
        with self._lock:
            self._counts[what] += many

    def statistics(self, living: int) -> MixtureStatistics:
        """All of it."""
        names = {each.name for each in fields(MixtureStatistics)} - {"failed", "living"}
        with self._lock:
            counts = {name: self._counts[name] for name in names}
            return MixtureStatistics(**counts, failed=dict(self._failed), living=living)
