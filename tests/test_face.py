"""What users import: `arl` and the packages that PACKAGES names, and nothing at a second address."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import arl
import arl.extending
import arl.rewards
import arl.run.finetuning
import arl.sandbox

ROOT = Path(__file__).parents[1]
PACKAGES = (arl, arl.extending, arl.run.finetuning, arl.rewards, arl.sandbox)
PAGE = (ROOT / "docs" / "api.md").read_text()
TAUGHT = [
    ROOT / "README.md",
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "examples").rglob("*.py"),
    ROOT / "examples/notebook.ipynb",
]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_name_can_be_loaded_and_has_its_line_on_the_page(package: ModuleType) -> None:
    part = PAGE.partition(f"\n# {package.__name__}\n")[2].partition("\n# ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE)) == sorted(package.__all__)
    assert {name for name in package.__all__ if not hasattr(package, name)} == set()
    assert [name for name in dir(package) if not name.startswith("__")] == package.__all__


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_editors_see_the_names_where_they_are_loaded_from(package: ModuleType) -> None:
    assert package.__file__ is not None
    (block,) = [node for node in ast.parse(Path(package.__file__).read_text()).body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    homes = package._HOMES
    assert seen == {f"{home}.{name}".rstrip(".") for home, names in homes.items() for name in names.split() or [""]}


def test_importing_it_loads_none_of_its_modules() -> None:
    script = "import sys, arl; print(*sorted(name for name in sys.modules if name.startswith('arl')))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.split() == ["arl", "arl.runtime"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'arl' has no attribute 'Trainer'"):
        _ = arl.Trainer  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("file", TAUGHT, ids=lambda file: file.name)
def test_guides_and_examples_import_from_the_face_alone(file: Path) -> None:
    modules = re.findall(r"(?:from|import) (arl[\w.]*)(?: import|$)", file.read_text(), re.MULTILINE)
    assert set(modules) <= {package.__name__ for package in PACKAGES}
