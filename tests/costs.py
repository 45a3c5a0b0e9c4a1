"""CPU seconds of every test, its ended child processes among them: the run closes with the
costliest and with what is too costly for the fast tier. Processes of Ray and threads of another
test are not told apart from the test they run beside."""

from __future__ import annotations

import os
from collections import defaultdict

import pytest

FAST_SECONDS = 10.0  # of CPU: a fast test above it belongs into the slow tier
SHOWN = 10


def cpu_seconds() -> float:
    """Of this process and of the children that it has waited for."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


class Costs:
    """One object in every worker, which measures, and one in the controller, which adds up what
    the reports bring."""

    def __init__(self) -> None:
        self._mark = cpu_seconds()
        self._spent: dict[str, float] = defaultdict(float)
        self._slow: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> None:
        self._mark = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item):
        report = yield
        now = cpu_seconds()
        # (xdist sends a report's attributes along)
        report.cpu_seconds, self._mark = now - self._mark, now
        report.slow = item.get_closest_marker("slow") is not None
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._spent[report.nodeid] += getattr(report, "cpu_seconds", 0.0)
        if getattr(report, "slow", False):
            self._slow.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._spent:
            return
        spent = sorted(self._spent.items(), key=lambda pair: -pair[1])
        total = sum(self._spent.values())
        terminalreporter.section(f"{total:.0f} CPU seconds in tests; the costliest")
        for name, seconds in spent[:SHOWN]:
            terminalreporter.line(f"{seconds:7.1f} s  {name}")
        for name, seconds in spent:
            if seconds > FAST_SECONDS and name not in self._slow:
                text = f"{name} took {seconds:.1f} CPU seconds: mark it slow, or make it cheaper"
                terminalreporter.line(text, yellow=True)
