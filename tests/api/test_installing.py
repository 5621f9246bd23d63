"""Which arl this is, and the command that adds an extra to it: right for a checkout, an index, an address."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from sources import ROOT, SOURCES

import arl
from arl.api import version
from arl.api.version import DISTRIBUTION, install_command
from arl.cluster.node_probe import NodeProbe

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def install(directory: Path, monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any]) -> None:
    """As pip does it: a directory of metadata beside the package. origin: what pip records of an address."""
    metadata = directory / f"{DISTRIBUTION.replace('-', '_')}-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {DISTRIBUTION}\nVersion: 0.1.0\n")
    (metadata / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(directory)
    monkeypatch.setattr(version, "__file__", str(directory / "arl/api/version.py"))


def test_from_a_checkout_it_is_installed_in_editable_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert install_command("rewards") == f"pip install -e '{ROOT}[rewards]'"
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(version, "__file__", str(tmp_path / "arl/api/version.py"))
    assert install_command("ray") == f"pip install -e '{tmp_path}[ray]'"


COMMIT = "f" * 40
GIT = {"vcs": "git", "requested_revision": "main", "commit_id": COMMIT}


@pytest.mark.parametrize(
    ("origin", "what"),
    [
        ({"url": "file:///tmp/arl_train-0.1.0-py3-none-any.whl", "archive_info": {}}, "arl-train[rewards]"),
        ({"url": "https://a.b/arl.whl", "archive_info": {}}, "arl-train[rewards] @ https://a.b/arl.whl"),
        ({"url": "https://a.b/arl.git", "vcs_info": GIT}, f"arl-train[rewards] @ git+https://a.b/arl.git@{COMMIT}"),
        (
            {"url": "https://a.b/all.git", "vcs_info": GIT, "subdirectory": "rl"},
            f"arl-train[rewards] @ git+https://a.b/all.git@{COMMIT}#subdirectory=rl",
        ),
    ],
    ids=["wheel", "address of a wheel", "git", "git subdirectory"],
)
def test_elsewhere_it_comes_from_where_arl_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any], what: str
) -> None:
    install(tmp_path, monkeypatch, origin)
    assert install_command("rewards") == f"pip install '{what}'"


def test_the_name_is_the_projects_and_every_extra_that_a_message_names_exists() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert NodeProbe().facts()["versions"]["arl"] is not None
    named = {x for file in SOURCES for x in re.findall(r"install_command\(['\"](\w+)['\"]\)", file.read_text())}
    assert named
    assert named <= PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize("command", [["-m", "arl", "--version"], ["-c", "import arl; print('arl', arl.__version__)"]])
def test_the_version_is_asked_of_the_command_or_of_the_package(command: list[str]) -> None:
    asked = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True, timeout=60)
    assert asked.stdout == f"arl {arl.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+", arl.__version__)


def test_nothing_tells_anybody_to_install_the_other_project() -> None:
    """It is called arl on the package index. Messages take the command from `install_command`."""
    told = [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"]
    told += [file for folder in ("examples", "scripts", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    other = re.compile(r"(?<![\w.-])arl\[\w|pip install (-\S+ )*['\"]?arl\b(?!-)")
    assert [file for file in (*told, *SOURCES) if other.search(file.read_text())] == []
    assert [file.name for file in SOURCES if "pip install" in file.read_text()] == ["version.py"]
