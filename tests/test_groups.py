"""One worker runs all tests of a group, and the longest groups begin first."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from groups import DIRECTORIES, LONGEST, RAY, GroupScheduling, group_of

TESTS = Path(__file__).parent
FILES = [f"tests/{path.relative_to(TESTS).as_posix()}" for path in sorted(TESTS.rglob("test_*.py"))]
COLLECTION = [f"{file}::test_it[{case}]" for file in FILES for case in ("a", "b@c::d", "e")]


class Worker:
    """Notes what it is sent."""

    shutting_down = False

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.sent: list[int] = []

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        self.sent += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_one_worker_runs_all_tests_of_a_group_and_the_longest_begin_first() -> None:
    workers, run = [Worker("gw0"), Worker("gw1")], [0, 0]
    option = SimpleNamespace(loadscopereorder=True)
    config: Any = SimpleNamespace(getvalue=lambda name: ["popen"] * len(workers), option=option)
    scheduling: Any = GroupScheduling(config)
    for worker in workers:
        scheduling.add_node(worker)
        scheduling.add_node_collection(worker, COLLECTION)
    scheduling.schedule()
    while scheduling.has_pending:
        for number, worker in enumerate(workers):
            if run[number] < len(worker.sent):
                scheduling.mark_test_complete(worker, worker.sent[run[number]])
                run[number] += 1
    assert sorted(workers[0].sent + workers[1].sent) == list(range(len(COLLECTION)))
    groups = [[group_of(FILES[index // 3]) for index in worker.sent] for worker in workers]
    assert set(groups[0]).isdisjoint(groups[1])
    assert [of_worker[0] for of_worker in groups] == list(LONGEST[:2])
    for of_worker in groups:  # one group after another
        assert len({*of_worker}) == 1 + sum(a != b for a, b in itertools.pairwise(of_worker))


def test_every_named_group_is_there() -> None:
    groups = {group_of(file) for file in FILES}
    assert {*LONGEST, *DIRECTORIES, "ray"} <= groups
    assert {*RAY} <= {Path(file).name for file in FILES}
