"""`arl try` and `arl eval` in tests: a script on the disk, and an engine that plays its model."""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from scripted_launch import use_fakes

from arl.__main__ import main
from arl.api.fakes import ScriptedEngine
from arl.api.types import ModelRequest
from arl.engine.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()

SCRIPT = '''
from sibling import SYSTEM

from arl import Conversation, Experiment, ExperimentConfig, RolloutWorkflow, SamplingParams, Setup, load_tokenizer


class OwnConfig(ExperimentConfig):
    """Of this script."""

    num_turns: int = 1
    """How often it asks."""
    num_held_out: int = 3


class Adder(RolloutWorkflow):
    def __init__(self, config):
        self.tokenizer, self.num_turns = load_tokenizer(config.model), config.num_turns

    async def arun_episode(self, engine, data):
        chat = Conversation(self.tokenizer, [{"role": "user", "content": f"{SYSTEM} {data['a']} + 1 = ?"}])
        for _ in range(self.num_turns):
            turn = await chat.agenerate(engine, SamplingParams(max_new_tokens=40, temperature=0.7))
            chat.add({"role": "user", "content": "[bold]Sure?[/bold]"})
        if turn.text == "reject":
            return None
        if turn.text == "raise":
            raise RuntimeError("the tool broke")
        right = float(turn.text == str(data["a"] + 1))
        return chat.trajectories(right, {"turns": self.num_turns}, rewards={"right": right, "short": 0.5})


def prepare(config):
    held_out = [{"a": a} for a in range(config.num_held_out)]
    return Setup(model=config.model, workflow=Adder(config), dataset=[{"a": 50}] * 9, eval_dataset=held_out or None)


experiment = Experiment(config=OwnConfig, prepare=prepare)
'''


@dataclass(kw_only=True)
class Commands:
    """Runs commands on the script `agent_N.py` in `directory`. requests: what its model was asked."""

    directory: Path
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    script: Path
    requests: list[ModelRequest] = field(default_factory=list[ModelRequest])

    def run(
        self, command: str, *flags: str, answers: Sequence[str] | Callable[[ModelRequest], Any] = ("1<|im_end|>",)
    ) -> tuple[int, str, str]:
        """The exit code, stdout and stderr. answers: of the model, over and over."""

        async def answer(request: ModelRequest) -> list[int]:
            self.requests.append(request)
            text = answers(request) if callable(answers) else answers[(len(self.requests) - 1) % len(answers)]
            return TOKENIZER.encode(await text if inspect.isawaitable(text) else text)

        use_fakes(self.monkeypatch, ScriptedEngine(answer))
        settings = ["--model", str(self.directory / "model"), "--run_dir", str(self.directory / "run")]
        return self.command(command, str(self.script), *settings, *flags)

    def command(self, *argv: str) -> tuple[int, str, str]:
        code = 0
        try:
            main(argv)
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
        said = self.capsys.readouterr()
        return code, said.out, said.err


NUMBERS = count()


def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Commands]:
    """The script is another module for each test, as a process would have its own."""
    TOKENIZER.save_pretrained(tmp_path / "model")
    script = tmp_path / f"agent_{next(NUMBERS)}.py"
    script.write_text(SCRIPT)
    (tmp_path / "sibling.py").write_text("SYSTEM = 'Add:'\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield Commands(directory=tmp_path, monkeypatch=monkeypatch, capsys=capsys, script=script)
    for name in (script.stem, "sibling"):
        sys.modules.pop(name, None)
