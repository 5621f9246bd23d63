"""How xdist shares the tests among its workers, and what each of these does once."""

import gc

import pytest
from groups import GroupScheduling
from xdist.remote import Producer


@pytest.hookimpl(optionalhook=True)  # there is no such hook with `-p no:xdist`
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling:
    return GroupScheduling(config, log)


def pytest_collection_finish() -> None:
    """What all test modules import is a million objects, and each run in a test would collect among them: 0.5 s."""
    gc.collect()
    gc.freeze()
