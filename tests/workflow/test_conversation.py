"""Conversation: the model's tokens are kept as sampled, everything else is as the chat template renders it."""

from collections.abc import Sequence

import pytest
from chat_templates import tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from arl.api.errors import ModelError, PromptTooLongError, RequestTimeoutError, TrajectoryError
from arl.api.scripted import ScriptedEngine
from arl.api.types import ModelRequest, SamplingParams
from arl.engine.tiny import CHAT_TEMPLATE, tiny_tokenizer
from arl.rollout.episode import EpisodeSampler
from arl.workflow.conversation import Conversation
from arl.workflow.tools import Tool

TOKENIZER = tiny_tokenizer(["the sum of "])
SAMPLING = SamplingParams(max_new_tokens=1000)
# What people and models write, without the tags and end tokens that would end a turn early.
TEXT = st.text(max_size=20).filter(lambda text: "<|" not in text)
RESULTS = st.lists(st.tuples(st.sampled_from(["tool", "user"]), TEXT), min_size=1, max_size=3)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def saying(*answers: str, ended: bool = True) -> ScriptedEngine:
    """An engine that gives one answer after another, each with its end-of-turn token, unless it is cut off."""
    remaining = iter(answers)
    return ScriptedEngine(lambda _: [*encode(next(remaining)), *([TOKENIZER.eos_token_id] if ended else [])])


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def look_up(word: str) -> str:
    """Look up a word."""
    return word


async def talked(answers: Sequence[str], replies: Sequence[Sequence[tuple[str, str]]], ended: bool) -> Conversation:
    conversation = Conversation(TOKENIZER, user("the sum of 1 and 2?"), tools=[Tool.from_function(look_up)])
    engine = saying(*answers, ended=ended)
    for i in range(len(answers)):
        await conversation.agenerate(engine, SAMPLING)
        if i < len(replies):
            conversation.add(*({"role": role, "content": text} for role, text in replies[i]))
    return conversation


@given(answers=st.lists(TEXT, min_size=1, max_size=3), data=st.data(), ended=st.booleans())
@settings(max_examples=30, deadline=None)
async def test_the_transcript_reads_as_the_template_renders_the_whole_conversation(
    answers: list[str], data: st.DataObject, ended: bool
) -> None:
    if not ended:
        answers = [answer or "x" for answer in answers]
    replies = [data.draw(RESULTS) for _ in answers[1:]]
    conversation = await talked(answers, replies, ended)
    rendered = TOKENIZER.apply_chat_template(
        [dict(message) for message in conversation.messages], tools=[Tool.from_function(look_up).spec], tokenize=False
    )
    seen = list(conversation.token_ids)
    closing = encode("\n" if ended else "<|im_end|>\n")
    assert seen + closing == encode(str(rendered))


async def test_tokens_stay_as_sampled_where_the_tokenizer_would_choose_others() -> None:
    """'the sum of ' is one token, but the model spelled it out."""
    spelled = [token for char in "the sum of " for token in encode(char)]
    answers = iter([[*spelled, TOKENIZER.eos_token_id], encode("3")])
    conversation = Conversation(TOKENIZER, user("?"))
    engine = ScriptedEngine(lambda _: next(answers))
    turn = await conversation.agenerate(engine, SAMPLING)
    conversation.add(*user("go on"))
    await conversation.agenerate(engine, SAMPLING)
    start = len(engine.requests[0].input_ids)
    assert turn.text == "the sum of "
    assert list(engine.requests[1].input_ids[start : start + len(spelled)]) == spelled


async def test_a_call_that_failed_can_be_made_again() -> None:
    conversation = Conversation(TOKENIZER, user("?"))
    await conversation.agenerate(saying("a"), SAMPLING)
    conversation.add(*user("go on"))
    with pytest.raises(RequestTimeoutError):
        await conversation.agenerate(ScriptedEngine(fails), SAMPLING)
    engine = saying("b")
    await conversation.agenerate(engine, SAMPLING)
    text = TOKENIZER.decode(engine.requests[0].input_ids)
    assert text.endswith("assistant\na<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n")
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "user", "assistant"]


