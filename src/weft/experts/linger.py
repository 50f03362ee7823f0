"""Whether a batch waits a moment for others: while some are out who will come back, and only where that saves time.

    at once     a ──┤ a, step ├── b c d ──┤ b c d, step ├──      two optimizer steps
    lingering   a b c d ──┤ a b c d, step ├──                    one, a moment later

A batch costs something by itself, whatever its size: an optimizer step above all. Two batches where one would have
done pay that twice. So a pool learns this cost from its own batches, by least squares over their rows, and a batch
waits for no longer than that: what waiting could save (the bargain of who rents skis; Karlin et al., "Competitive
Snoopy Caching", 1988). The pools of one expert are a `Company`: their callers are the same, and who is together in one
pool comes together to the next, so they save the costs of all pools.

Somebody is *out* if more were under way lately, in all pools, than are now. A lone caller waits for nobody; and nobody
waits for those who wait in another pool.

Whether waiting pays depends on who calls, so it is tried: some batches with it, some without it, and then whichever
took less of the device's time for a row, idle time included. From time to time the other way is tried again.
"""

_KEPT = 0.9  # how much of what was learned of the cost stays when a batch is added
_LATELY = 4  # batches
_SPREAD = 0.05  # of rows, relative to their mean; batches that are all alike tell nothing
_PHASE = 12  # batches of one way
_SETTLE = 4  # of them, that do not count: callers fall in, or apart
_PHASES = 16  # of the better way before the other is tried again
_WORTH = 0.97  # of the seconds for a row that it takes without waiting; else it is not worth the delay
_PAUSE = 0.1  # seconds, or two batches; whoever comes back later has done something else


class Company:
    """Pools with the same callers, worked on by one thread. What other threads tell may be late, but not torn."""

    def __init__(self) -> None:
        self.pools: list[Linger] = []
        self.trial = _Trial()
        self.idle = 0.0
        """Seconds for which the device had nothing to do before the last batch, in all."""
        self._peaks = (0,) * _LATELY  # how many were under way at most, from batch to batch
        self._peak = 0
        self._slowest = 0.0  # of the last batches, in seconds

    @property
    def cost(self) -> float:
        """Seconds that callers cost who are not together: in every pool, those that a batch costs by itself."""
        return sum([each.cost for each in self.pools])

    def out(self) -> int:
        """How many were under way lately who are not now."""
        return max(self._peaks) - self._seen()

    def began(self, idle: float) -> float:
        """A batch has begun: the seconds for which the device had nothing to do before it, since the last one."""
        self._peaks = (*self._peaks[1:], self._peak)
        self._peak = 0
        self._seen()
        idle, self.idle = idle - self.idle, idle
        return max(0.0, idle)

    def ended(self, pool: "Linger", rows: int, idle: float, seconds: float) -> None:
        """A batch of so many rows took so long, and the device had had nothing to do before it."""
        self._slowest = max(seconds, _KEPT * self._slowest)
        self.trial.ended(pool, rows, seconds + min(idle, max(_PAUSE, 2 * self._slowest)))

    def _seen(self) -> int:
        now = sum([each.waiting + each.running for each in self.pools])
        self._peak = max(self._peak, now)
        return now


class Linger:
    """Of one pool, which holds the lock. Times are seconds of one clock. ``most``: waits at most so many costs."""

    def __init__(self, most: float, company: Company | None = None) -> None:
        self._most = most
        self._company = company or Company()
        self._company.pools.append(self)
        self._sums = [0.0] * 5  # 1, rows, seconds, rows * rows, rows * seconds
        self.cost = 0.0
        """Seconds that a batch of this pool costs by itself; all that it costs, as long as all are alike."""
        self._known = False
        self.waited = 0.0
        """Seconds for which batches have waited, in all."""
        self.waiting = self.running = 0
        """Tasks, as of the last word of the pool."""
        self._idle = 0.0  # before the batch that runs
        self._asked: float | None = None  # when who asked was told to wait for the first time
        self._told = False  # whether he was told so the last time

    @property
    def longest(self) -> float:
        """Seconds for which a batch may wait."""
        return self._most * self._company.cost

    def came(self, tasks: int) -> bool:
        """A task came, and so many wait now. Whether who works on batches must be told; not if he waits already."""
        self.waiting = tasks
        out = self._company.out()
        return not self._told or out <= 0

    def begin(self, now: float, tasks: int, *, patient: bool) -> float:
        """When a batch of so many tasks, which could begin now, should begin; ``now`` if they are not patient."""
        self.waiting = tasks
        self._told = False
        if patient and self._company.trial.waits and self._company.out() > 0:
            self._asked = now if self._asked is None else self._asked
            self._told = now < self._asked + self.longest
        return now if not self._told or self._asked is None else self._asked + self.longest

    def nobody(self, tasks: int) -> None:
        """Nothing can begin; so many wait for something else."""
        self.waiting, self._asked, self._told = tasks, None, False

    def began(self, now: float, tasks: int, left: int, idle: float) -> None:
        """A batch of so many tasks has begun, and others are left. ``idle``: of the device so far, in seconds."""
        if self._asked is not None:
            self.waited += max(0.0, now - self._asked)
        self._asked, self._told = None, False
        self.waiting, self.running = left, tasks
        self._idle = self._company.began(idle)

    def ended(self, rows: int, seconds: float) -> None:
        """A batch of so many rows took so long; with 0 rows it failed, which tells nothing."""
        self.running = 0
        if not rows:
            return
        terms = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._sums = [_KEPT * old + new for old, new in zip(self._sums, terms, strict=True)]
        count, r, s, rr, rs = self._sums
        spread = rr / count - (r / count) ** 2
        if spread > (_SPREAD * r / count) ** 2:
            slope = max(0.0, (rs / count - r * s / count**2) / spread)
            self.cost, self._known = max(0.0, s / count - slope * r / count), True
        elif not self._known:
            self.cost = s / count
        self._company.ended(self, rows, self._idle, seconds)


class _Trial:
    """Which of the two ways is used now, and what each of them took for a row of each pool."""

    def __init__(self) -> None:
        self.waits = False
        self._sums: dict[Linger, tuple[float, int]] = {}  # seconds and rows, of this phase
        self._batches = self._phases = 0
        self._prices: dict[bool, dict[Linger, float]] = {False: {}, True: {}}

    def ended(self, pool: Linger, rows: int, seconds: float) -> None:
        self._batches += 1
        if self._batches > _SETTLE:
            before = self._sums.get(pool, (0.0, 0))
            self._sums[pool] = before[0] + seconds, before[1] + rows
        if self._batches < _PHASE:
            return
        prices = self._prices[self.waits]
        for each, (took, count) in self._sums.items():
            prices[each] = (prices.get(each, took / count) + took / count) / 2
        self._sums, self._batches = {}, 0
        self._phases += 1
        other = self._phases % _PHASES == 0
        self.waits = self._pays() is not other

    def _pays(self) -> bool:
        """Whether waiting is worth it, or was never tried."""
        without, waiting = self._prices[False], self._prices[True]
        known = without.keys() & waiting.keys()
        return not known or sum([waiting[each] for each in known]) < _WORTH * sum([without[each] for each in known])
