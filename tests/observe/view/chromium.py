"""The browser that tests look with."""

import os
import shutil

import pytest


def chromium() -> str:
    """Where the browser is. Skips the test, or fails it if ARL_NEEDS_BROWSER is set, where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None and not os.environ.get("ARL_NEEDS_BROWSER"):
        pytest.skip("needs Chromium: make browser")
    assert found, "ARL_NEEDS_BROWSER is set, and there is no browser: make browser"
    return found
