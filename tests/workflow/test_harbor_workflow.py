"""Episodes on Harbor's tasks in bubblewrap, and in containers of a docker that is a stand-in."""

from pathlib import Path
from typing import Any

import pytest
from sandbox.conftest import calls, docker, go_without  # noqa: F401 - a fixture
from workflow.harbor_tasks import CONFIG, DOCKERFILE, TESTS, write_task

from arl.api.errors import ConfigError, DatasetError, EnvironmentFailedError, SandboxError
from arl.api.fakes import ScriptedEngine
from arl.api.types import SamplingParams, Trajectory
from arl.engine.tiny import tiny_tokenizer
from arl.run.finetuning.warm_starts import tool_call
from arl.workflow.harbor_task import harbor_tasks
from arl.workflow.harbor_workflow import HarborWorkflow

TOKENIZER = tiny_tokenizer()
SOLVED = "wc -l < notes.txt > answer"


def bash(command: str) -> str:
    return tool_call("bash", command=command)


def workflow(**settings: Any) -> HarborWorkflow:
    sampling = SamplingParams(max_new_tokens=500)
    return HarborWorkflow(TOKENIZER, sampling=sampling, **{"sandbox": "bubblewrap", **settings})


async def played(task: Path, *answers: str, **settings: Any) -> tuple[Trajectory, str]:
    """An episode with a model that says `answers`; also all that it saw and said."""
    (row,) = harbor_tasks(task)
    engine = ScriptedEngine.saying(TOKENIZER, *answers)
    agent = workflow(**settings)
    agent.check_example(row)
    try:
        async with agent:
            (trajectory,) = await agent.arun_episode(engine, row)
    except SandboxError as reason:
        go_without(reason)
        raise
    assert len(engine.requests) == len(answers)
    return trajectory, str(TOKENIZER.decode(trajectory.token_ids))


async def test_the_model_works_in_the_terminal_and_the_tests_reward_it(tmp_path: Path) -> None:
    look = bash("pwd; ls /app /tests /logs; echo $GREETING")
    trajectory, text = await played(write_task(tmp_path / "t"), look, bash(SOLVED), "Done.")
    assert "user\nWrite the number of lines of notes.txt to answer.<|im_end|>" in text
    assert "<tool_response>\n/app\n/app:\ndata\nnotes.txt\n\n/logs:\n\n/tests:\nhello you\n</tool_response>" in text
    assert "<tool_response>\n[no output]\n</tool_response>" in text
    assert (trajectory.reward, trajectory.rewards) == (1.0, {"reward": 1.0})
    counts = {"tool_calls": 2, "turns": 3, "answered": 1.0, "verifier_cut": 0.0}
    assert counts.items() <= trajectory.metrics.items()


@pytest.mark.parametrize(
    "command",
    [
        "true",
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; touch /tests/key",
        "(while true; do echo 1 > /logs/verifier/reward.txt; done) &",
    ],
    ids=["nothing", "its own reward", "its own tests", "a process that goes on"],
)
async def test_only_the_tests_reward(tmp_path: Path, command: str) -> None:
    trajectory, _ = await played(write_task(tmp_path / "t"), bash(command), "Done.")
    assert trajectory.reward == 0.0


async def test_the_tests_run_however_the_episode_ends(tmp_path: Path) -> None:
    trajectory, _ = await played(write_task(tmp_path / "t"), bash(SOLVED), max_turns=1)
    assert (trajectory.reward, trajectory.metrics["answered"]) == (1.0, 0.0)


async def test_the_model_reads_how_a_command_ended(tmp_path: Path) -> None:
    commands = ["exit 3", "echo a; sleep 60", "seq 9999"]
    said = [bash(command) for command in commands]
    _, text = await played(write_task(tmp_path / "t"), *said, "No.", command_timeout_s=0.5, max_output_chars=20)
    assert "[exit code 3]" in text
    assert "a\n[the command took too long, and was ended]" in text
    assert "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n[cut here: 48868 more characters]" in text


async def test_the_agents_time_is_that_of_its_commands(tmp_path: Path) -> None:
    task = write_task(tmp_path / "t", config=CONFIG.replace("timeout_sec = 20", "timeout_sec = 0.3"))
    trajectory, text = await played(task, bash("sleep 60"), bash(SOLVED), "Done.")
    assert "[no time is left for commands]" in text
    assert trajectory.reward == 0.0


