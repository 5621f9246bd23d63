"""The event log knows how much CPU time each process of a run has used."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from arl.api.events import CpuUsed
from arl.api.settings.run import EventsConfig
from arl.observe.events.run_record import read_run
from arl.observe.events.writer import CpuWatch, EventLog, num_cores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

BURNT_S = 0.2
BURNER = f"""
import subprocess, sys, time
while time.process_time() < {BURNT_S}:
    pass
if sys.argv[1] == "parent":
    child = subprocess.Popen([sys.executable, "-c", sys.argv[2], "child"], stdin=subprocess.PIPE)
else:
    print("burnt", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for child in started:
        child.communicate()  # its stdin ends, and so does it


def burn(children: list[subprocess.Popen[str]], *words: str) -> None:
    """Returns once a process, or its child if it is a `parent`, has used the time."""
    command = [sys.executable, "-c", BURNER, words[0], BURNER, *words[1:]]
    children.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    assert (output := children[-1].stdout)
    assert output.readline() == "burnt\n"


def test_each_process_is_told_by_its_servers_address_or_its_log_with_all_that_it_started(
    children: list[subprocess.Popen[str]],
):
    burn(children, "child", "--port", "4711")
    burn(children, "parent", "runs/a/logs/trainer.log")
    burn(children, "child")
    seen = CpuWatch().read()
    assert seen
    assert {"http://127.0.0.1:4711", "trainer", "others"} <= seen.processes.keys()
    assert seen.processes["http://127.0.0.1:4711"] >= BURNT_S
    assert seen.processes["trainer"] >= 2 * BURNT_S


def test_the_loops_thread_is_told_apart_whoever_asks():
    watch, seen = CpuWatch(), list[CpuUsed | None]()
    thread = threading.Thread(target=lambda: seen.append(watch.read()))
    thread.start()
    thread.join()
    assert seen[0]
    assert 0 < seen[0].loop < seen[0].controller


def test_a_process_that_has_ended_is_forgotten(children: list[subprocess.Popen[str]]):
    watch = CpuWatch()
    burn(children, "child", "--port", "4711")
    assert (before := watch.read())
    children[0].communicate()
    assert (after := watch.read())
    assert before.processes.keys() - after.processes.keys() == {"http://127.0.0.1:4711"}


def test_a_log_begins_and_ends_with_what_was_used(tmp_path: Path):
    with EventLog(tmp_path, EventsConfig(), CpuWatch().read).open() as log:
        log.flush()
    seen = [record for _, record in read_run(tmp_path).system if isinstance(record, CpuUsed)]
    assert len(seen) == 2
    assert seen[0].controller <= seen[1].controller


def test_a_watch_that_raises_does_not_end_the_log(tmp_path: Path):
    def watch() -> None:
        raise ValueError("no /proc")

    with EventLog(tmp_path, EventsConfig(), watch).open() as log:
        assert log.flush()


def test_a_process_may_use_a_core():
    assert num_cores() >= 1
