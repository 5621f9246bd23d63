"""Agent frameworks as they are, in environments of their own, behind the endpoint: `make test-frameworks`."""

import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from embedded_server import server_here
from workflow.scripted_answers import calling, saying

from arl.api.fakes import ScriptedEngine
from arl.api.settings.engines import ClientConfig
from arl.api.types import SamplingParams
from arl.endpoint.proxy import OpenAIProxy
from arl.endpoint.sdk_workflow import Command
from arl.endpoint.session import EpisodeSession
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.tiny import TinyShape, tiny_tokenizer, write_tiny_model

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(240)]
HERE = Path(__file__).parent
TOKENIZER = tiny_tokenizer()
SHAPE = TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=2, context_length=8192)
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1", "AI_SDK_LOG_WARNINGS": "false"}


def command(program: str) -> Command:
    """The program in its environment; skips the test where that is not installed."""
    name, *arguments = program.split()
    python, node = os.environ.get("ARL_FRAMEWORKS_PYTHON"), shutil.which("node")
    if python is None or not (HERE / "node_modules").is_dir():
        pytest.skip("needs agent frameworks: make test-frameworks")
    interpreter = python if name.endswith(".py") else node
    if interpreter is None:
        pytest.skip("needs Node.js")
    return Command(arguments=[interpreter, str(HERE / "programs" / name), *arguments], env=QUIET)


async def run(program: str, session: EpisodeSession) -> list[dict[str, Any]]:
    """What the program prints: points."""
    printed = await command(program).arun(session, {})
    return [json.loads(line) for line in printed.splitlines()]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = write_tiny_model(tmp_path_factory.mktemp("untrained") / "model", shape=SHAPE)
    with server_here(str(model)) as url:
        yield url


@asynccontextmanager
async def episode(engine: Any) -> AsyncIterator[EpisodeSession]:
    async with (
        OpenAIProxy(TOKENIZER, sampling=SamplingParams(max_new_tokens=1000)) as proxy,
        proxy.episode(engine) as session,
    ):
        yield session


STRUCTURED = {
    "by_openai.py": 3,
    "by_anthropic.py": 2,
    "by_openai_agents.py": 2,
    "by_langchain.py": 2,
    "by_pydantic_ai.py": 2,
    "by_litellm.py": 2,
    "by_openai.mjs": 2,
    "by_ai.mjs": 5,
}
"""Program -> how many points it asks for."""


@pytest.mark.parametrize("program", STRUCTURED)
async def test_an_untrained_model_answers_in_the_form_that_a_framework_asks_for(program: str, server: str) -> None:
    async with RemoteInferenceEngine([server], ClientConfig()) as engine, episode(engine) as session:
        points = await run(program, session)
        made = session.trajectories(1.0)
    assert len(points) == STRUCTURED[program]
    for point in points:
        assert point["x"] in range(10)
        assert point["colour"] in ("red", "green")
    turns = [turn for trajectory in made for turn in trajectory.turns]
    assert len(turns) == session.metrics["calls"] == STRUCTURED[program]
    assert session.metrics["calls_refused"] == 0
    for trajectory in made:
        assert trajectory.kept_ids is not None
        assert (trajectory.kept_ids.index[trajectory.loss_mask] >= 0).all(), "each token has what it was sampled among"


POINT = {"x": 3, "colour": "red"}
CODE = "Thought: I make it.\n<code>\nfinal_answer(point_at(3))\n</code>"


@pytest.mark.parametrize(
    ("program", "answers", "num_branches"),
    [
        ("by_langgraph.py", [calling("add", a=1, b=2), json.dumps(POINT)], 0),
        # It shows the model its calls as text of its own, so each turn is a branch.
        ("by_smolagents.py tools", [calling("point_at", x=3), calling("final_answer", answer=POINT)], 1),
        ("by_smolagents.py code", [CODE], 0),
    ],
)
async def test_the_turns_of_a_frameworks_agent_are_trained_once_each(
    program: str, answers: list[str], num_branches: int
) -> None:
    engine: ScriptedEngine = saying(*answers)
    async with episode(engine) as session:
        assert await run(program, session) == [POINT]
        made = session.trajectories(1.0)
    assert [turn.text for turn in session.turns()] == answers
    assert sum(len(trajectory.turns) for trajectory in made) == len(answers)
    assert session.metrics["branches"] == num_branches
    is_constrained = [request.sampling.grammar is not None for request in engine.requests]
    assert is_constrained == ["code" not in program] * len(answers)
