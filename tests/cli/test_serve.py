"""`arl serve`: programs in processes of their own play the episodes of an experiment, over HTTP."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from free_port import free_port
from scripted_launch import use_fakes

from arl.__main__ import main
from arl.api.errors import ConfigError
from arl.api.fakes import ScriptedEngine
from arl.api.types import ModelRequest, SamplingParams
from arl.api.workflow import RolloutWorkflow
from arl.endpoint.proxy import OpenAIProxy
from arl.endpoint.sdk_workflow import SDKWorkflow
from arl.endpoint.served_workflow import ServedWorkflow
from arl.engine.tiny import TinyShape, tiny_tokenizer, write_tiny_model
from arl.rewards import InlineReward
from arl.run.servers import played_elsewhere
from arl.training.metrics_log import read_jsonl
from arl.workflow.agent import SingleTurnWorkflow
from arl.workflow.teachers import DistillationWorkflow

AGENTS = Path(__file__).parents[2] / "examples" / "agents"
PROGRAMS = {"python": [sys.executable, str(AGENTS / "served_program.py")], "bash": [str(AGENTS / "served_program.sh")]}
KEY = "an-operators-key-of-32-characters"
TOKENIZER = tiny_tokenizer()
SCRIPT = """
from arl import Config, Experiment, SamplingParams, Setup, SingleTurnWorkflow, load_tokenizer
from arl.rewards import InlineReward


def right(answer, data):
    return float(answer == data["answer"])


def prepare(config):
    rows = [{"question": f"{a} + 1 = ?", "answer": str(a + 1)} for a in range(8)]
    workflow = SingleTurnWorkflow(
        load_tokenizer(config.model), InlineReward(right), sampling=SamplingParams(max_new_tokens=8)
    )
    return Setup(model=config.model, workflow=workflow, dataset=rows[2:], eval_dataset=rows[:2])


