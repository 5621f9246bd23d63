"""The version of arl, its name on package indexes, and how to install one of its extras."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any

__version__ = "0.1.0"
DISTRIBUTION = "arl-train"
"""The name on the package index, where the package called arl is another project."""


def install_command(extra: str) -> str:
    """The shell command that installs an extra beside this arl, from where this arl came."""
    checkout = Path(__file__).parents[2]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{checkout}[{extra}]')}"
    return f"pip install {shlex.quote(_requirement(extra, _origin()))}"


def _origin() -> dict[str, Any]:
    """Where the package was installed from, by PEP 610; empty if it came from an index."""
    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return {}
    return json.loads(text) if text else {}


def _requirement(extra: str, origin: dict[str, Any]) -> str:
    """A wheel on this machine needs no address: pip finds the installed package, and adds what the extra lists."""
    named, url, vcs = f"{DISTRIBUTION}[{extra}]", origin.get("url", ""), origin.get("vcs_info")
    inside = f"#subdirectory={origin['subdirectory']}" if "subdirectory" in origin else ""
    if vcs:
        return f"{named} @ {vcs['vcs']}+{url}@{vcs['commit_id']}{inside}"
    is_elsewhere = url and not url.startswith("file:")
    return f"{named} @ {url}{inside}" if is_elsewhere else named
