"""Garbage collections beside the event loop, in processes of their own: this one has frozen what it imported."""

import subprocess
import sys

import collector_checks
import pytest


@pytest.mark.parametrize("name", collector_checks.CHECKS)
def test_of_the_collector(name: str) -> None:
    ended = subprocess.run(
        [sys.executable, collector_checks.__file__, name], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
