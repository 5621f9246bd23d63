"""Compaction: contexts follow each other, fit, and show what the template shows; each sampled token is trained once."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_answers import (
    TOKENIZER,
    calling,
    cut_off,
    decode,
    encode,
    ended,
    exact,
    said_in,
    saying,
    seen_by,
    too_long,
)

from arl.api.errors import ConfigError, PromptTooLongError, ServerError, TrajectoryError
from arl.api.fakes import ScriptedEngine
from arl.api.grammar import Grammar
from arl.api.types import ModelRequest, ModelResponse, SamplingParams
from arl.workflow.agent import MultiTurnWorkflow
from arl.workflow.compacting import CompactingConversation, Compaction
from arl.workflow.conversation import Conversation
from arl.workflow.tool_agent import ToolAgentWorkflow
from arl.workflow.tools import Tool

TASK = [{"role": "system", "content": "Count."}, {"role": "user", "content": "How many?"}]
SAMPLING = SamplingParams(max_new_tokens=20)
SMALL = Compaction(context_length=250, summary_tokens=30, instruction="Sum up.", handover="So far: {summary}")
LOOK = Tool.from_schema(print, name="look", description="Look.", parameters={"type": "object", "properties": {}})
OF_TOOLS = len(Conversation(TOKENIZER, TASK, tools=[LOOK]).token_ids) - len(Conversation(TOKENIZER, TASK).token_ids)
"""Tokens of a prompt that show LOOK."""
BEGUN = "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\nHow many?"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def begun(compaction: Compaction = SMALL, tokenizer: Any = TOKENIZER, **options: Any) -> CompactingConversation:
    return CompactingConversation(tokenizer, TASK, compaction, **options)


async def told(chat: CompactingConversation, engine: Any, *said: str, sampling: SamplingParams = SAMPLING) -> None:
    """The model speaks once, and then after each of these."""
    await chat.agenerate(engine, sampling)
    for text in said:
        chat.add(user(text))
        await chat.agenerate(engine, sampling)


def answering(seed: int) -> ScriptedEngine:
    """Answers and summaries of random lengths, some of them cut; each token has a logprob of its own."""
    rng, count = random.Random(seed), iter(range(1, 1 << 20))

    def script(request: ModelRequest) -> ModelResponse:
        most = request.sampling.max_new_tokens
        text = "".join(rng.choice("abcdef") for _ in range(rng.randrange(most + 4)))
        ids = ended(text) if len(text) < most else encode(text)[:most]
        return ModelResponse(
            output_ids=tuple(ids),
            output_logprobs=tuple(-float(next(count)) for _ in ids),
            output_versions=(rng.randrange(5),) * len(ids),
            stop_reason="stop" if len(text) < most else "length",
        )

    return ScriptedEngine(script)


def size(messages: Sequence[dict[str, str]]) -> int:
    return len(encode(rendered(messages)))


def rendered(messages: Sequence[dict[str, str]]) -> str:
    return str(TOKENIZER.apply_chat_template([*messages], tokenize=False, add_generation_prompt=True))


def prompts_of(texts: Sequence[str], shown: Sequence[str]) -> list[str]:
    """Each prompt in plain Python, given the answers, and what the environment said after each turn."""
    answers, news, prompts = iter(texts), iter(shown), list[str]()
    messages, has_spoken, ask = [*TASK], False, user("Sum up.")
    while len(prompts) < len(texts):
        is_due = has_spoken and size(messages) + 20 + size([ask]) + 8 + 30 > 250
        if is_due and size([*messages[:-1], ask]) + 30 <= 250:
            unread = [] if size([*messages, ask]) + 30 <= 250 else messages[-2:]
            prompts.append(rendered([*(messages[:-1] if unread else messages), ask]))
            messages = [TASK[0], user(f"How many?\n\nSo far: {next(answers).strip()}"), *unread]
            has_spoken = False
        if size(messages) + 20 > 250:
            break
        prompts.append(rendered(messages))
        messages += [{"role": "assistant", "content": next(answers)}, user(next(news, ""))]
        has_spoken = True
    return prompts


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 20))
async def test_contexts_fit_show_what_the_template_shows_and_train_each_sampled_token_once(seed: int) -> None:
    rng, engine, chat = random.Random(seed), answering(seed), begun()
    responses: list[ModelResponse] = []
    shown: list[str] = []

    class Listening:
        async def agenerate(self, request: ModelRequest) -> ModelResponse:
            responses.append(await engine.agenerate(request))
            return responses[-1]

    for _ in range(rng.randrange(1, 30)):
        await chat.agenerate(Listening(), SAMPLING)
        if chat.is_full:
            break
        shown.append("x" * rng.choice((0, 5, 40, 80, 130)))
        chat.add(user(shown[-1]))

    texts = [decode(r.output_ids).removesuffix("<|im_end|>") for r in responses]
    assert [decode(request.input_ids) for request in engine.requests] == prompts_of(texts, shown)
    for request in engine.requests:
        assert len(request.input_ids) + request.sampling.max_new_tokens <= SMALL.context_length

    made = chat.trajectories(1.0)
    trained = [column[t.loss_mask].tolist() for t in made for column in (t.token_ids, t.behavior_logprobs, t.versions)]
    sampled = [[getattr(r, name) for r in responses] for name in ("output_ids", "output_logprobs", "output_versions")]
    assert [list(chain(*trained[i::3])) for i in range(3)] == [list(chain(*rows)) for rows in sampled]
    assert len(made) <= 1 + len(chat.summaries)


async def test_a_summary_ends_a_context_and_begins_the_next_one_below_the_task() -> None:
    engine = saying("a", "b", "the sum", "c")
    chat = begun()
    await told(chat, engine, "x" * 40, "y" * 100)
    first, second = chat.trajectories(1.0, {"calls": 2}, "counter", rewards={"right": 1.0})
    assert seen_by(engine, 2).endswith(
        f"{'y' * 100}<|im_end|>\n<|im_start|>user\nSum up.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert seen_by(engine, 3) == f"{BEGUN}\n\nSo far: the sum<|im_end|>\n<|im_start|>assistant\n"
    assert [said_in(t) for t in (first, second)] == ["a<|im_end|>b<|im_end|>the sum<|im_end|>", "c<|im_end|>"]
    assert {(t.reward, t.role, t.rewards["right"]) for t in (first, second)} == {(1.0, "counter", 1.0)}
    assert (chat.num_turns, len(chat.summaries)) == (3, 1)
    assert second.metrics == {}
    lengths = [len(t.token_ids) for t in (first, second)]
    assert first.metrics == {
        "calls": 2,
        "compactions": 1,
        "context_tokens": sum(lengths) / 2,
        "summary_tokens": 8,
        "summaries_cut": 0,
        "summaries_empty": 0,
        "context_full": 0,
    }
    assert len({request.session_id for request in engine.requests}) == 1
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]


@pytest.mark.parametrize("length", [100, 160], ids=["read", "unread"])
async def test_tools_are_shown_in_each_context_and_where_a_summary_is_asked_for(length: int) -> None:
    engine = saying("a", "b", "the sum", "c")
    chat = begun(replace(SMALL, context_length=SMALL.context_length + OF_TOOLS), tools=[LOOK])
    await told(chat, engine, "x" * 40, "y" * length)
    assert [turn.text for turn in chat.summaries] == ["the sum"]
    assert all('"name": "look"' in seen_by(engine, i) for i in range(4))
    assert [len(t.turns) for t in chat.trajectories(1.0)] == [3, 1]


async def test_what_does_not_even_fit_into_a_fresh_context_fills_it_and_the_episode_is_truncated() -> None:
    for trains in (True, False):
        engine, chat = saying("a", "the sum"), begun(replace(SMALL, train_summaries=trains))
        await told(chat, engine, "y" * 220)
        assert (chat.is_full, len(engine.requests), chat.num_turns) == (True, 2, 1)
        (made,) = chat.trajectories(0.0)
        assert (made.is_truncated, made.metrics["context_full"], made.metrics["compactions"]) == (True, 1, 1)


async def test_without_train_summaries_everything_else_is_trained() -> None:
    chat = begun(replace(SMALL, train_summaries=False))
    await told(chat, saying("a", "b", "the sum", "c"), "x" * 40, "y" * 100)
    made = chat.trajectories(1.0, turn_rewards=[1.0, 2.0, 3.0])
    assert [said_in(t) for t in made] == ["a<|im_end|>b<|im_end|>", "c<|im_end|>"]
    assert [[turn.reward for turn in t.turns] for t in made] == [[1.0, 2.0], [3.0]]
    assert made[0].metrics["compactions"] == 1


async def test_rewards_and_states_are_of_turns_and_a_summary_has_none() -> None:
    chat = begun()
    await told(chat, saying("a", "b", "the sum", "c"), "x" * 40, "y" * 100)
    made = chat.trajectories(1.0, turn_rewards=[1.0, 2.0, 3.0], states=["s", "t", "u"])
    spans = [[(turn.reward, turn.state) for turn in t.turns] for t in made]
    assert spans == [[(1.0, "s"), (2.0, "t"), (0.0, None)], [(3.0, "u")]]
    with pytest.raises(TrajectoryError, match="turn_rewards has 4 entries for 3 sampled turns"):
        chat.trajectories(1.0, turn_rewards=[0.0] * 4)


@pytest.mark.parametrize(
    ("said", "carried", "counted"),
    [
        (cut_off("s" * 90), "s" * 90, {"summaries_cut": 1, "summary_tokens": 90}),
        ("", "", {"summaries_empty": 1, "summaries_cut": 0}),
        ("<think>\nWhat?\n</think>\n\nthe sum", "the sum", {"summaries_empty": 0}),
        (calling("divide", a=1), calling("divide", a=1), {"compactions": 1}),
    ],
    ids=["cut", "empty", "thought", "call"],
)
async def test_a_summary_is_used_as_it_stands(said: Any, carried: str, counted: dict[str, float]) -> None:
    given = iter(["a", said, "c"])

    def script(request: ModelRequest) -> Any:
        answer = next(given)
        return ended(answer) if isinstance(answer, str) else answer

    engine, chat = ScriptedEngine(script), begun(replace(SMALL, summary_tokens=90, context_length=370))
    await told(chat, engine, "y" * 210)
    assert seen_by(engine).startswith(f"{BEGUN}\n\nSo far: {carried}<|im_end|>")
    made = chat.trajectories(1.0)
    assert counted.items() <= made[0].metrics.items()
    assert made[0].is_truncated == bool(counted.get("summaries_cut"))


async def test_after_the_last_compaction_a_conversation_goes_on_until_it_is_full() -> None:
    chat = begun(replace(SMALL, max_compactions=1))
    await told(chat, saying("a", "the sum", "b", "c"), "x" * 150, "y" * 130)
    assert (len(chat.summaries), chat.num_turns, chat.is_full) == (1, 3, False)
    chat.add(user("z" * 60))
    await chat.agenerate(saying(), SAMPLING)
    assert chat.is_full


async def test_an_earlier_time_may_be_set() -> None:
    engine, chat = saying("a", "the sum", "b"), begun(replace(SMALL, compact_at=60))
    await told(chat, engine, "x" * 30)
    assert len(chat.summaries) == 1
    chat = begun(replace(SMALL, compact_at=10))  # a fresh context has a turn before the next summary
    await told(chat, saying("a", "1", "b", "2", "c"), "x", "y")
    assert [turn.text for turn in chat.summaries] == ["1", "2"]


async def test_a_summary_has_the_turns_sampling_but_neither_its_form_nor_its_stops() -> None:
    sampling = SamplingParams(max_new_tokens=20, temperature=0.5, stop=("!",), grammar=Grammar(kind="regex", text=".*"))
    engine, chat = saying("a", "the sum", "b"), begun()
    await told(chat, engine, "x" * 150, sampling=sampling)
    assert engine.requests[1].sampling == SamplingParams(max_new_tokens=30, temperature=0.5)
    assert {t.temperature for t in chat.trajectories(1.0)} == {0.5}


async def test_a_summary_that_failed_can_be_asked_for_again() -> None:
    engine, chat = saying("a", ServerError("gone"), "the sum", "b"), begun()
    with pytest.raises(ServerError):
        await told(chat, engine, "x" * 150)
    assert (chat.num_turns, chat.summaries) == (1, [])
    assert (await chat.agenerate(engine, SAMPLING)).text == "b"
    assert engine.requests[1].input_ids == engine.requests[2].input_ids
    assert len(chat.trajectories(1.0)) == 2


async def test_settings_without_room_are_errors_that_say_so() -> None:
    for changes, complaint in (
        ({"summary_tokens": 250}, "summary_tokens is 250, and a prompt and its summary have room for 250 tokens"),
        ({"handover": "so far"}, "it must have {summary}"),
        ({"max_compactions": 0}, "max_compactions is 0"),
        ({"compact_at": 0}, "compact_at 0"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            replace(SMALL, **changes)
    agent = {"reward": exact, "sampling": SAMPLING, "open_tools": lambda _: None}
    for compaction, complaint in (
        (replace(SMALL, summary_tokens=120), "has no room for a task beside an answer"),
        (replace(SMALL, compact_at=190), "compact_at is 190, but a prompt of more than 179 tokens leaves no room"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            ToolAgentWorkflow(TOKENIZER, compaction=compaction, **agent)


async def test_a_task_that_leaves_no_room_for_summaries_is_refused_before_anything_is_sampled() -> None:
    chat = CompactingConversation(TOKENIZER, [user("?" * 140)], SMALL)
    with pytest.raises(PromptTooLongError, match=r"the task has 1\d\d tokens, .* context of 250 .* shorten the task"):
        await chat.agenerate(saying(), SAMPLING)


async def test_a_server_with_less_room_than_the_setting_says_is_an_error() -> None:
    with pytest.raises(ConfigError, match="context_length is 250, but a server has no room for a prompt of"):
        await told(begun(), saying("a", too_long()), "x" * 150)


async def test_every_conversation_of_a_workflow_compacts_itself() -> None:
    engine = saying("a", "b", "the sum", "c")
    replies = iter(("x" * 40, "y" * 100, None))
    workflow = MultiTurnWorkflow(
        TOKENIZER,
        exact,
        system="Count.",
        sampling=SAMPLING,
        feedback=lambda *_: next(replies),
        turn_reward=exact,
        compaction=SMALL,
    )
    made = await workflow.arun_episode(engine, {"question": "How many?", "answer": "c"})
    assert [(t.reward, said_in(t)) for t in made] == [
        (1.0, "a<|im_end|>b<|im_end|>the sum<|im_end|>"),
        (1.0, "c<|im_end|>"),
    ]
    assert (made[0].metrics["turns"], made[0].metrics["compactions"]) == (3, 1)
    assert [[turn.reward for turn in t.turns] for t in made] == [[0.0, 0.0, 0.0], [1.0]]
