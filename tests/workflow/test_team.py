"""Several agents in one episode: each its own conversation, role and reward; those that can, speak at the same time."""

import asyncio
from contextlib import nullcontext

import pytest
from scripted_answers import TOKENIZER, calling, decode, ended, exact, replying, said_in, saying, seen_by, too_long

from arl.api.errors import ConfigError, PromptTooLongError, ServerError
from arl.api.scripted import ScriptedEngine
from arl.api.types import Example, ModelRequest, SamplingParams
from arl.rewards import Score
from arl.workflow.team import DebateWorkflow, Member, SolverCheckerWorkflow, Team, TeamSettings
from arl.workflow.tools import Tool

QUESTION = {"question": "2 + 2 = ?", "answer": "4"}
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
    with pytest.raises(ConfigError, match="debaters is 1"):
        DebateWorkflow(TOKENIZER, exact, debaters=1)
    with pytest.raises(ConfigError, match="max_attempts is 0"):
        SolverCheckerWorkflow(TOKENIZER, exact, max_attempts=0)


def persuaded(said: str) -> str:
    """Answers 4 from the second round on, and before that 5."""
    return "4" if "Another agent answered:\n5" in said else "5"


async def test_debaters_answer_read_each_other_and_answer_again() -> None:
    engine = replying(persuaded)
    workflow = DebateWorkflow(TOKENIZER, exact, debaters=3, rounds=2, system="Argue.")
    trajectories = await workflow.arun_episode(engine, QUESTION)
    assert [said_in(trajectory) for trajectory in trajectories] == ["5<|im_end|>4<|im_end|>"] * 3
    assert {(trajectory.role, trajectory.reward) for trajectory in trajectories} == {("debater", 1.0)}
    assert [trajectory.metrics.get("turns") for trajectory in trajectories] == [6, None, None]
    assert seen_by(engine).count("Another agent answered:") == 2
    assert seen_by(engine, 0).startswith("<|im_start|>system\nArgue.<|im_end|>")


async def test_debaters_have_rewards_of_their_own_or_their_mean() -> None:
    async def scored(answer: str, data: Example) -> Score:
        value = float(answer == "4")
        return Score(value, {"correct": value}, {"seen": value})

    for shared, rewards in ((False, [1.0, 0.0]), (True, [0.5, 0.5])):
        workflow = DebateWorkflow(TOKENIZER, scored, rounds=1, shared=shared)
        trajectories = await workflow.arun_episode(saying("4", "5"), QUESTION)
        assert [trajectory.reward for trajectory in trajectories] == rewards
        assert [trajectory.rewards["correct"] for trajectory in trajectories] == rewards
        assert trajectories[0].metrics["seen"] == 0.5


async def test_a_debater_whose_context_is_full_keeps_its_last_answer() -> None:
    workflow = DebateWorkflow(TOKENIZER, exact, rounds=2)
    first, second = await workflow.arun_episode(saying("4", "5", too_long(), "6"), QUESTION)
    assert (first.reward, first.is_truncated) == (1.0, True)
    assert (second.reward, second.is_truncated) == (0.0, False)


async def test_the_solver_tries_again_until_the_checker_accepts() -> None:
    engine = saying("5", "It is too much. REJECT", "4", "ACCEPT")
    solver, checker = await SolverCheckerWorkflow(TOKENIZER, exact, system="Solve.").arun_episode(engine, QUESTION)
    assert (solver.role, solver.reward, checker.role, checker.reward) == ("solver", 1.0, "checker", 1.0)
    assert solver.metrics == {"turns": 4, "attempts": 2, "accepted": 1, "right_verdicts": 1.0, "context_full": 0}
    assert "A checker rejected your answer:\nIt is too much. REJECT" in decode(solver.token_ids)
    assert "Question:\n2 + 2 = ?\n\nAnswer:\n5" in decode(checker.token_ids)
    assert "The next answer:\n4" in decode(checker.token_ids)


@pytest.mark.parametrize(
    ("said", "solver_reward", "checker_reward"),
    [
        (["5", "ACCEPT"], 0.0, 0.0),
        (["4", "ACCEPT"], 1.0, 1.0),
        (["4", "REJECT", "4", "I would not REJECT it: ACCEPT"], 1.0, 0.5),
        (["5", "hm", "5", "REJECT"], 0.0, 0.5),
        (["5", "REJECT", too_long()], 0.0, 1.0),
        (["5", "REJECT", "4", too_long()], 1.0, 1.0),
    ],
)
async def test_the_checker_is_paid_for_being_right(
    said: list[str | Exception], solver_reward: float, checker_reward: float
) -> None:
    for shared, rewards in ((False, (solver_reward, checker_reward)), (True, (solver_reward, solver_reward))):
        workflow = SolverCheckerWorkflow(TOKENIZER, exact, max_attempts=2, shared=shared)
        solver, checker = await workflow.arun_episode(saying(*said), QUESTION)
        assert (solver.reward, checker.reward) == rewards


async def test_an_answer_too_long_for_the_checker_is_rewarded_all_the_same() -> None:
    (solver,) = await SolverCheckerWorkflow(TOKENIZER, exact).arun_episode(saying("4", too_long()), QUESTION)
    assert (solver.role, solver.reward) == ("solver", 1.0)
    assert (solver.metrics["attempts"], solver.metrics["accepted"]) == (1, 0)
