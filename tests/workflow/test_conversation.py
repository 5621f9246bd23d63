"""Conversation: the model's tokens are kept as sampled, and what is added comes between them. Of a tree of turns, each
token is trained once, in whichever trajectory it comes first."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from chat_templates import tokenizer_of
from scripted_answers import TOKENIZER, decode, response_of, saying, seen_by, too_long

from arl.api.errors import ModelError, PromptTooLongError, RequestTimeoutError, TrajectoryError
from arl.api.fakes import ScriptedEngine
from arl.api.routed_experts import Routes
from arl.api.types import ModelRequest, ModelResponse, SamplingParams, Trajectory
from arl.engine.tiny import tiny_tokenizer
from arl.workflow.chat_template import ChatTemplate
from arl.workflow.conversation import Conversation, trajectories
from arl.workflow.dialogue import Dialogue, Turn

SAMPLING = SamplingParams(max_new_tokens=1000)
MORE = {"role": "user", "content": "more"}
QWEN3 = tokenizer_of("qwen3")
THOUGHT = "<think>\nhm\n</think>\n\n4"


def begun(tokenizer: Any = TOKENIZER, **options: Any) -> Conversation:
    return Conversation(tokenizer, [{"role": "user", "content": "?"}], **options)


async def talked(conversation: Conversation, engine: Any, times: int = 1) -> Conversation:
    """The model speaks so often, and is asked for more before each time but the first of all."""
    for _ in range(times):
        if conversation.num_turns:
            conversation.add(MORE)
        await conversation.agenerate(engine, SAMPLING)
    return conversation


async def test_tokens_stay_as_sampled_where_the_tokenizer_would_choose_others() -> None:
    """'the sum of ' is one token, but the model spelled it out."""
    tokenizer = tiny_tokenizer(["the sum of "])
    spelled = [token for char in "the sum of " for token in tokenizer.encode(char)]
    engine = ScriptedEngine(lambda _: [*spelled, tokenizer.eos_token_id])
    conversation = await talked(begun(tokenizer), engine, times=2)
    start = len(engine.requests[0].input_ids)
    assert conversation.messages[1]["content"] == "the sum of "
    assert list(engine.requests[1].input_ids[start : start + len(spelled)]) == spelled


async def test_a_call_that_failed_can_be_made_again() -> None:
    engine = saying("a", RequestTimeoutError("too slow"), "b")
    conversation = Conversation(TOKENIZER, [{"role": "system", "content": "Begin."}])
    await talked(conversation, engine)
    with pytest.raises(RequestTimeoutError):
        await talked(conversation, engine)
    await conversation.agenerate(engine, SAMPLING)
    assert seen_by(engine) == (
        "<|im_start|>system\nBegin.<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert [message["role"] for message in conversation.messages] == ["system", "assistant", "user", "assistant"]


async def test_each_sampled_turn_has_its_span_with_its_reward_and_state() -> None:
    conversation = await talked(begun(), saying("abc", "de"), times=2)
    (trajectory,) = conversation.trajectories(
        1.0, rewards={"form": 0.5}, turn_rewards=[0.25, 0.0], states=["start", None]
    )
    spans = [(decode(trajectory.token_ids[t.start : t.stop]), t.reward, t.state) for t in trajectory.turns]
    assert spans == [("abc<|im_end|>", 0.25, "start"), ("de<|im_end|>", 0.0, None)]
    assert trajectory.rewards == {"form": 0.5}
    for name, values in (("turn_rewards", [0.0]), ("states", ["s"])):
        with pytest.raises(TrajectoryError, match=f"{name} has 1 entries for 2 sampled turns; give one for each"):
            conversation.trajectories(1.0, **{name: values})


async def test_a_trajectory_is_truncated_where_there_was_no_room_for_another_turn() -> None:
    engine = saying("abc", too_long(), "de")
    conversation = await talked(begun(), engine)
    conversation.add(MORE)
    turn = await conversation.agenerate(engine, SAMPLING)
    assert (turn.text, turn.output_ids, turn.is_truncated, conversation.is_full) == ("", (), True, True)
    (trajectory,) = conversation.trajectories(0.0)
    assert (trajectory.is_truncated, trajectory.metrics) == (True, {"context_full": 1.0})
    assert (len(trajectory.turns), conversation.num_turns) == (1, 1)
    await conversation.agenerate(engine, SAMPLING)  # with fewer new tokens there may be room again
    (trajectory,) = conversation.trajectories(0.0)
    assert (trajectory.is_truncated, trajectory.metrics["context_full"], len(trajectory.turns)) == (False, 0.0, 2)


async def test_a_first_prompt_without_room_and_a_loop_that_never_looks_are_errors() -> None:
    full = saying(too_long(), forever=True)
    with pytest.raises(PromptTooLongError):
        await talked(begun(), full)
    conversation = await talked(begun(), saying("abc"))
    await talked(conversation, full, times=100)
    with pytest.raises(PromptTooLongError):
        await talked(conversation, full)


async def test_turns_of_one_episode_share_a_session_and_episodes_do_not() -> None:
    engine = saying("a", "b", "c")
    await talked(begun(), engine, times=2)
    await talked(begun(), engine)
    sessions = [request.session_id for request in engine.requests]
    assert sessions[0] == sessions[1] != sessions[2]


async def test_a_demonstration_has_the_tokens_of_the_same_conversation_sampled() -> None:
    shown = begun()
    shown.demonstrate("look")
    shown.add(MORE)
    shown.demonstrate("42")
    sampled = await talked(begun(), saying("look", "42"), times=2)
    assert (shown.token_ids, shown.loss_mask) == (sampled.token_ids, sampled.loss_mask)


async def test_rewritten_turns_stay_in_view_where_that_is_asked_for() -> None:
    engine = ScriptedEngine.saying(QWEN3, THOUGHT, THOUGHT, "5")
    conversation = await talked(begun(QWEN3, rewriting="keep"), engine, times=3)
    _, second, third = (str(QWEN3.decode(request.input_ids)) for request in engine.requests)
    assert f"assistant\n{THOUGHT}<|im_end|>\n<|im_start|>user\nmore" in second
    assert third.startswith(f"{second}{THOUGHT}<|im_end|>\n<|im_start|>user\nmore")
    assert len(conversation.trajectories(1.0)[0].turns) == 3


def test_a_tokenizer_without_chat_template_and_an_added_answer_are_errors_that_say_what_to_do() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match=r"no chat template; use a chat .* model"):
        begun(tokenizer)
    with pytest.raises(ValueError, match="cannot be added; sample it"):
        begun().add({"role": "assistant", "content": "4"})


@pytest.mark.parametrize(("text", "thread"), [("?", "MainThread"), ("? " * 10_000, "arl-rendering")])
async def test_a_long_transcript_is_rendered_beside_the_event_loop(
    text: str, thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    render, threads = ChatTemplate.render, []

    def noted(*args: Any, **options: Any) -> str:
        threads.append(threading.current_thread().name)
        return render(*args, **options)

    monkeypatch.setattr(ChatTemplate, "render", noted)
    chat = Conversation(TOKENIZER, [{"role": "user", "content": text}])
    await chat.agenerate(saying("4"), SamplingParams())
    assert [name.partition("_")[0] for name in threads[:1]] == [thread]


async def test_a_turn_asks_for_the_routes_of_new_tokens_and_branches_for_those_that_they_do_not_share() -> None:
    """Each token was computed by the expert of its place; Qwen3's template drops thoughts once a user speaks again."""

    def script(request: ModelRequest) -> ModelResponse:
        ids = QWEN3.encode(THOUGHT + QWEN3.eos_token, add_special_tokens=False)
        num_known, num_tokens = request.routes_from, len(request.input_ids) + len(ids)
        experts = np.arange(num_known, num_tokens - 1, dtype=np.uint16)[:, None, None]
        return ModelResponse(
            output_ids=tuple(ids),
            output_logprobs=(-1.0,) * len(ids),
            output_versions=(0,) * len(ids),
            stop_reason="stop",
            routes=Routes.joined([num_known, Routes.of(experts), 1]),
        )

    engine = ScriptedEngine(script)
    conversation = await talked(begun(QWEN3), engine)
    conversation.add({"role": "tool", "content": "42"})
    await conversation.agenerate(engine, SAMPLING)
    await talked(conversation, engine)
    first, tool, branch = engine.requests
    assert (first.routes_from, branch.routes_from) == (0, 0)
    num_answered = len(first.input_ids) + len(QWEN3.encode(THOUGHT + QWEN3.eos_token, add_special_tokens=False))
    assert tool.routes_from == num_answered - 1
    made = conversation.trajectories(1.0)
    assert len(made) == 2
    for trajectory in made:
        assert trajectory.routes is not None
        assert trajectory.routes.is_known.tolist() == [True] * (len(trajectory.token_ids) - 1) + [False]
        assert trajectory.routes.experts.ravel().tolist() == list(range(len(trajectory.token_ids) - 1))


