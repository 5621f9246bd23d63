import pytest
from nodes import why_none


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cluster") and (reason := why_none()):
        pytest.skip(reason)
