"""Episodes in environments that are made and served with OpenEnv's own classes: `make test-environments`."""

import asyncio
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from free_port import free_port

from arl.api.errors import EnvironmentFailedError
from arl.api.fakes import ScriptedEngine
from arl.api.types import SamplingParams, Trajectory
from arl.engine.tiny import tiny_tokenizer
from arl.run.finetuning.warm_starts import tool_call
from arl.workflow.openenv_workflow import OpenEnvWorkflow

pytestmark = [pytest.mark.environments, pytest.mark.timeout(240)]
TOKENIZER = tiny_tokenizer()
SERVER = Path(__file__).parent / "openenv_server.py"


@contextmanager
def served(kind: str) -> Iterator[str]:
    if (python := os.environ.get("ARL_ENVIRONMENTS_PYTHON")) is None:
        pytest.skip("needs OpenEnv: make test-environments")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen([python, str(SERVER), str(port), kind], start_new_session=True) as server:
        try:
            until_healthy(server, url)
            yield url
        finally:
            server.kill()


def until_healthy(server: subprocess.Popen[bytes], url: str) -> None:
    for _ in range(600):
        assert server.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server did not start")


@pytest.fixture(scope="module")
def guess() -> Iterator[str]:
    with served("guess") as url:
        yield url


@pytest.fixture(scope="module")
def garden() -> Iterator[str]:
    with served("garden") as url:
        yield url


def workflow(url: str, **settings: Any) -> OpenEnvWorkflow:
    return OpenEnvWorkflow(TOKENIZER, url, sampling=SamplingParams(max_new_tokens=200), **settings)


async def played(agent: OpenEnvWorkflow, *answers: str, seed: int = 5) -> tuple[Trajectory, str]:
    """An episode with a model that says `answers`; also all that it saw and said."""
    engine = ScriptedEngine.saying(TOKENIZER, *answers)
    async with agent:
        (trajectory,) = await agent.arun_episode(engine, {"seed": seed})
    assert len(engine.requests) == len(answers)
    return trajectory, str(TOKENIZER.decode(trajectory.token_ids))


def dig(number: object) -> str:
    return tool_call("dig", number=number)


@pytest.mark.parametrize(("kind", "reward"), [("sum", 0.75), ("last", 1.0)])
async def test_an_episode_is_worth_the_sum_of_its_steps_or_the_last_one(guess: str, kind: Any, reward: float) -> None:
    trajectory, text = await played(workflow(guess, reward=kind), "3", "5")
    assert trajectory.reward == reward
    assert trajectory.metrics == {"turns": 2, "steps": 2, "invalid_actions": 0, "done": 1, "context_full": 0}
    assert "user\nGuess a number below ten.<|im_end|>" in text
    assert "user\nhigher<|im_end|>" in text


async def test_the_model_reads_why_an_action_is_none(guess: str) -> None:
    trajectory, text = await played(workflow(guess), "five", "5")
    assert "error: number: Input should be a valid integer" in text
    assert (trajectory.reward, trajectory.metrics["invalid_actions"]) == (1.0, 1)


async def test_an_episode_ends_at_max_turns(guess: str) -> None:
    trajectory, _ = await played(workflow(guess, max_turns=2), "1", "2")
    assert (trajectory.reward, trajectory.metrics["done"]) == (-0.5, 0)


async def test_tools_of_an_environment_are_steps_of_it(garden: str) -> None:
    agent = workflow(garden, tools=True, system="Find the treasure.", observation=lambda _: "Begin.")
    trajectory, text = await played(agent, dig(7), dig("here"), dig(5) + dig(5))
    assert '"name": "dig", "description": "Dig at a place, to find the treasure."' in text
    assert "<tool_response>\nlower\n</tool_response>" in text
    assert "error: " in text.partition("here")[2].partition("</tool_response>")[0]
    counts = {"turns": 3, "steps": 3, "invalid_actions": 1, "done": 1, "context_full": 0}
    assert (trajectory.reward, trajectory.metrics) == (1.0, counts)  # a call after the end is no step


async def test_a_turn_without_a_call_ends_an_episode_with_tools(garden: str) -> None:
    trajectory, _ = await played(workflow(garden, tools=True, observation=lambda _: "Begin."), dig(7), "I give up.")
    assert (trajectory.reward, trajectory.metrics["done"]) == (0.0, 0)


async def test_an_environment_without_tools_is_an_error_that_says_so(guess: str) -> None:
    with pytest.raises(EnvironmentFailedError, match=r"no MCP tools.*leave out tools=True"):
        await played(workflow(guess, tools=True))


async def test_a_bug_of_the_environment_fails_its_episode_alone(guess: str) -> None:
    async with workflow(guess) as agent:
        failing = agent.arun_episode(ScriptedEngine.saying(TOKENIZER, "666"), {"seed": 5})
        other = agent.arun_episode(ScriptedEngine.saying(TOKENIZER, "5"), {"seed": 5})
        failure, made = await asyncio.gather(failing, other, return_exceptions=True)
    assert isinstance(failure, EnvironmentFailedError)
    assert "failed in step (EXECUTION_ERROR): the dice are lost" in str(failure)
    assert made[0].reward == 1.0  # pyright: ignore[reportIndexIssue]


async def test_no_more_episodes_than_max_sessions_have_one(guess: str) -> None:
    async with workflow(guess, max_sessions=2) as agent:
        engines = [ScriptedEngine.saying(TOKENIZER, "3", "5") for _ in range(6)]
        made = await asyncio.gather(*(agent.arun_episode(engine, {"seed": 5}) for engine in engines))
    assert [trajectory.reward for (trajectory,) in made] == [0.75] * 6


async def test_a_server_that_is_full_is_an_error_that_names_the_setting(guess: str) -> None:
    async with workflow(guess) as agent:
        engines = [ScriptedEngine.saying(TOKENIZER, "3", "5") for _ in range(6)]
        episodes = (agent.arun_episode(engine, {"seed": 5}) for engine in engines)
        made = await asyncio.gather(*episodes, return_exceptions=True)
    failures = [failure for failure in made if isinstance(failure, EnvironmentFailedError)]
    assert failures
    assert all("CAPACITY_REACHED" in str(failure) and "max_sessions=" in str(failure) for failure in failures)


async def test_an_environment_that_hangs_or_dies_fails_the_episode() -> None:
    with served("guess") as url:
        with pytest.raises(EnvironmentFailedError, match="did not answer step within 1 s"):
            await played(workflow(url, timeout_s=1.0), "13")
        agent = workflow(url, action="number")
        with pytest.raises(EnvironmentFailedError, match="ended the session during step"):
            await played(agent, "999")
        with pytest.raises(EnvironmentFailedError, match=f"there is no OpenEnv server at {url}"):
            await played(agent)