def fails(request: ModelRequest) -> list[int]:
    raise RequestTimeoutError("too slow")


async def test_each_sampled_turn_has_its_span_with_its_reward_and_state() -> None:
    conversation = await talked(["abc", "de"], [[("user", "more")]], ended=True)
    (trajectory,) = conversation.trajectories(
        1.0, rewards={"form": 0.5}, turn_rewards=[0.25, 0.0], states=["start", None]
    )
    first, second = trajectory.turns
    sampled = [TOKENIZER.decode(list(trajectory.token_ids[turn.start : turn.stop])) for turn in (first, second)]
    assert sampled == ["abc<|im_end|>", "de<|im_end|>"]
    assert [(turn.reward, turn.state) for turn in (first, second)] == [(0.25, "start"), (0.0, None)]
    assert trajectory.rewards == {"form": 0.5}


@pytest.mark.parametrize("name", ["turn_rewards", "states"])
async def test_a_wrong_number_of_values_for_turns_is_an_error_that_names_them(name: str) -> None:
    conversation = await talked(["abc", "de"], [[("tool", "more")]], ended=True)
    with pytest.raises(TrajectoryError, match=f"{name} has 1 entries for 2 sampled turns; give one for each"):
        conversation.trajectories(1.0, **{name: [0.0] if name == "turn_rewards" else ["s"]})


def is_full(_: ModelRequest) -> list[int]:
    raise PromptTooLongError("the context is full")


async def test_a_trajectory_is_truncated_where_there_was_no_room_for_another_turn() -> None:
    conversation = await talked(["abc"], [[("tool", "a long result")]], ended=True)
    turn = await conversation.agenerate(ScriptedEngine(is_full), SAMPLING)
    assert (turn.text, turn.output_ids, turn.is_truncated, conversation.is_full) == ("", (), True, True)
    (trajectory,) = conversation.trajectories(0.0)
    assert (trajectory.is_truncated, trajectory.metrics) == (True, {"context_full": 1.0})
    assert (len(trajectory.turns), conversation.num_turns) == (1, 1)
    await conversation.agenerate(saying("de"), SAMPLING)  # with fewer new tokens there may be room again
    (trajectory,) = conversation.trajectories(0.0)
    assert (trajectory.is_truncated, trajectory.metrics["context_full"], len(trajectory.turns)) == (False, 0.0, 2)


async def test_a_first_prompt_without_room_and_a_loop_that_never_looks_are_errors() -> None:
    with pytest.raises(PromptTooLongError):
        await Conversation(TOKENIZER, user("?")).agenerate(ScriptedEngine(is_full), SAMPLING)
    conversation = await talked(["abc"], [[("tool", "a long result")]], ended=True)
    for _ in range(100):
        await conversation.agenerate(ScriptedEngine(is_full), SAMPLING)
    with pytest.raises(PromptTooLongError):
        await conversation.agenerate(ScriptedEngine(is_full), SAMPLING)


async def test_a_greedy_episode_makes_a_trajectory_as_any_other() -> None:
    conversation = Conversation(TOKENIZER, user("?"))
    engine = EpisodeSampler(saying("a", "b"), is_greedy=True)
    await conversation.agenerate(engine, SamplingParams(temperature=0.7))
    conversation.add(*user("more"))
    await conversation.agenerate(engine, SamplingParams(temperature=0.7))
    assert conversation.trajectories(1.0)[0].temperature == 1.0


async def test_turns_of_one_episode_share_a_session_and_episodes_do_not() -> None:
    engine = saying("a", "b", "c")
    first, second = Conversation(TOKENIZER, user("?")), Conversation(TOKENIZER, user("?"))
    for conversation in (first, first, second):
        if conversation.num_turns:
            conversation.add(*user("more"))
        await conversation.agenerate(engine, SAMPLING)
    sessions = [request.session_id for request in engine.requests]
    assert sessions[0] == sessions[1] != sessions[2]


