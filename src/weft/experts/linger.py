"""Whether a batch waits a moment for others: while they keep coming, and only where that was seen to save time.

    at once     a ──┤ a, step ├── b c d ──┤ b c d, step ├──      two optimizer steps
    lingering   a b c d ──┤ a b c d, step ├──                    one, a moment later

A batch costs something by itself, whatever its size: an optimizer step above all. Two batches where one would have
done pay that twice. So a pool learns this cost from its own batches, by least squares over their rows, and a batch
waits for half of it, again from each who comes, and never longer than all of it: what waiting could save (the bargain
of who rents skis; Karlin et al., "Competitive Snoopy Caching", 1988). It does not wait once as many are there as
lately came together, so a lone caller never waits.

Whether waiting pays depends on who calls, so it is tried: some batches with it, some without it, and then whichever
took fewer seconds for a row, its waits included. From time to time the other way is tried again.
"""

from collections import deque

_KEPT = 0.9  # how much of what was learned of the cost stays when a batch is added
_LATELY = 4  # batches
_SPREAD = 0.05  # of rows, relative to their mean; batches that are all alike tell nothing
_PHASE = 8  # batches of one way
_PHASES = 16  # of the better way before the other is tried again
_WORTH = 0.97  # of the seconds for a row that it takes without waiting; else it is not worth the delay


class Linger:
    """Of one pool, which holds the lock. Times are seconds of one clock. ``most``: waits at most so many costs."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._sums = [0.0] * 5  # 1, rows, seconds, rows * rows, rows * seconds
        self.cost = 0.0
        """Seconds that a batch costs by itself, as far as is known."""
        self.waited = 0.0
        """Seconds for which batches have waited, in all."""
        self._sizes: deque[int] = deque(maxlen=_LATELY)  # of batches, with who came too late for them by a hair
        self._last = 0.0  # when somebody came
        self._asked: float | None = None  # since when the batch that waits could have begun
        self._told = False  # whether who asked was told to wait
        self._begun: float | None = None
        self._trial = _Trial()

    def came(self, now: float, tasks: int) -> bool:
        """A task came, and so many wait now. Whether who works on batches must be told; not if he waits already."""
        self._last = now
        if self._begun is not None and now <= self._begun + self._gap():
            self._sizes[-1] += 1
        return not self._told or self._whole(tasks)

    def begin(self, now: float, tasks: int, *, patient: bool) -> float:
        """When a batch of so many tasks, which could begin now, should begin; ``now`` if they are not patient."""
        if self._asked is None:
            self._asked = now
        later = now
        if patient and self.cost and self._trial.waits and not self._whole(tasks):
            later = min(max(self._last, self._asked) + self._gap(), self._asked + self._most * self.cost)
        self._told = later > now
        return max(now, later)

    def nobody(self) -> None:
        """Nothing waits any more, or nothing that could begin."""
        self._asked, self._told = None, False

    def began(self, now: float, tasks: int) -> None:
        """A batch of so many tasks has begun."""
        if self._asked is not None:
            waited = max(0.0, now - self._asked)
            self.waited += waited
            self._trial.seconds += waited
        self._asked, self._told, self._begun = None, False, now
        self._sizes.append(tasks)

    def ended(self, rows: int, seconds: float) -> None:
        """A batch of so many rows took so long."""
        terms = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._sums = [_KEPT * old + new for old, new in zip(self._sums, terms, strict=True)]
        count, r, s, rr, rs = self._sums
        spread = rr / count - (r / count) ** 2
        if spread > (_SPREAD * r / count) ** 2:
            slope = max(0.0, (rs / count - r * s / count**2) / spread)
            self.cost = max(0.0, s / count - slope * r / count)
        self._trial.ended(rows, seconds)

    def _gap(self) -> float:
        return self._most * self.cost / 2

    def _whole(self, tasks: int) -> bool:
        return tasks >= max(self._sizes, default=1)


class _Trial:
    """Which of the two ways is used now, and what each of them took for a row."""

    def __init__(self) -> None:
        self.waits = False
        self.seconds = 0.0  # of this phase
        self._rows = 0
        self._batches = 0
        self._phases = 0
        self._price: dict[bool, float] = {}

    def ended(self, rows: int, seconds: float) -> None:
        self.seconds += seconds
        self._rows += rows
        self._batches += 1
        if self._batches < _PHASE:
            return
        price = self.seconds / max(1, self._rows)
        self._price[self.waits] = (self._price.get(self.waits, price) + price) / 2
        self.seconds, self._rows, self._batches = 0.0, 0, 0
        self._phases += 1
        better = self._price.get(True, 0.0) < _WORTH * self._price[False]
        other = self._phases % _PHASES == 0
        self.waits = better is not other
