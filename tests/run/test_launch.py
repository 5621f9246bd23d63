"""Whole runs on the embedded server: real processes, real weights, and what is left after they end or are killed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from agent_script import TOKENIZER, SayDigits
from free_port import free_port
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from recovery.invariants import newest_checkpoint
from scripted_launch import small, use_scripted_training
from transformers import AutoTokenizer

import arl
from arl.api.errors import ConfigError, DatasetError, ModelError, ServerError
from arl.api.settings.algorithm import preset
from arl.api.settings.run import Config
from arl.api.types import SamplingParams
from arl.engine.tiny import write_tiny_model, write_tiny_vision_model
from arl.rewards import NumericMatch
from arl.run.engines import _check_room
from arl.run.inputs import Given, RunTask, given_tasks
from arl.run.launch import _check, check_sees, launch
from arl.run.learner import _check_models_beside, load_train_engine
from arl.training.metrics_log import read_jsonl
from arl.training.run_result import how_it_ended
from arl.workflow.agent import SingleTurnWorkflow
from arl.workflow.compacting import Compaction
from arl.workflow.teachers import DistillationWorkflow
from arl.workflow.tool_agent import SubAgent, ToolAgentWorkflow

SCRIPT = Path(__file__).parents[1] / "agent_script.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", ["Say a number"])


NO_TEACHER: Any = None


def start(model: Path, run_dir: Path, *flags: str) -> "subprocess.Popen[str]":
    command = [sys.executable, str(SCRIPT), "--model", str(model), "--run_dir", str(run_dir), *flags]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent)}
    small = ["--rollout.batch_size", "2", "--rollout.group_size", "2", "--checkpoint.every", "1"]
    return subprocess.Popen(
        command + small, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def read_until(process: "subprocess.Popen[str]", line: str) -> str:
    """The first line that begins so."""
    assert process.stdout is not None
    seen: list[str] = []
    for text in process.stdout:
        seen.append(text)
        if text.startswith(line):
            return text
    raise AssertionError(f"{line!r} never came; the process said:\n{''.join(seen)}")


def names_scraped(address: str) -> set[str]:
    """The names of the samples that a run exports."""
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": "application/openmetrics-text"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {sample.name for family in families for sample in family.samples}


def names_in_dashboard() -> set[str]:
    """The metrics that docs/grafana.json asks for."""
    dashboard = json.loads((SCRIPT.parents[1] / "docs" / "grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return {name for expression in asked for name in re.findall(r"\barl_\w+", expression)}


def processes_naming(text: str) -> list[str]:
    """Command lines of running processes with `text` in them."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in command:
            found.append(command)
    return found


@pytest.mark.runs
def test_three_lines_train_a_model_and_with_max_staleness_0_the_trainer_recomputes_the_samplers_logprobs(
    model: Path, tmp_path: Path
) -> None:
    result = arl.train(
        model=model,
        workflow=SayDigits(),
        dataset=[{"number": n} for n in range(9)],
        steps=3,
        batch_size=2,
        group_size=4,
        max_staleness=0,
        lr=1e-3,
        run_dir=tmp_path,
        algorithm=preset("decoupled_ppo", minibatches=2),
    )
    assert {"config.json", "model.safetensors"} <= {path.name for path in Path(result.model).iterdir()}
    assert [row["staleness/max"] for row in result.metrics] == [0, 0, 0]
    for row in result.metrics:
        assert row["behavior_weight_max"] == pytest.approx(1.0, abs=1e-4)
        assert abs(row["behavior_kl_proximal"]) < 1e-6


