"""Chat completions: what OpenAI's own client gets, what the model is shown, and what is kept."""

from typing import Any

import openai
import pytest
from programs import ADD, ASK, CALL_ADD, opened, saying, shown
from workflow.chat_templates import tokenizer_of
from workflow.scripted_answers import TOKENIZER, ended

from arl.api.scripted import ScriptedEngine
from arl.api.types import SamplingParams
from arl.workflow.conversation import Conversation
from arl.workflow.tools import Tool


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def test_a_dialogue_is_recorded_as_a_conversation_records_it() -> None:
    answers = (f"Let me see.\n{CALL_ADD}", "It is 3.", "Yes.")
    tool = Tool.from_function(add)
    result, doubt = {"role": "tool", "content": "3"}, {"role": "user", "content": "Sure?"}
    conversation = Conversation(TOKENIZER, ASK, tools=[tool])
    engine = saying(*answers)
    for said in ((), (result,), (doubt,)):
        conversation.add(*said)
        await conversation.agenerate(engine, SamplingParams())
    async with opened(saying(*answers)) as episode:
        messages: list[Any] = list(ASK)
        for said in ((), (result,), (doubt,)):
            messages += said
            answer = await episode.ask(messages, tools=[tool.spec])
            messages.append(answer.choices[0].message)
            if calls := answer.choices[0].message.tool_calls:
                result["tool_call_id"] = calls[0].id
        (made,) = episode.session.trajectories(0.5, {"score": 2.0})
    (expected,) = conversation.trajectories(0.5)
    assert made.token_ids == expected.token_ids
    assert made.loss_mask == expected.loss_mask
    assert (made.behavior_logprobs, made.versions) == (expected.behavior_logprobs, expected.versions)
    assert made.turns == expected.turns
    assert (made.metrics["calls"], made.metrics["branches"], made.metrics["score"]) == (3, 0, 2.0)


