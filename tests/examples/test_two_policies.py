"""The author and the critic of two_policies.py are asked alike, and rewarded for different characters."""

from pathlib import Path

import two_policies

import arl
from arl.engine.tiny import tiny_tokenizer
from arl.run.script import load_config

FILE = Path(two_policies.__file__)


async def test_each_role_is_asked_the_same_and_rewarded_for_its_own_characters() -> None:
    tokenizer = tiny_tokenizer()
    engine = arl.ScriptedEngine.saying(tokenizer, "aeiou12", "aeiou12345678")
    pair = two_policies.Pair(tokenizer, arl.SamplingParams(max_new_tokens=32))
    author, critic = await pair.arun_episode(engine, two_policies.questions(0, 1)[0])
    assert [(t.role, t.reward) for t in (author, critic)] == [("author", 5 / 8), ("critic", 1.0)]
    assert engine.requests[0].input_ids == engine.requests[1].input_ids
    assert [request.role for request in engine.requests] == ["author", "critic"]


def test_its_file_gives_each_role_a_policy_and_without_it_there_is_one() -> None:
    config = load_config(two_policies.TwoPoliciesConfig, ["--config", str(FILE.with_suffix(".yaml"))])
    assert {name: policy.roles for name, policy in config.policies.items()} == {
        "author": ("author",),
        "critic": ("critic",),
    }
    assert not load_config(two_policies.TwoPoliciesConfig, []).policies


def test_the_warm_start_teaches_the_characters_of_both_roles_with_questions_that_nobody_asks_later() -> None:
    (rows,) = two_policies.lessons(0)
    setup = [*two_policies.questions(0, 200), *two_policies.questions(1000, 50)]
    assert not {row["messages"][0]["content"] for row in rows} & {row["question"] for row in setup}
    said = {character for row in rows for character in row["messages"][1]["content"]}
    assert said >= set("".join(two_policies.WANTED.values()))
