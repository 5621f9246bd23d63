"""How xdist shares the tests among its workers."""

import pytest
from groups import GroupScheduling


def pytest_xdist_make_scheduler(config: pytest.Config) -> GroupScheduling:
    return GroupScheduling(config)
