"""Debaters of debate.py answer, read each other's answers, and answer again; each is paid for its last answer."""

import random

import debate
from debate import Debate, DebateConfig
from played import TOKENIZER

import arl
from arl.api.types import ModelRequest
from arl.rewards import NumericMatch

QUESTION = {"question": "2 + 2 = ?", "answer": "4"}


def debaters(debaters: int = 2, rounds: int = 2) -> Debate:
    sampling = arl.SamplingParams(max_new_tokens=8)
    return Debate(tokenizer=TOKENIZER, score=NumericMatch(), sampling=sampling, debaters=debaters, rounds=rounds)


async def test_debaters_read_each_other_and_answer_again() -> None:
    def persuaded(request: ModelRequest) -> list[int]:
        said = str(TOKENIZER.decode(list(request.input_ids)))
        answer = "4" if said.count("Another agent answered:\n5") == 2 else "5"
        return TOKENIZER.encode(answer + str(TOKENIZER.eos_token), add_special_tokens=False)

    made = await debaters(3).arun_episode(arl.ScriptedEngine(persuaded), QUESTION)
    said = [str(TOKENIZER.decode(trajectory.token_ids[trajectory.loss_mask].tolist())) for trajectory in made]
    assert said == ["5<|im_end|>4<|im_end|>"] * 3
    assert {(trajectory.role, trajectory.reward) for trajectory in made} == {("debater", 1.0)}
    assert (made[0].metrics["turns"], made[0].metrics["agreed"]) == (6, 1)


async def test_debaters_have_rewards_of_their_own_and_keep_their_last_answer_when_their_context_is_full() -> None:
    answers = iter(("4", "5", None, "6"))

    def script(request: ModelRequest) -> list[int]:
        if (answer := next(answers)) is None:
            raise arl.PromptTooLongError("no room")
        return TOKENIZER.encode(answer + str(TOKENIZER.eos_token), add_special_tokens=False)

    first, second = await debaters().arun_episode(arl.ScriptedEngine(script), QUESTION)
    assert (first.reward, first.is_truncated, first.metrics["agreed"]) == (1.0, True, 0.0)
    assert (second.reward, second.is_truncated) == (0.0, False)


def test_demonstrations_are_debates_of_the_agents_words_and_about_no_held_out_question() -> None:
    training, held_out = debate.questions(DebateConfig())
    assert not {row["question"] for row in training} & {row["question"] for row in held_out}
    right = debate.debate(training[0], random.Random(0), 0.0)["messages"]
    assert [message["content"] for message in right[:3]] == [debate.SYSTEM, *map(str, training[0].values())]
    assert right[2] == right[4]
    others = right[3]["content"].split("\n")[1]
    assert right[3]["content"] == debate.others_said([others])
