"""`arl rewards audit` on a recorded run: where two rewards disagree, with examples."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted_launch import use_fakes

import arl
from arl.__main__ import main
from arl.engine.tiny import TURN_END, tiny_tokenizer
from arl.rewards import Score

TOKENIZER = tiny_tokenizer()
SUMS = [{"question": f"{a} + 1 = ?", "answer": str(a + 1)} for a in (1, 2)]
VERIFIER = """
def lenient(answer, data):
    return 1.0

def strict(answer, data):
    assert answer == "3", answer  # without the token that ended the turn
    return 0.0

def fails(answer, data):
    raise ValueError("no such answer")

def make():
    return lenient
"""


async def right(answer: str, data: arl.Example) -> Score:
    return Score(1.1 * (answer == data["answer"]), parts={"half": 0.5})


@pytest.fixture
async def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a model that says 3 to both sums; its reward has two parts."""
    TOKENIZER.save_pretrained(tmp_path / "model")
    (tmp_path / "verifier.py").write_text(VERIFIER)
    use_fakes(monkeypatch, arl.ScriptedEngine(lambda request: TOKENIZER.encode("3" + TURN_END)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "verifier", raising=False)
    sizes: dict[str, Any] = {"steps": 2, "batch_size": 2, "group_size": 2}
    quiet = arl.Config.model_validate({"model": "none", "log": {"console": False}})
    await arl.atrain(model="model", run_dir="run", dataset=SUMS, reward=right, config=quiet, **sizes)
    return tmp_path / "run"


def audit(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["rewards", "audit", "run", *flags])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


@pytest.mark.usefixtures("run_dir")
def test_answers_on_which_two_rewards_disagree_are_counted_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = audit(capsys, "--with", "verifier.py:make()", "--json")
    found = json.loads(out)
    assert code == 1
    assert found["counts"]["both pass"] + found["counts"]["only new passes"] == 8
    assert found["disagreement"] == len(found["examples"]) / 8
    for example in found["examples"]:
        assert example.pop("episode")
        assert example == {
            "kind": "only new passes",
            "recorded": 0.0,
            "new": 1.0,
            "question": "1 + 1 = ?",
            "reference": "2",
            "answer": "3",
        }
    code, out, _ = audit(capsys, "--with", "verifier.py:strict", "--examples", "1")
    assert code == 1
    assert out.count("kind      only recorded passes\nrecorded  1.1\nnew       0.0\nquestion  2 + 1 = ?\n") == 1


@pytest.mark.usefixtures("run_dir")
def test_rewards_that_agree_end_the_audit_with_0_and_a_failing_one_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = audit(capsys, "--with", "verifier.py:lenient", "--part", "half", "--pass-reward", "0.5")
    assert (code, "disagreement: 0.0%" in out, "kind" in out) == (0, True, False)
    code, out, _ = audit(capsys, "--with", "verifier.py:fails")
    assert (code, "new failed: 8" in out, "no such answer" in out) == (1, True, True)


@pytest.mark.usefixtures("run_dir")
def test_an_audit_that_cannot_be_made_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, code, message in (
        (["--with", "verifier.py:nothing"], 2, "--with verifier.py:nothing: .* write module:function or"),
        (["--with", "verifier.py"], 2, "write module:function or file.py:function"),
        (["--with", "nowhere:f"], 2, "No module named 'nowhere'"),
        (["--with", "missing.py:f"], 2, "missing.py cannot be imported"),
        (["--with", "verifier.py:lenient", "--part", "none"], 1, "has no answers"),
    ):
        ended, _, said = audit(capsys, *flags)
        assert (ended, re.search(message, said) is not None) == (code, True), said