async def test_samples_of_one_prompt_are_branches_and_each_is_trained() -> None:
    engine = saying("a", "b", "c")
    async with opened(engine) as episode:
        answer = await episode.ask(n=3, seed=7)
        made = episode.session.trajectories(1.0)
    assert [choice.message.content for choice in answer.choices] == ["a", "b", "c"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [sum(trajectory.loss_mask) for trajectory in made] == [2, 2, 2]
    assert answer.usage.completion_tokens == 6
    assert [request.sampling.seed for request in engine.requests] == [7, 8, 9]


async def test_logprobs_are_those_of_the_sampled_tokens() -> None:
    async with opened(saying("hé")) as episode:
        answer = await episode.ask(logprobs=True)
    told = answer.choices[0].logprobs.content
    assert [token.logprob for token in told] == [-1.0] * 4
    assert told[0].token == "h"
    assert told[-1].token == "<|im_end|>"


async def test_a_stream_gives_in_pieces_what_a_whole_answer_has() -> None:
    text = f"Let me add one and two, which is a task for a tool.\n{CALL_ADD}"
    async with opened(saying(text)) as episode:
        whole = await episode.ask(tools=[ADD], logprobs=True)
        stream = await episode.ask(tools=[ADD], logprobs=True, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    message = whole.choices[0].message
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    contents = [delta.content for delta in deltas if delta.content]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert deltas[0].role == "assistant"
    assert len(contents) > 2
    assert "".join(contents) == message.content == "Let me add one and two, which is a task for a tool."
    assert calls[0].id.startswith("call_")
    assert calls[0].function.name == "add"
    assert "".join(call.function.arguments for call in calls) == message.tool_calls[0].function.arguments
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage == whole.usage
    assert chunks[0].choices[0].logprobs.model_dump() == whole.choices[0].logprobs.model_dump()


async def test_a_stream_of_samples_tells_them_apart() -> None:
    async with opened(saying("one", "two")) as episode:
        texts = {0: "", 1: ""}
        async for chunk in await episode.ask(n=2, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "one", 1: "two"}


async def test_a_stop_string_is_cut_from_the_content_and_stays_in_the_transcript() -> None:
    engine = saying("Thought\nObservation:")
    async with opened(engine) as episode:
        answer = await episode.ask(stop=["\nObservation:", "never"])
        (made,) = episode.session.trajectories(1.0)
    assert answer.choices[0].message.content == "Thought"
    assert engine.requests[0].sampling.stop == ("\nObservation:", "never")
    assert list(made.token_ids[made.turns[0].start :]) == ended("Thought\nObservation:")


async def test_a_proxy_that_overrides_sampling_trains_at_one_temperature() -> None:
    engine = saying("a")
    async with opened(engine, sampling=SamplingParams(temperature=0.7), overrides_sampling=True) as episode:
        await episode.ask(temperature=0, seed=3, top_p=0.5, max_tokens=4, stop="x", extra_body={"top_k": 5})
    assert engine.requests[0].sampling == SamplingParams(temperature=0.7, max_new_tokens=4, stop=("x",))


async def test_more_tokens_than_the_context_leaves_are_not_asked_for() -> None:
    engine = saying("a")
    async with opened(engine, context_length=20) as episode:
        await episode.ask(max_tokens=500)
        prompt = len(engine.requests[0].input_ids)
        assert engine.requests[0].sampling.max_new_tokens == 20 - prompt
        with pytest.raises(openai.BadRequestError) as refused:
            await episode.ask([*ASK, {"role": "assistant", "content": "a"}, {"role": "user", "content": "long " * 10}])
        (made,) = episode.session.trajectories(1.0)
    assert refused.value.code == "context_length_exceeded"
    assert made.is_truncated


async def test_the_line_that_found_no_room_is_truncated_and_no_other() -> None:
    async with opened(saying("a", "b"), context_length=30) as episode:
        await episode.ask([{"role": "user", "content": "first"}])
        await episode.ask([{"role": "user", "content": "second"}])
        with pytest.raises(openai.BadRequestError):
            await episode.ask(
                [
                    {"role": "user", "content": "first"},
                    {"role": "assistant", "content": "a"},
                    {"role": "user", "content": "long " * 10},
                ]
            )
        assert [made.is_truncated for made in episode.session.trajectories(1.0)] == [True, False]


async def test_thinking_is_told_apart_and_is_no_part_of_the_history() -> None:
    text = "<think>\nhm\n</think>\n\nSo."
    async with opened(saying(text), tokenizer_of("qwen3")) as episode:
        answer = (await episode.ask(tools=[ADD])).choices[0].message
        streamed = [chunk async for chunk in await episode.ask(stream=True)]
    assert (answer.content, answer.reasoning_content) == ("So.", "hm")
    thought = [getattr(chunk.choices[0].delta, "reasoning_content", None) for chunk in streamed]
    assert "".join(piece for piece in thought if piece) == "hm"


async def test_thinking_that_the_prompt_began_ends_at_its_tag() -> None:
    tokenizer = tokenizer_of("deepseek_r1")
    engine = ScriptedEngine(lambda _: tokenizer.encode("hm\n</think>\n\nSo.<|EOS|>", add_special_tokens=False))
    async with opened(engine, tokenizer) as episode:
        answer = (await episode.ask()).choices[0].message
    assert tokenizer.decode(list(engine.requests[0].input_ids)).rstrip().endswith("<think>")
    assert (answer.content, answer.reasoning_content) == ("So.", "hm")


async def test_thinking_stays_in_the_content_where_that_is_asked_for() -> None:
    async with opened(saying("<think>hm</think>So."), reasoning="inline") as episode:
        answer = (await episode.ask()).choices[0].message
    assert answer.content == "<think>hm</think>So."


@pytest.mark.parametrize("text", ['<tool_call>\n{"name": "add", "argu', f"{CALL_ADD}<tool_call>?</tool_call>"])
async def test_a_call_that_cannot_be_read_is_told_as_it_was_written(text: str) -> None:
    async with opened(saying(text)) as episode:
        answer = (await episode.ask(tools=[ADD])).choices[0]
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == (text, None, "stop")


async def test_messages_may_be_parts_and_developers_are_systems() -> None:
    engine = saying("a")
    async with opened(engine) as episode:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        await episode.ask([{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts}])
    assert "<|im_start|>system\nBe kind.<|im_end|>" in shown(engine.requests[0])
    assert "<|im_start|>user\none\ntwo<|im_end|>" in shown(engine.requests[0])


async def test_the_models_list_has_the_context() -> None:
    async with opened(saying("a"), context_length=512) as episode:
        models = await episode.client.models.list()
    assert [model.max_model_len for model in models.data] == [512]  # pyright: ignore[reportAttributeAccessIssue]
