"""The terminal agent's tasks and episodes in the sandbox, without a model."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import terminal_tasks
from played import TOKENIZER
from sandbox.conftest import go_without
from terminal_agent import TerminalAgentConfig, prepare, prompt, rows
from terminal_tasks import JOBS, TerminalTask, tasks

from arl.api.errors import SandboxError
from arl.api.fakes import ScriptedEngine
from arl.api.types import SamplingParams
from arl.engine.tiny import TinyShape, write_tiny_model
from arl.run.finetuning.warm_starts import tool_call
from arl.run.script import load_config
from arl.workflow.harbor_task import harbor_tasks
from arl.workflow.harbor_workflow import HarborWorkflow

FIRST = tasks("held_out", 60)
OF_JOB = {job.words: next(task for task in FIRST if task.job is job) for job in JOBS}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agent() -> AsyncIterator[HarborWorkflow]:
    agent = HarborWorkflow(TOKENIZER, sampling=SamplingParams(max_new_tokens=500), sandbox="bubblewrap", max_turns=4)
    try:
        async with agent:
            yield agent
    except SandboxError as reason:
        go_without(reason)


async def reward_of(agent: HarborWorkflow, task: TerminalTask, directory: Path, *commands: str) -> float:
    task.write(directory)
    (row,) = harbor_tasks(directory)
    calls = [tool_call("bash", command=command) for command in commands]
    (trajectory,) = await agent.arun_episode(ScriptedEngine.saying(TOKENIZER, *calls, "Done."), row)
    return trajectory.reward


@pytest.mark.asyncio(loop_scope="module")
async def test_each_job_is_done_by_its_command_and_not_by_looking(agent: HarborWorkflow, tmp_path: Path) -> None:
    made = list(OF_JOB.values())
    looks = [f"ls {task.names['place']}" for task in made]
    done = [
        reward_of(agent, task, tmp_path / f"{i}", look, task.command)
        for i, (task, look) in enumerate(zip(made, looks, strict=True))
    ]
    only_seen = [
        reward_of(agent, task, tmp_path / f"s{i}", look) for i, (task, look) in enumerate(zip(made, looks, strict=True))
    ]
    rewards = await asyncio.gather(*done, *only_seen)
    assert rewards == [1.0] * len(JOBS) + [0.0] * len(JOBS)


@pytest.mark.asyncio(loop_scope="module")
async def test_careful_demonstrations_show_what_the_terminal_prints(
    agent: HarborWorkflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal_tasks, "NUM_CAREFUL", 3)
    monkeypatch.setattr(terminal_tasks, "NUM_MIXED", 40)
    careful, mixed = terminal_tasks.lessons(prompt, HarborWorkflow.tool(), seed=0)
    lengths = {len(demonstration["messages"]) for demonstration in mixed}
    assert lengths == {5, 7}  # one command or two
    for i, (demonstration, task) in enumerate(zip(careful, tasks("demonstrations", 3), strict=True)):
        task.write(tmp_path / f"{i}")
        (row,) = harbor_tasks(tmp_path / f"{i}")
        said = [message["content"] for message in demonstration["messages"] if message["role"] == "assistant"]
        engine = ScriptedEngine.saying(TOKENIZER, *said)
        (trajectory,) = await agent.arun_episode(engine, row)
        seen = str(TOKENIZER.decode(trajectory.token_ids))
        shown = [message["content"] for message in demonstration["messages"] if message["role"] == "tool"]
        assert trajectory.reward == 1.0
        assert all(f"<tool_response>\n{content}\n</tool_response>" in seen for content in shown)


def test_no_instruction_is_both_trained_and_held_out() -> None:
    held_out = {task.instruction for task in tasks("held_out", 128)}
    for region in ("training", "demonstrations"):
        assert held_out.isdisjoint(task.instruction for task in tasks(region, 2000))


def test_tasks_are_written_once_and_are_harbors(tmp_path: Path) -> None:
    config = TerminalAgentConfig(run_dir=tmp_path, num_tasks=3, num_held_out=2)
    training, held_out = rows(config)
    assert [len(training), len(held_out)] == [3, 2]
    (tmp_path / "tasks/training_3/0000/instruction.md").write_text("kept")
    assert rows(config)[0][0]["instruction"] == "kept"


async def test_a_directory_of_tasks_is_a_flag(tmp_path: Path) -> None:
    terminal_tasks.write_tasks(tmp_path, "training", 5)
    model = write_tiny_model(tmp_path / "model", shape=TinyShape(hidden_size=32, num_layers=1, head_dim=8))
    flags = ["--model", str(model), "--tasks", str(tmp_path), "--num_held_out", "2", "--sandbox", "docker"]
    setup = await prepare(load_config(TerminalAgentConfig, flags))
    assert [row["task"] for row in (*setup.dataset, *(setup.eval_dataset or ()))] == [f"000{i}" for i in range(5)]
    assert isinstance(setup.workflow, HarborWorkflow)
    assert (setup.workflow.sandbox, setup.workflow.max_turns) == ("docker", 20)


async def test_without_a_sandbox_it_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="bwrap is not installed"):
        await prepare(load_config(TerminalAgentConfig, ["--run_dir", str(tmp_path / "run")]))
    assert not (tmp_path / "run").exists()
