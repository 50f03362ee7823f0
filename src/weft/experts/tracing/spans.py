"""What wants to hear of the work is an `Observer`: two methods, so that any tracing system fits behind it.

    client          | network thread        | runtime thread
    trace ──────────┼─> weft.receive ───────┼─> weft.queue (arrival to now) ─> weft.batch ── weft.step within it
      traceparent, in the metadata of the   |       one for each task             one for all of them, which links
      connection: its trace, or none        |                                     to every task that it joined

A trace is told as W3C's ``traceparent`` (Trace Context, 2021): ``00-<trace>-<span>-<flags>``. Without an observer
nothing of this is there: no call of a function, no test.
"""

import logging
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

_LOG = logging.getLogger("weft.experts.tracing")
Attributes = Mapping[str, str | int | float]
"""``weft.expert``, ``weft.direction``, ``weft.client``, ``weft.tasks``, ``weft.rows``, ``weft.steps``."""


@runtime_checkable
class Observer(Protocol):
    """Hears of the work, in the thread that does it, and must not wait."""

    def span(
        self, name: str, attributes: Attributes, *, parents: Sequence[str] = (), waited: float = 0.0
    ) -> AbstractContextManager[object]:
        """Surrounds a piece of work; what the work raises goes through it.

        ``parents`` are traceparents: one is the parent, several are links, with none it belongs to the span that is
        open in this thread. It began ``waited`` seconds ago.
        """
        ...

    def current(self) -> str | None:
        """The traceparent of the span that is open in this thread."""
        ...


class Shielded:
    """An observer whose faults are logged at ``weft.experts.tracing`` and hurt nobody."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    @contextmanager
    def span(
        self, name: str, attributes: Attributes, *, parents: Sequence[str] = (), waited: float = 0.0
    ) -> Generator[None]:
        """See `Observer.span`."""
        around = self._entered(name, attributes, parents, waited)
        try:
            yield
        except BaseException:
            self._leave(around, failed=True)
            raise
        self._leave(around, failed=False)

    def current(self) -> str | None:
        """See `Observer.current`."""
        try:
            return self._observer.current()
        except Exception:
            _LOG.exception("an observer failed to tell its trace")
            return None

    def _entered(
        self, name: str, attributes: Attributes, parents: Sequence[str], waited: float
    ) -> AbstractContextManager[object] | None:
        try:
            around = self._observer.span(name, attributes, parents=parents, waited=waited)
            around.__enter__()
        except Exception:
            _LOG.exception("an observer failed at the start of %s", name)
            return None
        return around

    def _leave(self, around: AbstractContextManager[object] | None, *, failed: bool) -> None:
        if around is None:
            return
        what = sys.exc_info() if failed else (None, None, None)
        try:
            around.__exit__(*what)
        except Exception as error:
            if error is not what[1]:  # a context manager may raise again what it was told
                _LOG.exception("an observer failed at the end of a span")