@pytest.mark.parametrize(
    ("written", "reward", "parts"),
    [
        ('{"reward": 0.5, "speed": 2}', 0.5, {"reward": 0.5, "speed": 2.0}),
        ('{"score": 0.25}', 0.25, {"score": 0.25}),
        ("0.75", 0.75, {"reward": 0.75}),
    ],
)
async def test_reward_json_goes_before_reward_txt(
    tmp_path: Path, written: str, reward: float, parts: dict[str, float]
) -> None:
    tests = f"{TESTS}\necho '{written}' > /logs/verifier/reward.json\n"
    trajectory, _ = await played(write_task(tmp_path / "t", tests=tests), "Done.")
    assert (trajectory.reward, trajectory.rewards) == (reward, parts)


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ("#!/bin/bash\necho no pytest here\n", "left neither .*they said:\nno pytest here"),
        ("#!/bin/bash\necho well > /logs/verifier/reward.txt\n", "left /logs/verifier/reward.txt with 'well"),
        ("#!/bin/bash\necho nan > /logs/verifier/reward.txt\n", "it must hold numbers"),
        ('#!/bin/bash\necho \'{"a": 1, "b": 2}\' > /logs/verifier/reward.json\n', "none is called reward"),
    ],
)
async def test_tests_that_leave_no_reward_fail_the_episode_with_what_they_said(
    tmp_path: Path, tests: str, why: str
) -> None:
    with pytest.raises(EnvironmentFailedError, match=f"(?s)the tests of the task t .*{why}"):
        await played(write_task(tmp_path / "t", tests=tests), "Done.")


async def test_tests_that_take_too_long_are_worth_nothing(tmp_path: Path) -> None:
    config = CONFIG.replace("timeout_sec = 30", "timeout_sec = 0.5")
    task = write_task(tmp_path / "t", config=config, tests="#!/bin/bash\nbash /app/answer\n")
    trajectory, _ = await played(task, bash("echo sleep 60 > answer"), "Done.")
    assert (trajectory.reward, trajectory.metrics["verifier_cut"]) == (0.0, 1.0)


async def test_a_task_that_bubblewrap_cannot_play_is_refused_before_the_run(tmp_path: Path) -> None:
    (row,) = harbor_tasks(write_task(tmp_path / "a", dockerfile=f"{DOCKERFILE}RUN make\n"))
    with pytest.raises(DatasetError, match="needs `RUN make`, which takes Docker"):
        workflow().check_example(row)
    (row,) = harbor_tasks(write_task(tmp_path / "b", dockerfile="FROM debian\nWORKDIR /srv/x\n"))
    with pytest.raises(DatasetError, match=r"has /srv/x, which is not below /app.*'/srv'"):
        workflow().check_example(row)
    workflow(directories=["/srv"]).check_example(row)


def test_a_row_of_another_dataset_and_an_unknown_sandbox_are_errors() -> None:
    with pytest.raises(DatasetError, match="no `path` of a task; make the dataset with harbor_tasks"):
        workflow().check_example({"question": "?"})
    with pytest.raises(ConfigError, match="no sandbox 'unsafe' for tasks"):
        workflow(sandbox="unsafe")


@pytest.mark.parametrize(("sandbox", "line"), [("docker", ""), ("auto", "RUN make\n")])
async def test_a_task_that_needs_an_image_runs_in_its_container(
    tmp_path: Path,
    docker: Path,  # noqa: F811 - the fixture
    sandbox: str,
    line: str,
) -> None:
    tests = '#!/bin/sh\n[ "$(cat answer)" = "$EXPECTED" ] && echo 1 > ../logs/verifier/reward.txt'
    task = write_task(tmp_path / "task", dockerfile=DOCKERFILE + line, tests=tests)
    trajectory, _ = await played(task, bash("echo 2 > /app/answer"), "Done.", sandbox=sandbox)
    assert trajectory.reward == 1.0
    asked = calls(docker)
    (build,) = (call for call in asked if call[0] == "build")
    assert build[-1] == str(task / "environment")
    (started,) = (" ".join(call) for call in asked if call[:2] == ["run", "--detach"])
    assert "--network none --memory 268435456" in started
