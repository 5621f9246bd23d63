"""How xdist shares the tests among its workers, what each of these does once, and what a machine lacks."""

import gc
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator

import pytest
from groups import GroupScheduling
from xdist.remote import Producer

# Before torch is imported: more threads wait for each other at each small matmul, on cores that other workers need.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What arl remembers of models that it loaded: of these tests alone. Deleted with the interpreter.
_CACHE = tempfile.TemporaryDirectory(prefix="arl-tests-cache-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name


@pytest.hookimpl(optionalhook=True)  # there is no such hook with `-p no:xdist`
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling:
    return GroupScheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line about programs that tests were skipped without. The reason of such a skip is "needs PROGRAM: ..."."""
    reasons = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])]
    lacking = Counter(found[1] for reason in reasons if (found := re.match(r"Skipped: needs ([^:]+)", reason)))
    if lacking:
        counts = (f"{program} ({count})" for program, count in lacking.most_common())
        terminalreporter.write_line(f"Skipped for want of: {', '.join(counts)}")


def pytest_collection() -> None:
    """Importing all test modules makes a million objects, and looking for garbage among them takes 10 s."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Each run in a test would look for garbage among them, too, and count what is frozen: 1.5 s. With thresholds that
    the process has set itself, `collect_garbage` leaves the collector alone; test_collector.py has processes for it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _nursery() -> Iterator[None]:
    """Whatever forked server processes ends with the tests."""
    yield
    if (servers := sys.modules.get("embedded_server")) is not None:
        servers.NURSERY.close()
