"""``-p tests.harness.progress``: one line says how far the tests are, in place of a sign for each of thousands.

At a terminal the line is written over and over; elsewhere, as in the log of a CI, there is a new one for every tenth of
the tests. Each failure is named when it happens; its report comes at the end, as usual.
"""

from __future__ import annotations

import time
from collections.abc import Generator

import pytest
from _pytest.terminal import TerminalReporter

_LINES = 10


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Take the place of the reporter's own progress. The workers of xdist have no reporter."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        session.config.pluginmanager.register(Progress(session, reporter), "progress-line")


class Progress:
    """Counts the tests that are over."""

    def __init__(self, session: pytest.Session, reporter: TerminalReporter) -> None:
        self._session = session
        self._reporter = reporter
        self._reporter.showfspath = False
        self._reporter._show_progress_info = False
        self._began = time.monotonic()
        self._over = 0
        self._written = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Generator[None, tuple[str, str, object], tuple[str, str, object]]:
        """No sign for a test."""
        category, _, word = yield
        return category, "", word

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Name a failure."""
        if report.failed:
            self._erase()
            self._reporter.write_line(f"FAILED {report.nodeid} ({report.when})", red=True)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        """A test is over."""
        self._over += 1
        count = self._session.testscollected
        if self._reporter.isatty():
            self._reporter.rewrite(self._line(count), erase=True)
        elif self._over * _LINES // count > self._written:
            self._written = self._over * _LINES // count
            self._reporter.write_line(self._line(count))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """What follows begins on a line of its own."""
        self._erase()

    def _line(self, count: int) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        stats = self._reporter.stats
        failed = len(stats.get("failed", ())) + len(stats.get("error", ()))
        found = f", {failed} failed" if failed else ""
        return f"{100 * self._over // count:3d} % of {count:,} tests after {minutes}:{seconds:02d}{found}"

    def _erase(self) -> None:
        if self._reporter.isatty():
            self._reporter.rewrite("", erase=True)
