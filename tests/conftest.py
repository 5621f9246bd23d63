"""Which tests one worker runs after another: those of a file; those of a directory whose files share a server."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SHARING = (TESTS / "conformance", TESTS / "local" / "serving")
"""Where a server is started once for all files; to start one takes seconds."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        shared = next((directory for directory in SHARING if directory in item.path.parents), item.path)
        item.add_marker(pytest.mark.xdist_group(str(shared.relative_to(TESTS))))