experiment = Experiment(config=Config, prepare=prepare)
"""
SMALL = ["--steps", "2", "--rollout.batch_size", "2", "--rollout.group_size", "2", "--no-log.console"]
NUMBERS = count()


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Another module for each test, as a process would have its own."""
    file = tmp_path / f"served_{next(NUMBERS)}.py"
    file.write_text(SCRIPT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("ARL_ENDPOINT_KEY", KEY)
    yield file
    sys.modules.pop(file.stem, None)


def playing(url: str, *names: str) -> "dict[str, subprocess.Popen[str]]":
    """names: of programs; unset: all that this machine can run."""
    environment = {**os.environ, "ARL_ENDPOINT_KEY": KEY}
    there = {name: command for name, command in PROGRAMS.items() if name == "python" or shutil.which("curl")}
    return {
        name: subprocess.Popen([*command, url], env=environment, stdout=subprocess.PIPE, text=True)
        for name, command in there.items()
        if name in (names or there)
    }


class WhenAllPlay:
    """Says 3, but nothing before all programs have asked, each of which plays one episode at a time."""

    def __init__(self) -> None:
        self.num_programs = 1
        self._num_asked = 0
        self._all_play = asyncio.Event()

    async def __call__(self, request: ModelRequest) -> list[int]:
        self._num_asked += 1
        if self._num_asked == self.num_programs:
            self._all_play.set()
        await self._all_play.wait()
        return TOKENIZER.encode("3<|im_end|>")


def check(run_dir: Path, programs: "dict[str, subprocess.Popen[str]]") -> None:
    """All programs have ended well, and what they played was trained and evaluated."""
    said = {name: program.communicate(timeout=60)[0] for name, program in programs.items()}
    assert {name: program.returncode for name, program in programs.items()} == dict.fromkeys(programs, 0), said
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert [row["version"] for row in rows] == [1, 2]
    assert all(row["episode/calls"] == 1 and row["episode/program_wait_s"] > 0 for row in rows)
    assert len(read_jsonl(run_dir / "evaluations.jsonl")) == 2
    assert (run_dir / "summary.json").exists()


def test_programs_in_other_languages_train_an_experiment_and_learn_that_it_is_over(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real processes and real HTTP; the engines are scripted."""
    TOKENIZER.save_pretrained(tmp_path / "model")
    script_of_model = WhenAllPlay()
    engine = ScriptedEngine(script_of_model)
    use_fakes(monkeypatch, engine)
    port, run_dir = free_port(), tmp_path / "run"
    programs = playing(f"http://127.0.0.1:{port}")
    script_of_model.num_programs = len(programs)
    settings = ["--model", str(tmp_path / "model"), "--run_dir", str(run_dir), "--endpoint.port", str(port)]
    main(["serve", str(script), *SMALL, *settings])
    check(run_dir, programs)
    assert f"by POST http://127.0.0.1:{port}/episodes" in capsys.readouterr().err
    assert {request.sampling.max_new_tokens for request in engine.requests} == {8}, "the workflow's sampling"
    texts = Counter(path.read_bytes().count(KEY.encode()) for path in run_dir.rglob("*") if path.is_file())
    assert set(texts) == {0}, "no file of the run has the key"


def test_a_script_whose_workflow_is_served_is_scored_with_programs_too(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    TOKENIZER.save_pretrained(tmp_path / "model")
    script.write_text(SCRIPT.replace("SingleTurnWorkflow", "ServedWorkflow"))
    use_fakes(monkeypatch, ScriptedEngine(lambda request: TOKENIZER.encode("1<|im_end|>")))
    port = free_port()
    program = playing(f"http://127.0.0.1:{port}", "python")["python"]
    settings = ["--model", str(tmp_path / "model"), "--run_dir", str(tmp_path / "run"), "--endpoint.port", str(port)]
    main(["eval", str(script), "--n", "1", *settings])
    program.communicate(timeout=60)
    assert program.returncode == 0
    assert "2 episodes; 0 failed and 0 rejected" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_run_is_served_by_its_own_process(script: Path, tmp_path: Path) -> None:
    shape = TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=2)
    model = write_tiny_model(tmp_path / "model", shape=shape, seed=0)
    port, run_dir = free_port(), tmp_path / "run"
    settings = ["--model", str(model), "--run_dir", str(run_dir), "--endpoint.port", str(port)]
    run = subprocess.Popen(
        [sys.executable, "-m", "arl", "serve", str(script), *SMALL, *settings],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    programs = playing(f"http://127.0.0.1:{port}")
    said, _ = run.communicate(timeout=280)
    assert run.returncode == 0, said
    check(run_dir, programs)


@pytest.mark.parametrize(
    ("key", "flags", "said"),
    [
        ("", [], "ARL_ENDPOINT_KEY is not set"),
        (KEY, ["--rollout.num_workers", "2"], "rollout.num_workers is 2, but programs elsewhere play the episodes"),
        (KEY, ["--endpoint.port", "8000", "--endpoint.certificate", "none.pem"], "none.pem cannot be used"),
    ],
)
def test_what_cannot_be_served_is_an_error_before_anything_is_prepared(
    key: str,
    flags: list[str],
    said: str,
    script: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ARL_ENDPOINT_KEY", key)
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(script), "--model", "there is none", "--run_dir", str(tmp_path / "run"), *flags])
    assert (ended.value.code, said in capsys.readouterr().err) == (1, True)


class Own(RolloutWorkflow):
    async def arun_episode(self, engine: object, data: object) -> None:
        return None


async def never(base_url: str, api_key: str, data: object) -> str:
    raise AssertionError


def test_programs_elsewhere_take_the_place_of_any_workflow_but_one_that_rewards_its_own_tokens(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    reward, sampling = InlineReward(lambda answer, data: 1.0), SamplingParams(max_new_tokens=7)
    proxy = OpenAIProxy(TOKENIZER, sampling=sampling)
    served = ServedWorkflow(TOKENIZER)

    def where(url: str) -> None:
        raise AssertionError

    assert played_elsewhere(served, "none", where) is served
    of_sdk = played_elsewhere(SDKWorkflow(never, reward, proxy=proxy), "none", where)
    assert of_sdk._proxy is proxy
    of_agent = played_elsewhere(SingleTurnWorkflow(TOKENIZER, reward, sampling=sampling), "none", where)
    assert of_agent._proxy.sampling is sampling
    assert of_sdk._score is not None
    assert of_agent._score is not None
    assert played_elsewhere(Own(), str(tmp_path), where)._score is None
    with pytest.raises(ConfigError, match="a DistillationWorkflow rewards the tokens of its own"):
        played_elsewhere(DistillationWorkflow.__new__(DistillationWorkflow), "none", where)
