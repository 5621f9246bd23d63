"""examples/notebook.ipynb runs from top to bottom, with an event loop that runs already."""

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell
from scripted_launch import use_fakes

from arl.api.fakes import ScriptedEngine
from arl.engine.tiny import tiny_tokenizer

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"


def code_cells(notebook: Any) -> dict[str, Any]:
    return {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}


async def test_it_trains_and_serves_with_top_level_await(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over the official fakes, which export no model."""
    use_fakes(monkeypatch, lambda: ScriptedEngine(lambda request: tiny_tokenizer().encode("12345678")))
    namespace: dict[str, Any] = {}
    for name, cell in code_cells(nbformat.read(NOTEBOOK, as_version=4)).items():
        source = (
            "steps = 2" if name == "parameters" else cell.source.replace("mkdtemp(", f"mkdtemp(dir={str(tmp_path)!r}, ")
        )
        if name == "serve":
            source = source.replace('directory / "trained"', 'directory / "model"')
        code = compile(source, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if inspect.isawaitable(done := eval(code, namespace)):
            await done
    said = capsys.readouterr().out
    assert "step 2 of 2  reward 1.000" in said
    assert "held-out reward 1.00 -> 1.00, best batch 1.00\n" in said
    assert "Say a number like 7<|im_end|>" in said
    assert "2 of 2" in namespace["trainer"]._repr_html_()
    shown = namespace["show"](namespace["trajectory"], namespace["agent"].tokenizer)._repr_html_()
    assert "Say a number like 7&lt;|im_end|&gt;" in re.sub("<[^>]*>", "", shown)


@pytest.mark.slow
def test_it_runs_in_a_kernel_on_a_real_server_and_a_real_model(tmp_path: Path) -> None:
    """As papermill does: the cell of parameters is followed by one that sets others."""
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    at = next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
    notebook.cells.insert(at + 1, new_code_cell("steps = 2"))
    client = NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}})
    asyncio.run(client.async_execute())
    cells = code_cells(notebook)
    said = {
        name: "".join(out.text for out in cell.outputs if out.output_type == "stream") for name, cell in cells.items()
    }
    assert "held-out reward 0.0" in said["train"]
    assert "Say a number like 7<|im_end|>" in said["serve"]
    (steps,) = [output for output in cells["train"].outputs if output.output_type == "display_data"]
    assert "2 of 2" in steps.data["text/html"]
    assert "<svg" in steps.data["text/html"]


def test_it_is_kept_without_outputs() -> None:
    cells = code_cells(nbformat.read(NOTEBOOK, as_version=4)).values()
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
