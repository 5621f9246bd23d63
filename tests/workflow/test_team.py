"""Several agents in one episode: each its own conversation, role and reward; those that can, speak at the same time."""

import asyncio
from contextlib import nullcontext

import pytest
from scripted_answers import TOKENIZER, calling, decode, ended, said_in, saying, seen_by, too_long

from arl.api.errors import ConfigError, PromptTooLongError, ServerError
from arl.api.fakes import ScriptedEngine
from arl.api.types import ModelRequest, SamplingParams
from arl.rewards import Score
from arl.workflow.team import Member, Team, TeamSettings
from arl.workflow.tools import Tool

SETTINGS = TeamSettings(tokenizer=TOKENIZER)


async def fetch(page: str) -> str:
    """Fetch a page."""
    return f"<{page}>"


async def test_each_member_has_its_own_conversation_system_prompt_and_reward() -> None:
    engine = saying("a draft", "a remark", "a better one")
    team = Team(
        engine, [Member(name="author", system="Write.", role="writer"), Member(name="critic", system="Read.")], SETTINGS
    )
    assert await team.ask("author", "Begin.") == "a draft"
    assert await team.ask("critic", "What of it?") == "a remark"
    assert await team.ask("author", "Again.") == "a better one"
    author, critic = team.trajectories({"author": Score(1.0, {"style": 0.5}), "critic": -1.0}, {"quality": 3.0})
    assert (author.role, author.reward, author.rewards) == ("writer", 1.0, {"style": 0.5})
    assert (critic.role, critic.reward, critic.rewards) == ("critic", -1.0, {})
    assert said_in(author) == "a draft<|im_end|>a better one<|im_end|>"
    assert [request.role for request in engine.requests] == ["writer", "critic", "writer"]
    assert (author.metrics, critic.metrics) == ({"turns": 3, "quality": 3.0, "context_full": 0}, {"context_full": 0})
    assert decode(critic.token_ids).startswith("<|im_start|>system\nRead.<|im_end|>\n<|im_start|>user\nWhat of it?")


@pytest.mark.parametrize("fails", [False, True])
async def test_members_that_are_asked_together_speak_at_the_same_time_and_an_error_is_the_episodes(fails: bool) -> None:
    both = asyncio.Barrier(2)

    async def script(request: ModelRequest) -> list[int]:
        await both.wait()
        if fails:
            raise ServerError("gone")
        return ended("yes")

    team = Team(ScriptedEngine(script), [Member(name="a"), Member(name="b")], SETTINGS)
    with pytest.raises(ServerError) if fails else nullcontext():
        assert await team.ask_all({"b": "?", "a": "?"}) == {"b": "yes", "a": "yes"}


async def test_a_member_may_have_tools() -> None:
    call = calling("fetch", page="home")
    engine = saying(call, "found", call, call)
    member = Member(name="a", tools=[Tool.from_function(fetch)], max_turns=2, sampling=SamplingParams(temperature=0.5))
    team = Team(engine, [member, Member(name="silent")], SETTINGS)
    assert await team.ask("a", "Look.") == "found"
    assert "<home>" in seen_by(engine)
    assert await team.ask("a", "Look again.") is None
    (trajectory,) = team.trajectories(1.0)
    counts = {"turns": 4, "tool_calls": 3, "tool_errors": 0, "malformed_calls": 0, "context_full": 0}
    assert (trajectory.metrics, trajectory.temperature, trajectory.reward) == (counts, 0.5, 1.0)


async def test_a_member_whose_context_is_full_answers_nothing_more() -> None:
    team = Team(saying("yes", too_long()), [Member(name="a")], SETTINGS)
    await team.ask("a", "?")
    assert await team.ask("a", "??") is None
    (trajectory,) = team.trajectories(1.0)
    assert trajectory.is_truncated
    with pytest.raises(PromptTooLongError):
        await Team(saying(too_long()), [Member(name="a")], SETTINGS).ask("a", "?")


async def test_mistakes_in_a_team_are_errors_that_say_so() -> None:
    with pytest.raises(ConfigError, match="their names must differ"):
        Team(saying(), [Member(name="a"), Member(name="a")], SETTINGS)
    team = Team(saying("yes"), [Member(name="a")], SETTINGS)
    with pytest.raises(ConfigError, match="there is no member 'b'; the members are a"):
        await team.ask("b", "?")
    await team.ask("a", "?")
    with pytest.raises(ConfigError, match="a spoke but has no reward"):
        team.trajectories({"b": 1.0})
