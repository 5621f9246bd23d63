"""The environment of the verifiers example, its tasks and its demonstrations, without a model."""

import random
from pathlib import Path

import pytest
from backwards_env import SYSTEM, TRY_AGAIN
from played import TOKENIZER, played
from transformers import AutoTokenizer
from verifiers_env import lessons, spelling

from arl.api.types import SamplingParams, Trajectory
from arl.endpoint.verifiers_workflow import VerifiersWorkflow, local_environment

ENV = {"taskset": {"id": "backwards_env"}}


async def episode(directory: Path, *answers: str) -> tuple[Trajectory, str]:
    """Play the first task with a model that says `answers`, where `{}` is the right one; also all that it saw."""
    TOKENIZER.save_pretrained(directory)
    env = local_environment(ENV)
    workflow = VerifiersWorkflow(env, AutoTokenizer.from_pretrained(directory), sampling=SamplingParams())
    (row,) = workflow.rows(env.taskset.take(1))
    (made,) = await played(workflow, row, *(answer.format(row["answer"]) for answer in answers))
    return made


@pytest.mark.parametrize(
    ("answers", "reward", "at_once"), [(("{}",), 1.0, 1.0), (("no", "{}"), 0.5, 0.0), (("no", "no"), 0.0, 0.0)]
)
async def test_a_word_is_worth_less_the_more_tries_it_took(
    tmp_path: Path, answers: tuple[str, ...], reward: float, at_once: float
) -> None:
    trajectory, text = await episode(tmp_path, *answers)
    assert trajectory.reward == reward
    assert trajectory.metrics == {"turns": len(answers), "at_once": at_once}
    assert trajectory.role == "speller"
    assert text.count(TRY_AGAIN) == len(answers) - 1


def test_words_are_made_up_without_end_and_none_comes_twice() -> None:
    tasks = list(local_environment(ENV).taskset.take(2000))
    assert len({task.data.prompt for task in tasks}) == 2000
    assert all(task.data.prompt.removeprefix("Spell ")[::-1] == task.data.answer for task in tasks)


def test_demonstrations_are_conversations_as_the_environment_has_them() -> None:
    careful, mixed = lessons(seed=0)
    assert all(len(demonstration["messages"]) == 3 for demonstration in careful)
    shares = [len(demonstration["messages"]) == 5 for demonstration in mixed]
    assert 0.6 < sum(shares) / len(shares) < 0.8
    shown = spelling("abcd", random.Random(0), care=0.0)["messages"]
    assert [m["role"] for m in shown] == ["system", "user", "assistant", "user", "assistant"]
    assert [shown[0]["content"], shown[1]["content"], shown[3]["content"]] == [SYSTEM, "Spell abcd", TRY_AGAIN]