@pytest.mark.runs
@pytest.mark.timeout(300)
def test_after_a_kill_a_rerun_continues_and_after_ctrl_c_and_a_kill_no_process_is_left(
    model: Path, tmp_path: Path
) -> None:
    endless, worker_log = ("--steps", "100000", "--rollout.num_workers", "1"), str(tmp_path / "logs" / "worker-0.log")
    with start(model, tmp_path, *endless) as process:
        read_until(process, "trained 2")  # by then the checkpoint of version 1 is written
        assert len(processes_naming(str(model))) > 1
        assert len(processes_naming(worker_log)) == 1
        process.kill()
    killed = how_it_ended(tmp_path)
    assert killed is not None
    assert (killed.how, f"process {process.pid} " in killed.why) == ("killed", True)
    until = time.monotonic() + 60
    while left := [*processes_naming(str(model)), *processes_naming(worker_log)]:
        assert time.monotonic() < until, left
        time.sleep(0.1)
    saved, _ = newest_checkpoint(tmp_path)
    assert saved > 0
    address = f"127.0.0.1:{free_port()}"
    with start(model, tmp_path, *endless, "--log.metrics_address", address, "--evaluation.every", "1") as process:
        assert read_until(process, "trained") == f"trained {saved + 1}\n"
        wanted, scraped = names_in_dashboard(), names_scraped(address)
        while wanted - scraped and time.monotonic() < until + 60:
            read_until(process, "trained")
            scraped = names_scraped(address)
        going_on = how_it_ended(tmp_path)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130, rest
    assert wanted - scraped == set(), "the dashboard asks for what no scrape gives"
    assert len(wanted) > 30
    assert re.search(r"^next: .* continues from .*version-", rest, re.MULTILINE)
    assert "stopped by SIGINT\n" in rest
    assert "the run was interrupted (SIGINT): " in rest
    interrupted = how_it_ended(tmp_path)
    assert going_on is not None
    assert interrupted is not None
    assert [end.how for end in (going_on, interrupted)] == ["running", "interrupted"]
    assert interrupted.version == newest_checkpoint(tmp_path)[0]
    assert f"agent_script.py --model {model} " in interrupted.what_next
    assert interrupted.what_next.endswith(f"continues from {newest_checkpoint(tmp_path)[1]}")
    assert {"checkpoints", "logs", "files"} <= interrupted.disk.keys()
    assert processes_naming(str(model)) == processes_naming(worker_log) == []
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["version"] for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) == interrupted.version


async def begin(run_dir: Path, *, workflow: Any = None, dataset: Any = ({"number": 1},), **settings: Any) -> None:
    """Start a run that cannot start, if only because it has no model."""
    config = small(run_dir, **{"model": str(run_dir / "none"), **settings})
    async with launch(config, workflow=workflow or SayDigits(), dataset=dataset):
        pass


async def test_a_model_that_cannot_be_loaded_is_named_and_leaves_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "no_model").mkdir()
    (tmp_path / "no_model" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=str(tmp_path / "no_model")):
        await begin(tmp_path / "run", model=str(tmp_path / "no_model"))
    assert processes_naming(str(tmp_path)) == []


