"""Environments of verifiers run to their end, and each agent's calls become its trajectories."""

import asyncio
import importlib
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from programs import client_of, saying, shown, trained
from stock_env import StockTools
from verifiers.v1.dialects import ChatDialect
from workflow.scripted_answers import TOKENIZER, calling, encode, ended, response_of

from arl.api.errors import ArlError, EnvironmentFailedError, ServerError
from arl.api.fakes import ScriptedEngine
from arl.api.types import ModelRequest, ModelResponse, SamplingParams, Trajectory
from arl.api.version import install_command
from arl.endpoint.proxy import KEY_HEADER, OpenAIProxy
from arl.endpoint.verifiers_workflow import VerifiersWorkflow, local_environment


def letters(**config: Any) -> vf.Env:
    return local_environment({"taskset": {"id": "letters_env"}, **config})


def unevenly(*answers: str) -> ScriptedEngine:
    """Each token has a logprob of its own."""
    remaining = map(ended, answers)

    def answer(_: ModelRequest) -> ModelResponse:
        ids = next(remaining)
        return response_of(ids, version=3, output_logprobs=tuple(-0.1 * (i + 1) for i in range(len(ids))))

    return ScriptedEngine(answer)


async def run(environment: vf.Env, engine: ScriptedEngine, place: int = 0, **options: Any) -> list[Trajectory]:
    workflow = VerifiersWorkflow(environment, TOKENIZER, **options)
    rows = workflow.rows(environment.taskset)
    async with workflow:
        return list(await workflow.arun_episode(engine, rows[place]))


async def test_a_single_turn_is_a_trajectory_with_what_was_sampled_and_the_parts_of_its_reward() -> None:
    engine = unevenly("e")
    sampling = SamplingParams(max_new_tokens=8, temperature=0.7, top_p=0.9, top_k=5)
    (trajectory,) = await run(letters(), engine, sampling=sampling)
    (turn,) = trajectory.turns
    assert engine.requests[0].sampling == sampling
    assert tuple(trajectory.token_ids) == (*engine.requests[0].input_ids, *ended("e"))
    assert trajectory.behavior_logprobs[turn.start : turn.stop].tolist() == pytest.approx([-0.1, -0.2])
    assert trajectory.reward == 1.5
    assert trajectory.rewards == {"correct": 1.0, "short": 0.5}
    assert trajectory.metrics == {"turns": 1, "length": 1.0}
    assert trajectory.oldest_version == 3


async def test_turns_with_a_user_are_one_trajectory_even_if_the_template_drops_thinking() -> None:
    env = local_environment({"taskset": {"id": "guess_env"}})
    engine = unevenly("5", "<think>\nLess.\n</think>\n\n9", "7")
    (trajectory,) = await run(env, engine)
    (branch,) = env.episodes[0].traces[0].branches
    assert trained(trajectory) == ["5", "<think>\nLess.\n</think>\n\n9", "7"]
    assert [message.content for message in branch.messages if message.role == "assistant"] == ["5", "9", "7"]
    assert tuple(trajectory.token_ids) == (*engine.requests[-1].input_ids, *ended("7"))
    assert "Higher." in shown(engine.requests[-1])
    assert (trajectory.role, trajectory.reward) == ("player", 1.0)
    assert {request.role for request in engine.requests} == {"player"}


@asynccontextmanager
async def served(toolset: vf.Toolset) -> AsyncIterator[str]:
    """The URL of a toolset that runs in this process, as verifiers runs it in another."""
    mcp = MCPServer("tools")
    toolset.register(mcp)
    app = mcp.streamable_http_app(json_response=True, stateless_http=True)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[listening]))
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
            server.should_exit = True


@pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated:DeprecationWarning")  # verifiers' retries
async def test_tools_of_the_environment_are_called() -> None:
    engine = unevenly(calling("stock_of", fruit="plums"), calling("sell", fruit="plums"), "There are 30.")
    async with served(StockTools(vf.SharedToolsetConfig())) as url:
        env = local_environment({"taskset": {"id": "stock_env", "tools": {"url": url}}})
        (trajectory,) = await run(env, engine, place=1)
    assert "How many there are of a fruit." in shown(engine.requests[0])
    assert "<tool_response>\n30\n</tool_response>" in shown(engine.requests[1])
    assert "error: there is no tool 'sell'; the tools are stock_of" in shown(engine.requests[2])
    assert trained(trajectory)[::2] == [calling("stock_of", fruit="plums"), "There are 30."]
    assert trajectory.reward == 1.0


async def test_each_attempt_of_an_agent_is_a_trajectory_with_its_own_reward() -> None:
    first, second = await run(letters(id="best-of-n", n=2), unevenly("e", "five"))
    assert [trained(first), trained(second)] == [["e"], ["five"]]
    assert [first.reward, second.reward] == [1.5, 0.0]
    assert [first.role, second.role] == ["agent", "agent"]