def turn(parent: Turn | None, output_ids: Sequence[int], *, temperature: float = 1.0, is_cut: bool = False) -> Turn:
    """A turn after two tokens 0, whose tokens have their own numbers for versions and logprobs."""
    dialogue = Dialogue(ChatTemplate(TOKENIZER))
    prompt = replace(dialogue.prompt([{"role": "user", "content": "?"}]), parent=parent, given_ids=(0, 0))
    logprobs, reason = tuple(-float(i) for i in output_ids), "length" if is_cut else "stop"
    own = {"output_logprobs": logprobs, "output_versions": tuple(output_ids)}
    response = response_of(output_ids, **own, stop_reason=reason, temperature=temperature)
    return dialogue.record(prompt, response)


def trained(trajectory: Trajectory) -> list[int]:
    return trajectory.token_ids[trajectory.loss_mask].tolist()


def test_a_line_of_turns_is_one_trajectory() -> None:
    first = turn(None, [5, 6])
    (made,) = trajectories([first, turn(first, [7])], 1.0, turn_rewards=[0.5, 0.25], states=["a", None])
    assert made.token_ids.tolist() == [0, 0, 5, 6, 0, 0, 7]
    assert made.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1]
    assert made.versions.tolist() == [-1, -1, 5, 6, -1, -1, 7]
    assert made.behavior_logprobs.tolist() == [0.0, 0.0, -5.0, -6.0, 0.0, 0.0, -7.0]
    assert [(t.start, t.stop, t.reward, t.state) for t in made.turns] == [(2, 4, 0.5, "a"), (6, 7, 0.25, None)]