async def test_a_server_that_is_not_there_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_scripted_training(monkeypatch)
    engine = {"kind": "sglang", "addresses": ["http://127.0.0.1:9"]}
    with pytest.raises(ServerError, match=r"no inference server answers at http://127\.0\.0\.1:9"):
        await begin(tmp_path, model=str(model), engine=engine)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"dataset": []}, DatasetError, "dataset is empty"),
        ({"evaluation": {"every": 5}}, ConfigError, r"evaluation\.every is set, but there is nothing to evaluate on"),
        (
            {
                "algorithm": {"preset": "distillation"},
                "workflow": DistillationWorkflow(SayDigits(), NO_TEACHER, keep_reward=True),
            },
            ConfigError,
            "the workflow keeps its own rewards beside the teacher's",
        ),
    ],
)
async def test_what_cannot_be_trained_is_refused_before_anything_starts(
    given: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        await begin(tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("preset", "role"), [("ppo", "critic"), ("prime", "reward_model")])
def test_a_critic_or_reward_model_must_read_and_see_what_the_policy_does(
    model: Path, tmp_path: Path, preset: str, role: str
) -> None:
    other, more = (
        write_tiny_model(tmp_path / "other", ["Say another number"]),
        shutil.copytree(model, tmp_path / "more"),
    )
    tokenizer = AutoTokenizer.from_pretrained(more)
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    tokenizer.save_pretrained(more)
    seeing, blind = write_tiny_vision_model(tmp_path / "seeing"), shutil.copytree(model, tmp_path / "blind")
    AutoTokenizer.from_pretrained(seeing).save_pretrained(blind)

    def check(policy: Path, beside: Path | None) -> None:
        algorithm = {"preset": preset, role: {"model": beside and str(beside)}}
        _check_models_beside(Config.model_validate({"model": str(policy), "algorithm": algorithm}))

    for policy, beside in ((model, None), (model, more), (blind, blind)):
        check(policy, beside)
    with pytest.raises(ConfigError, match=rf"{role}.model {other} has other tokens than {model}: .* same family"):
        check(model, other)
    with pytest.raises(ConfigError, match=rf"seeing sees images, and algorithm.{role}.model {blind} does not; "):
        check(seeing, blind)


@pytest.mark.parametrize(
    ("engine", "of_model", "advice"),
    [
        ({}, None, "room for 4096 tokens together; lower it, or set engine.context_length"),
        ({"context_length": 8000}, 4096, "room for 4096 tokens together; lower it$"),
        ({"kind": "sglang", "addresses": ["http://a:1"]}, 4096, "lower it$"),
        ({"context_length": 4097}, None, None),
    ],
)
def test_answers_that_leave_no_room_for_a_prompt_are_refused(
    engine: dict[str, object], of_model: int | None, advice: str | None
) -> None:
    config = Config.model_validate({"model": "m", "engine": engine})
    sampling = SamplingParams(max_new_tokens=4096)
    workflow = SingleTurnWorkflow(TOKENIZER, NumericMatch(), sampling=sampling)
    with pytest.raises(ConfigError, match=f"max_new_tokens is 4096.*{advice}") if advice else nullcontext():
        _check_room(config, RunTask(workflow=workflow, dataset=[{}], eval_dataset=None), of_model)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sampling": SamplingParams(max_new_tokens=800)}, "max_new_tokens of the sub-agent clerk is 800"),
        (
            {"compaction": Compaction(context_length=900, summary_tokens=90)},
            "compaction.context_length of the sub-agent clerk is 900",
        ),
        ({"compaction": Compaction(context_length=800, summary_tokens=90)}, None),
    ],
)
def test_what_leaves_no_room_in_a_sub_agents_context_is_refused(settings: dict[str, Any], said: str | None) -> None:
    clerk = SubAgent(name="clerk", description="Files.", **{"sampling": SamplingParams(max_new_tokens=9), **settings})
    reader = SubAgent(name="reader", description="Reads.", sub_agents=[clerk])
    sampling = SamplingParams(max_new_tokens=9)
    workflow = ToolAgentWorkflow(TOKENIZER, NumericMatch(), sampling=sampling, sub_agents=[reader])
    config = Config.model_validate({"model": "m", "engine": {"context_length": 800}})
    with pytest.raises(ConfigError, match=f"{said}, and prompt and .* 800 tokens") if said else nullcontext():
        _check_room(config, RunTask(workflow=workflow, dataset=[{}], eval_dataset=None), None)


class Broken:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, row: int) -> dict[str, Any]:
        raise OSError("the disk is gone")


def test_a_first_row_that_cannot_be_read_fails_its_episodes_and_not_the_start(tmp_path: Path) -> None:
    workflow = SingleTurnWorkflow(TOKENIZER, NumericMatch())
    check_sees(small(tmp_path), RunTask(workflow=workflow, dataset=Broken(), eval_dataset=None), Broken())


def test_tracebacks_after_an_engine_was_loaded_are_not_torchs(model: Path) -> None:
    hook = sys.excepthook
    load_train_engine(model).close()
    assert sys.excepthook is hook


@pytest.mark.parametrize(
    ("dtype", "transport", "count"), [("bfloat16", "disk", 1), ("bfloat16", "adapter", 0), ("float32", "disk", 0)]
)
def test_a_warning_says_that_servers_would_get_rounded_adapters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: str, transport: str, count: int
) -> None:
    config = small(tmp_path, train={"dtype": dtype, "lora": {"rank": 4}}, weights={"transport": transport})
    tasks = given_tasks(Given(workflow=SayDigits(), dataset=[{}]))
    _check(config, tasks, None)
    assert caplog.text.count("merged into the model") == count
