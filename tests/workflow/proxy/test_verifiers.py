"""Environments of verifiers run to their end, and the trajectories are what verifiers itself recorded."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from programs import TOKENIZER, calling, encode, saying, shown, spelled, trained
from renderers import DefaultRendererConfig
from stock_env import StockTools
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from verifiers.v1.dialects import ChatDialect

from arl.api.errors import ArlError, ModelError, ServerError
from arl.api.scripted import ScriptedEngine
from arl.api.types import ModelRequest, ModelResponse, SamplingParams, Trajectory
from arl.workflow.proxy import OpenAIProxy
from arl.workflow.verifiers_workflow import EnvironmentFailedError, VerifiersWorkflow, local_environment

RENDERER = DefaultRendererConfig(tool_parser="qwen3")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    directory = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory)


def unevenly(*answers: str) -> ScriptedEngine:
    """Each token has a logprob of its own."""
    remaining = iter(answers)

    def answer(_: ModelRequest) -> ModelResponse:
        ids = tuple(spelled(next(remaining)))
        logprobs = tuple(-0.1 * (i + 1) for i in range(len(ids)))
        versions = (3,) * len(ids)
        return ModelResponse(output_ids=ids, output_logprobs=logprobs, output_versions=versions, stop_reason="stop")

    return ScriptedEngine(answer)


def recorded(trajectory: Trajectory) -> tuple[list[int], list[bool], list[float]]:
    mask = [bool(bit) for bit in trajectory.loss_mask]
    return list(trajectory.token_ids), mask, list(trajectory.behavior_logprobs)


def recorded_by_verifiers(branch: vf.Branch) -> tuple[list[int], list[bool], list[float]]:
    return branch.token_ids, branch.sampled_mask, branch.logprobs


async def run(
    environment: vf.Env, engine: ScriptedEngine, tokenizer: PreTrainedTokenizerBase, place: int = 0, **options: Any
) -> list[Trajectory]:
    workflow = VerifiersWorkflow(environment, tokenizer, renderer=RENDERER, **options)
    rows = workflow.rows(environment.taskset)
    async with workflow:
        return list(await workflow.arun_episode(engine, rows[place]))


async def test_a_single_turn_gives_the_trajectory_that_verifiers_recorded(tokenizer: PreTrainedTokenizerBase) -> None:
    env = local_environment({"taskset": {"id": "letters_env"}})
    (trajectory,) = await run(env, unevenly("e"), tokenizer)
    (branch,) = env.episodes[0].traces[0].branches
    assert recorded(trajectory) == recorded_by_verifiers(branch)
    assert trained(trajectory) == ["e"]
    assert trajectory.reward == 1.5
    assert trajectory.rewards == {"correct": 1.0, "short": 0.5}
    assert trajectory.metrics == {"turns": 1, "length": 1.0}
    assert trajectory.oldest_version == 3


async def test_turns_with_a_user_give_one_trajectory_as_verifiers_recorded_it(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    env = local_environment({"taskset": {"id": "guess_env"}})
    (trajectory,) = await run(env, unevenly("5", "9", "7"), tokenizer)
    (branch,) = env.episodes[0].traces[0].branches
    assert recorded(trajectory) == recorded_by_verifiers(branch)
    assert trained(trajectory) == ["5", "9", "7"]
    assert "Higher." in str(TOKENIZER.decode(list(trajectory.token_ids)))
    assert (trajectory.role, trajectory.reward) == ("player", 1.0)


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
async def test_tools_of_the_environment_are_called(tokenizer: PreTrainedTokenizerBase) -> None:
    engine = unevenly(calling("stock_of", fruit="plums"), calling("sell", fruit="plums"), "There are 30.")
    async with served(StockTools(vf.SharedToolsetConfig())) as url:
        env = local_environment({"taskset": {"id": "stock_env", "tools": {"url": url}}})
        (trajectory,) = await run(env, engine, tokenizer, place=1)
    assert "How many there are of a fruit." in shown(engine.requests[0])
    assert "<tool_response>\n30\n</tool_response>" in shown(engine.requests[1])
    assert "error: there is no tool 'sell'; there is stock_of" in shown(engine.requests[2])
    assert trained(trajectory)[::2] == [calling("stock_of", fruit="plums"), "There are 30."]
    assert trajectory.reward == 1.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated:DeprecationWarning")  # verifiers' retries
async def test_verifiers_starts_a_process_that_serves_its_tools(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    engine = unevenly(calling("stock_of", fruit="pears"), "There are 12.")
    (trajectory,) = await run(local_environment({"taskset": {"id": "stock_env"}}), engine, tokenizer)
    assert trajectory.reward == 1.0


async def test_each_attempt_of_an_agent_is_a_trajectory_with_its_own_reward(tokenizer: PreTrainedTokenizerBase) -> None:
    env = local_environment({"id": "best-of-n", "n": 2, "taskset": {"id": "letters_env"}})
    first, second = await run(env, unevenly("e", "five"), tokenizer)
    assert [trained(first), trained(second)] == [["e"], ["five"]]
    assert [first.reward, second.reward] == [1.5, 0.0]
    assert [first.role, second.role] == ["agent", "agent"]


async def test_an_agent_that_plays_the_user_is_not_trained(tokenizer: PreTrainedTokenizerBase) -> None:
    env = local_environment({"id": "user-sim", "taskset": {"id": "letters_env"}})
    engine = unevenly("Which letter?", "e", "###DONE###")
    (trajectory,) = await run(env, engine, tokenizer)
    assert (trajectory.role, trained(trajectory)) == ("assistant", ["e"])


async def test_episodes_run_at_once_and_each_has_its_own_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    env = local_environment({"taskset": {"id": "letters_env"}})
    workflow = VerifiersWorkflow(env, tokenizer, renderer=RENDERER)
    rows = workflow.rows(env.taskset)
    both = asyncio.Barrier(2)

    def engine(answer: str) -> ScriptedEngine:
        async def say(_: ModelRequest) -> list[int]:
            await both.wait()
            return spelled(answer)

        return ScriptedEngine(say)

    async with workflow, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(workflow.arun_episode(engine(answer), row))
            for answer, row in zip("er", rows[:2], strict=True)
        ]
    assert [trained(task.result()[0]) for task in tasks] == [["e"], ["r"]]


@pytest.mark.parametrize(
    ("place", "config", "said"),
    [
        (0, {}, "its agent: TaskError: task FailingTask scoring: ZeroDivisionError: nobody was fair"),
        (1, {"agent": {"timeout": {"setup": 0.05}}}, "called the model; they ended by: setup_timeout"),
        (2, {}, "called the model; they ended by: never_begins"),
    ],
)
async def test_an_environment_that_fails_or_hangs_is_an_error_that_says_where(
    tokenizer: PreTrainedTokenizerBase, place: int, config: dict[str, Any], said: str
) -> None:
    env = local_environment({"taskset": {"id": "failing_env"}, **config})
    with pytest.raises(EnvironmentFailedError) as failure:
        await run(env, saying("I am."), tokenizer, place)
    assert said in str(failure.value)


async def test_the_engines_error_is_the_cause_of_a_failed_episode(tokenizer: PreTrainedTokenizerBase) -> None:
    env = local_environment({"taskset": {"id": "letters_env"}})
    with pytest.raises(EnvironmentFailedError, match="all servers are down") as failure:
        await run(env, saying(ServerError("all servers are down")), tokenizer)
    assert isinstance(failure.value.__cause__, ServerError)


async def test_an_episode_that_is_cancelled_leaves_nothing_behind(tokenizer: PreTrainedTokenizerBase) -> None:
    asked = asyncio.Event()

    async def hang(_: ModelRequest) -> list[int]:
        asked.set()
        await asyncio.Event().wait()
        return []

    env = local_environment({"taskset": {"id": "letters_env"}})
    workflow = VerifiersWorkflow(env, tokenizer, renderer=RENDERER)
    rows = workflow.rows(env.taskset)
    async with workflow:
        hanging = asyncio.create_task(workflow.arun_episode(ScriptedEngine(hang), rows[0]))
        await asked.wait()
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        (trajectory,) = await workflow.arun_episode(unevenly("e"), rows[0])
    assert trained(trajectory) == ["e"]


async def test_a_workflow_is_opened_again_after_it_was_left(tokenizer: PreTrainedTokenizerBase) -> None:
    env = local_environment({"taskset": {"id": "letters_env"}})
    workflow = VerifiersWorkflow(env, tokenizer, renderer=RENDERER)
    rows = workflow.rows(env.taskset)
    for _ in range(2):
        async with workflow:
            (trajectory,) = await workflow.arun_episode(unevenly("e"), rows[0])
        assert trained(trajectory) == ["e"]


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(ArlError, match=r"pip install 'arl\[verifiers\]'"):
        local_environment({"taskset": {"id": "letters_env"}})


def test_what_an_environment_has_chosen_for_its_agents_is_kept() -> None:
    env = local_environment({"taskset": {"id": "letters_env"}, "agent": {"harness": {"id": "bash"}, "max_turns": 3}})
    agent = env.config.agent
    assert (agent.harness.id, agent.runtime.type, agent.max_turns) == ("bash", "subprocess", 3)


async def test_a_rollout_that_outgrows_the_context_is_scored_and_truncated(tokenizer: PreTrainedTokenizerBase) -> None:
    env = local_environment({"taskset": {"id": "guess_env"}})
    length = len(encode("<|im_start|>user\nGuess a number.<|im_end|>\n<|im_start|>assistant\n")) + 8
    (trajectory,) = await run(env, saying("5", "7"), tokenizer, context_length=length)
    assert trained(trajectory) == ["5"]
    assert trajectory.is_truncated
    assert trajectory.reward == 0.0


async def test_verifiers_client_asks_for_the_context_length_and_gets_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    engine = unevenly("e")
    messages = [{"role": "user", "content": "hi"}]
    async with OpenAIProxy(TOKENIZER, context_length=64) as proxy, proxy.episode(engine) as session:
        client = vf.resolve_client(client_config(session.base_url, session.api_key, tokenizer))
        try:
            body = {"model": "arl", "messages": messages}
            answer = await client.get_response(ChatDialect(), body, vf.SamplingConfig(max_tokens=8, temperature=0.7))
            long = {"model": "arl", "messages": [{"role": "user", "content": "hi" * 40}]}
            with pytest.raises(vf.ProviderError, match="exceeds maximum context length") as refusal:
                await client.get_response(ChatDialect(), long, vf.SamplingConfig())
        finally:
            await client.close()
        (trajectory,) = session.trajectories(1.0)
    assert refusal.value.status_code == 400
    assert len(engine.requests) == 1
    assert answer.tokens is not None
    assert (*answer.tokens.prompt_ids, *answer.tokens.completion_ids) == trajectory.token_ids
    assert tuple(answer.tokens.completion_logprobs) == trajectory.behavior_logprobs[-2:]
    sampling = engine.requests[0].sampling
    assert sampling == SamplingParams(max_new_tokens=8, temperature=0.7, stop_token_ids=(TOKENIZER.eos_token_id,))


def client_config(base_url: str, key: str, tokenizer: PreTrainedTokenizerBase) -> vf.TrainClientConfig:
    return vf.TrainClientConfig(
        base_url=base_url,
        api_key_var="NO_KEY_IS_HERE",
        headers={"Authorization": f"Bearer {key}"},
        renderer=RENDERER,
        renderer_model_name=tokenizer.name_or_path,
    )


@pytest.mark.parametrize("run_id", [None, "another's"])
async def test_a_shared_url_takes_calls_of_admitted_runs_alone(
    tokenizer: PreTrainedTokenizerBase, run_id: str | None
) -> None:
    engine = saying("e")
    body = {"model": "arl", "messages": [{"role": "user", "content": "hi"}]}
    async with OpenAIProxy(TOKENIZER) as proxy, proxy.episode(engine) as session:
        with proxy.shared_url() as shared, shared.admitting("a run", session):
            client = vf.resolve_client(client_config(shared.base_url, shared.api_key, tokenizer))
            try:
                with pytest.raises(vf.ProviderError) as refusal:
                    await client.get_response(ChatDialect(), body, vf.SamplingConfig(), session_id=run_id)
            finally:
                await client.close()
    assert refusal.value.status_code == 401
    assert not engine.requests


async def test_a_tokenizer_that_renderers_cannot_load_is_refused() -> None:
    with pytest.raises(ModelError, match="save_pretrained"):
        VerifiersWorkflow(local_environment({"taskset": {"id": "letters_env"}}), TOKENIZER)


async def test_a_workflow_that_is_not_open_runs_nothing(tokenizer: PreTrainedTokenizerBase) -> None:
    workflow = VerifiersWorkflow(local_environment({"taskset": {"id": "letters_env"}}), tokenizer)
    with pytest.raises(ArlError, match="not open"):
        await workflow.arun_episode(saying("e"), {"task": 0})