def test_a_shared_beginning_is_trained_in_the_first_trajectory_alone_and_is_in_all() -> None:
    root = turn(None, [5])
    leaves = [turn(root, [6]), turn(root, [7])]
    first, second = trajectories(
        [root, *leaves], 0.5, metrics={"calls": 3}, rewards={"right": 1.0}, turn_rewards=[1.0, 2.0, 4.0], role="solver"
    )
    assert (trained(first), trained(second)) == ([5, 6], [7])
    assert second.token_ids.tolist() == [0, 0, 5, 0, 0, 7]
    assert second.versions.tolist() == [-1, -1, 5, -1, -1, 7]
    assert second.behavior_logprobs[2] == -5.0
    assert [[t.reward for t in made.turns] for made in (first, second)] == [[1.0, 2.0], [4.0]]
    assert (first.metrics, second.metrics) == ({"calls": 3}, {})
    assert {(t.reward, t.role, *t.rewards.items()) for t in (first, second)} == {(0.5, "solver", ("right", 1.0))}


def test_more_tokens_than_can_be_trained_are_refused_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arl.workflow.conversation.MAX_EPISODE_TOKENS", 9)
    root = turn(None, [5])
    leaves = [turn(root, [6]), turn(root, [7])]
    assert len(trajectories([root, leaves[0]], 1.0)) == 1
    with pytest.raises(TrajectoryError, match="the episode is 2 trajectories of 12 tokens together, and at most 9 can"):
        trajectories([root, *leaves], 1.0)


def test_turns_of_another_temperature_are_a_trajectory_of_their_own_with_all_they_saw() -> None:
    first = turn(None, [5])
    second = turn(first, [6], temperature=0.5)
    third = turn(second, [7])
    warm, cool = trajectories([first, second, third], 1.0, metrics={"n": 1})
    assert (warm.temperature, trained(warm)) == (1.0, [5, 7])
    assert (cool.temperature, trained(cool)) == (0.5, [6])
    assert cool.token_ids.tolist() == warm.token_ids[: len(cool.token_ids)].tolist() == [0, 0, 5, 0, 0, 6]
    assert (warm.metrics, cool.metrics) == ({"n": 1}, {})


def test_the_trajectory_whose_last_turn_a_length_limit_ended_is_truncated() -> None:
    root = turn(None, [5], is_cut=True)
    leaves = [turn(root, [6]), turn(root, [7], is_cut=True), turn(root, [8])]
    assert [t.is_truncated for t in trajectories([root, *leaves], 0.0)] == [False, True, False]
    assert [t.is_truncated for t in trajectories([root, *leaves], 0.0, cut_after=leaves[0])] == [True, True, False]


def test_an_episode_without_a_sampled_turn_has_no_trajectory() -> None:
    with pytest.raises(TrajectoryError, match="nothing was sampled"):
        trajectories([], 1.0)


def test_a_turn_that_was_forgotten_is_seen_by_what_follows_it_and_not_trained() -> None:
    root = turn(None, [5])
    forgotten = turn(root, [6])
    (made,) = trajectories([root, turn(forgotten, [7])], 1.0)
    assert made.token_ids.tolist() == [0, 0, 5, 0, 0, 6, 0, 0, 7]
    assert trained(made) == [5, 7]