async def test_a_demonstration_has_the_tokens_of_the_same_conversation_sampled() -> None:
    shown = Conversation(TOKENIZER, user("?"))
    shown.demonstrate("look")
    shown.add({"role": "tool", "content": "42"})
    shown.demonstrate("42")
    sampled, engine = Conversation(TOKENIZER, user("?")), saying("look", "42")
    await sampled.agenerate(engine, SAMPLING)
    sampled.add({"role": "tool", "content": "42"})
    await sampled.agenerate(engine, SAMPLING)
    assert shown.token_ids == sampled.token_ids
    assert shown.loss_mask == sampled.loss_mask


# Templates that rewrite what was said ---------------------------------------------------------------------------------

QWEN3 = tokenizer_of("qwen3")
THOUGHT = "<think>\nhm\n</think>\n\n4"


async def asked_twice(conversation: Conversation, *answers: str) -> list[str]:
    """What the model saw each time, when a user speaks again after its first answer."""
    ids = [[*QWEN3.encode(answer), QWEN3.eos_token_id] for answer in answers]
    engine = ScriptedEngine(lambda request: ids[len(engine.requests) - 1])
    await conversation.agenerate(engine, SAMPLING)
    conversation.add(*user("sure?"))
    await conversation.agenerate(engine, SAMPLING)
    return [QWEN3.decode(request.input_ids) for request in engine.requests]


async def test_a_template_that_rewrites_earlier_turns_is_an_error_where_that_is_asked_for() -> None:
    with pytest.raises(ModelError, match=r"no longer shows '<think>\\nhm.*' as it was said; .*rewriting='branch'"):
        await asked_twice(Conversation(QWEN3, user("?"), rewriting="error"), THOUGHT, "5")


async def test_rewritten_turns_stay_in_view_where_that_is_asked_for() -> None:
    conversation = Conversation(QWEN3, user("?"), rewriting="keep")
    _, second = await asked_twice(conversation, THOUGHT, THOUGHT)
    assert "assistant\n" + THOUGHT + "<|im_end|>\n<|im_start|>user\nsure?" in second
    conversation.add(*user("really?"))
    third = ScriptedEngine(lambda _: [QWEN3.eos_token_id])
    await conversation.agenerate(third, SAMPLING)
    assert QWEN3.decode(third.requests[0].input_ids).startswith(second + THOUGHT + "<|im_end|>\n<|im_start|>user\nrea")
    assert len(conversation.trajectories(1.0)[0].turns) == 3


def test_a_tokenizer_without_chat_template_is_an_error_that_says_what_to_do() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match=r"no chat template; use a chat .* model"):
        Conversation(tokenizer, user("?"))


async def test_a_template_that_hides_the_assistants_words_makes_a_branch_and_cannot_be_kept_in_view() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("message.content", "message.content | length | string")
    for rewriting in ("branch", "keep"):
        conversation = Conversation(tokenizer, user("?"), rewriting=rewriting)
        await conversation.agenerate(saying("a"), SAMPLING)
        conversation.add({"role": "tool", "content": "b"})
        if rewriting == "branch":
            await conversation.agenerate(saying("a"), SAMPLING)
            assert len(conversation.trajectories(0.0)) == 2
            continue
        with pytest.raises(ModelError, match="as it is"):
            await conversation.agenerate(saying("a"), SAMPLING)


def test_only_the_environment_is_added() -> None:
    with pytest.raises(ValueError, match="not added; it is sampled"):
        Conversation(TOKENIZER, user("?")).add({"role": "assistant", "content": "4"})


async def test_a_conversation_may_begin_without_a_user() -> None:
    conversation, engine = Conversation(TOKENIZER, [{"role": "system", "content": "Begin."}]), saying("a", "b")
    await conversation.agenerate(engine, SAMPLING)
    conversation.add(*user("more"))
    await conversation.agenerate(engine, SAMPLING)
    assert TOKENIZER.decode(engine.requests[1].input_ids).startswith(
        "<|im_start|>system\nBegin.<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\nmore<|im_end|>"
    )
