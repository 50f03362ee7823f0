"""Progress of a long test run: each failure when it happens, and a line by time and not by share.

`python3 do.py test` passes ``--progress 30``. With ``-v`` pytest reports every test itself.
"""

import time
from collections.abc import Generator

import pytest


class Progress:
    """Pytest plugin of the process that prints. Its workers, if there are any, send it their reports."""

    def __init__(self, terminal: pytest.TerminalReporter, interval: float) -> None:
        self._terminal, self._interval = terminal, interval
        self._start = self._printed = time.monotonic()
        self._collected = self._ended = self._failed = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected = max(self._collected, len(session.items))

    @pytest.hookimpl(optionalhook=True)  # of xdist
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._collected = len(ids)

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Generator[None, tuple[str, str, str], tuple[str, str, str]]:
        """The category of the summary stays. Without a letter, pytest prints nothing."""
        category = (yield)[0]
        return category, "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed += 1
            self._terminal.write_sep("_", f"{report.when} of {report.nodeid} failed", red=True)
            report.toterminal(self._terminal._tw)
        self._ended += report.when == "teardown"
        now = time.monotonic()
        if report.failed or now - self._printed >= self._interval or self._ended == self._collected:
            self._printed = now
            failed = f", {self._failed} failed" * bool(self._failed)
            self._terminal.write_line(f"{now - self._start:5.0f} s: {self._ended} of {self._collected} tests{failed}")
