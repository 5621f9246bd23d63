"""How xdist shares the tests among its workers."""

import pytest
from groups import GroupScheduling


@pytest.hookimpl(optionalhook=True)  # there is no such hook with `-p no:xdist`
def pytest_xdist_make_scheduler(config: pytest.Config) -> GroupScheduling:
    return GroupScheduling(config)
