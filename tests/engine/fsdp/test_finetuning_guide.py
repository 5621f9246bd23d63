"""The code of docs/finetuning.md runs as it stands, block after block."""

from pathlib import Path

from guides import python_blocks

from arl.engine.fsdp.model import load_tokenizer

GUIDE = Path(__file__).parents[3] / "docs" / "finetuning.md"


def test_the_code_of_the_guide_runs(model_dir: Path, tmp_path: Path) -> None:
    namespace = {"model": str(model_dir), "directory": tmp_path / "reward"}
    for block in python_blocks(GUIDE):
        exec(compile(block, GUIDE, "exec"), namespace)
    for name in ("engine", "critic"):
        namespace[name].close()  # type: ignore[attr-defined]
    assert load_tokenizer(tmp_path / "reward")
