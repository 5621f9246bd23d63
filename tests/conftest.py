"""Which tests one worker runs, one after another: those of a file, and of files that share something."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DIRECTORIES = (TESTS / "conformance", TESTS / "engine" / "local" / "serving", TESTS / "engine" / "weights")
"""Their files share a server, which takes seconds to start."""
RAY = ("test_learner_engines.py", "test_ray_engine.py", "test_ray_nodes.py", "test_ray_start.py")
"""They start Ray, and `ray_address=auto` finds whatever cluster is being started or ended on the machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item.path)))


def group_of(file: Path) -> str:
    if file.name in RAY:
        return "ray"
    shared = next((directory for directory in DIRECTORIES if directory in file.parents), file)
    return str(shared.relative_to(TESTS))
