"""docs/finetuning.md runs as it is written: its code, then its commands."""

import re
import shlex
from pathlib import Path

import pytest
from guides import python_blocks
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from arl.__main__ import main as arl
from arl.training.metrics_log import read_jsonl

GUIDE = Path(__file__).parents[3] / "docs" / "finetuning.md"


@pytest.mark.timeout(180)
def test_the_code_and_the_commands_of_the_guide_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in python_blocks(GUIDE):
        exec(compile(block, GUIDE, "exec"), namespace)
    for name in ("engine", "critic"):
        namespace[name].close()  # type: ignore[attr-defined]
    commands = re.findall(r"^    (arl .*)$", GUIDE.read_text(), re.MULTILINE)
    assert [shlex.split(command)[1:4] for command in commands] == [
        ["finetune", "--kind", kind] for kind in ("sft", "dpo", "rm")
    ]
    for command in commands:
        arl(shlex.split(command)[1:])
    assert "held-out loss" in capsys.readouterr().out
    assert [row["version"] for row in read_jsonl(Path("runs/dpo/evaluations.jsonl"))] == [0, 5, 10]
    assert AutoModelForCausalLM.from_pretrained("runs/dpo/trained").config.vocab_size
    for directory in ("reward", "runs/rm/trained"):
        assert AutoModelForSequenceClassification.from_pretrained(directory).config.num_labels == 1
