"""examples/notebook.ipynb runs from top to bottom in a Jupyter kernel."""

import asyncio
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"

FAKES = f"""
import sys

sys.path.insert(0, {str(ROOT / "tests")!r})
import pytest
from scripted_launch import use_fakes
from arl import ScriptedEngine
from arl.engine.tiny import tiny_tokenizer

use_fakes(pytest.MonkeyPatch(), ScriptedEngine(lambda request: tiny_tokenizer().encode("12345678")))
"""


def read() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def cell(notebook: Any, name: str) -> Any:
    return next(cell for cell in notebook.cells if cell.id == name)


def run(notebook: Any, directory: Path) -> None:
    """As papermill does: the cell of parameters is followed by one that sets others."""
    at = next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
    notebook.cells.insert(at + 1, new_code_cell("steps = 2"))
    client = NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(directory)}})
    asyncio.run(client.async_execute())


def said(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def test_it_trains_plots_and_serves_with_top_level_await(tmp_path: Path) -> None:
    """In a real kernel, with the official fakes in the place of server and weights."""
    notebook = read()
    cell(notebook, "imports").source += "\n" + FAKES
    cell(notebook, "serve").source = "use_fakes(pytest.MonkeyPatch(), ScriptedEngine(lambda _: [9]))\n" + cell(
        notebook, "serve"
    ).source.replace('directory / "trained"', 'directory / "model"')  # fakes export no model
    run(notebook, tmp_path)
    train = cell(notebook, "train")
    assert said(train) == "held-out reward 1.00 -> 1.00\n"
    (plot,) = [output for output in train.outputs if output.output_type == "display_data"]
    assert len(plot.data["image/png"]) > 1000
    assert "Say a number like 7<|im_end|>" in said(cell(notebook, "serve"))


@pytest.mark.slow
def test_it_runs_on_a_real_server_and_a_real_model(tmp_path: Path) -> None:
    notebook = read()
    run(notebook, tmp_path)
    assert "held-out reward 0.0" in said(cell(notebook, "train"))
    assert "Say a number like 7<|im_end|>" in said(cell(notebook, "serve"))


def test_it_is_kept_without_outputs() -> None:
    cells = [cell for cell in read().cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