async def test_an_agent_that_plays_the_user_is_not_trained() -> None:
    (trajectory,) = await run(letters(id="user-sim"), unevenly("Which letter?", "e", "###DONE###"))
    assert (trajectory.role, trained(trajectory)) == ("assistant", ["e"])


async def test_episodes_run_at_once_and_each_has_its_own_turns() -> None:
    workflow = VerifiersWorkflow(letters(), TOKENIZER)
    rows = workflow.rows(workflow.env.taskset)
    both = asyncio.Barrier(2)

    def engine(answer: str) -> ScriptedEngine:
        async def say(_: ModelRequest) -> list[int]:
            await both.wait()
            return ended(answer)

        return ScriptedEngine(say)

    async with workflow, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(workflow.arun_episode(engine(answer), row))
            for answer, row in zip("er", rows[:2], strict=True)
        ]
    assert [trained(task.result()[0]) for task in tasks] == [["e"], ["r"]]


SCORING = "its agent: TaskError: task LettersTask scoring: ZeroDivisionError: nobody was fair"
DOWN = ServerError("all servers are down")


@pytest.mark.parametrize(
    ("place", "config", "answer", "said"),
    [
        (3, {}, "g", SCORING),
        (4, {"agent": {"timeout": {"setup": 0.05}}}, "g", "called the model; the agents ended by: setup_timeout"),
        (5, {}, "g", "called the model; the agents ended by: never_begins"),
        (0, {}, DOWN, "all servers are down"),
    ],
)
async def test_an_environment_that_fails_or_hangs_is_an_error_that_says_where(
    place: int, config: dict[str, Any], answer: str | Exception, said: str
) -> None:
    with pytest.raises(EnvironmentFailedError) as failure:
        await run(letters(**config), saying(answer), place)
    assert said in str(failure.value)
    assert (failure.value.__cause__ is DOWN) == (answer is DOWN)


async def test_an_episode_that_is_cancelled_leaves_nothing_behind_and_a_workflow_is_opened_again() -> None:
    asked = asyncio.Event()

    async def hang(_: ModelRequest) -> list[int]:
        asked.set()
        await asyncio.Event().wait()
        return []

    workflow = VerifiersWorkflow(letters(), TOKENIZER)
    row, *_ = workflow.rows(workflow.env.taskset)
    for _ in range(2):
        with pytest.raises(ArlError, match="not open"):
            await workflow.arun_episode(saying("e"), row)
        async with workflow:
            hanging = asyncio.create_task(workflow.arun_episode(ScriptedEngine(hang), row))
            await asked.wait()
            hanging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hanging
            (trajectory,) = await workflow.arun_episode(unevenly("e"), row)
        assert trained(trajectory) == ["e"]
        asked.clear()


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    monkeypatch.delitem(sys.modules, "arl.endpoint.verifiers_workflow")
    with pytest.raises(ArlError, match=re.escape(install_command("verifiers"))):
        importlib.import_module("arl.endpoint.verifiers_workflow")


def test_an_environments_choices_for_its_agents_are_kept() -> None:
    agent = letters(agent={"harness": {"id": "bash"}, "max_turns": 3}).config.agent
    assert (agent.harness.id, agent.runtime.type, agent.max_turns) == ("bash", "subprocess", 3)


async def test_a_rollout_that_outgrows_the_context_is_scored_and_truncated() -> None:
    env = local_environment({"taskset": {"id": "guess_env"}})
    length = len(encode("<|im_start|>user\nGuess a number.<|im_end|>\n<|im_start|>assistant\n")) + 8
    (trajectory,) = await run(env, saying("5", "7"), context_length=length)
    assert trained(trajectory) == ["5"]
    assert trajectory.is_truncated
    assert trajectory.reward == 0.0


@pytest.mark.parametrize("run_id", [None, "another's"])
async def test_a_shared_url_takes_calls_of_admitted_runs_alone(run_id: str | None) -> None:
    engine = saying("e")
    body = {"model": "arl", "messages": [{"role": "user", "content": "hi"}]}
    async with OpenAIProxy(TOKENIZER) as proxy, proxy.episode(engine) as session:
        with proxy.shared_url() as shared, shared.admitting("a run", session):
            async with client_of(session, base_url=shared.base_url, api_key=shared.api_key) as sdk:
                assert [model.id for model in (await sdk.models.list()).data] == ["arl"]  # it needs no run
            client = vf.resolve_client(
                vf.EvalClientConfig(base_url=shared.base_url, headers={KEY_HEADER: shared.api_key})
            )
            try:
                with pytest.raises(vf.ProviderError) as refusal:
                    await client.get_response(ChatDialect(), body, vf.SamplingConfig(), session_id=run_id)
            finally:
                await client.close()
    assert refusal.value.status_code == 401
    assert not engine.requests
