"""The code in docs/workflows.md runs as it stands, and documents link to what exists."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from scripted_launch import use_fakes

from arl import ScriptedEngine

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def python_blocks(document: Path) -> list[str]:
    """Each with as many empty lines before it as make its line numbers the document's."""
    text = document.read_text()
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in found]


async def test_the_code_of_the_workflow_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block after block in one namespace; one that begins with `# name.py` is that file instead."""
    guide = ROOT / "docs" / "workflows.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    use_fakes(monkeypatch, ScriptedEngine(lambda request: [9, 9]))
    namespace = {"__name__": "guide"}
    for block in python_blocks(guide):
        if file := re.match(r"\s*# (\w+\.py)\n", block):
            (tmp_path / file[1]).write_text(block)
            continue
        code = compile(block, guide, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if inspect.isawaitable(done := eval(code, namespace)):
            await done
    steps = (tmp_path / "runs" / "adder" / "metrics.jsonl").read_text().splitlines()
    assert len(steps) == 2


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(document: Path) -> None:
    broken: list[str] = []
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        path, _, heading = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if "://" not in link and not (target.exists() and (not heading or heading in headings(target))):
            broken.append(link)
    assert broken == []


def headings(document: Path) -> set[str]:
    """The anchors that a renderer makes of headings."""
    lines = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}
