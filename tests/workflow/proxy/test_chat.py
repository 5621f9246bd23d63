"""What one call may ask for beside an answer: streams, samples, logprobs, thinking apart, and no more than fits."""

import openai
import pytest
from programs import ADD, ASK, CALL_ADD, opened, saying
from workflow.chat_templates import tokenizer_of
from workflow.scripted_answers import ended

from arl.api.scripted import ScriptedEngine
from arl.api.types import SamplingParams


async def test_samples_of_one_prompt_are_branches_and_each_is_trained() -> None:
    engine = saying("one", "two", "three", "one", "two", "three")
    async with opened(engine) as episode:
        answer = await episode.ask(n=3, seed=7)
        made = episode.session.trajectories(1.0)
        streamed = {0: "", 1: "", 2: ""}
        async for chunk in await episode.ask(n=3, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    texts = {0: "one", 1: "two", 2: "three"}
    assert {choice.index: choice.message.content for choice in answer.choices} == streamed == texts
    assert [sum(trajectory.loss_mask) for trajectory in made] == [4, 4, 6]
    assert answer.usage.completion_tokens == 14
    assert [request.sampling.seed for request in engine.requests[:3]] == [7, 8, 9]


async def test_a_stream_gives_in_pieces_what_a_whole_answer_has() -> None:
    text = "Let me add oné and two, which is a task for a tool."
    async with opened(saying(f"{text}\n{CALL_ADD}")) as episode:
        whole = (await episode.ask(tools=[ADD], logprobs=True)).choices[0]
        chunks = [chunk async for chunk in await episode.ask(tools=[ADD], logprobs=True, stream=True)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    contents = [delta.content for delta in deltas if delta.content]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert (deltas[0].role, len(contents) > 2, "".join(contents)) == ("assistant", True, text)
    assert (calls[0].id[:5], calls[0].function.name) == ("call_", "add")
    assert "".join(call.function.arguments for call in calls) == whole.message.tool_calls[0].function.arguments
    assert chunks[0].choices[0].logprobs.model_dump() == whole.logprobs.model_dump()
    told = whole.logprobs.content
    assert [told[0].token, told[-1].token] == ["L", "<|im_end|>"]
    assert [token.logprob for token in told] == [-1.0] * len(ended(f"{text}\n{CALL_ADD}"))


async def test_the_events_of_a_response_build_it_up() -> None:
    tool = {"type": "function", **ADD["function"], "strict": True}
    async with opened(saying(f"<think>Sum.</think>I add.{CALL_ADD}")) as episode:
        stream = await episode.client.responses.create(model="any", input="1 + 2?", tools=[tool], stream=True)
        events = [event async for event in stream]
    assert " ".join(dict.fromkeys(event.type.removeprefix("response.") for event in events)) == (
        "created in_progress output_item.added content_part.added reasoning_text.delta reasoning_text.done "
        "content_part.done output_item.done output_text.delta output_text.done function_call_arguments.delta "
        "function_call_arguments.done completed"
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for kind, text in (("output_text", "I add."), ("function_call_arguments", '{"a": 1, "b": 2}')):
        assert "".join(event.delta for event in events if event.type == f"response.{kind}.delta") == text


async def test_a_proxy_that_overrides_sampling_trains_at_one_temperature() -> None:
    engine = saying("a")
    async with opened(engine, sampling=SamplingParams(temperature=0.7), overrides_sampling=True) as episode:
        await episode.ask(temperature=0, seed=3, top_p=0.5, max_tokens=4, stop="x", extra_body={"top_k": 5})
    assert engine.requests[0].sampling == SamplingParams(temperature=0.7, max_new_tokens=4, stop=("x",))


async def test_no_more_is_asked_for_than_fits_and_the_line_that_found_no_room_is_truncated() -> None:
    engine = saying("a", "b")
    async with opened(engine, context_length=30) as episode:
        await episode.ask(max_tokens=500)
        await episode.ask([{"role": "user", "content": "second"}])
        with pytest.raises(openai.BadRequestError) as refused:
            await episode.ask([*ASK, {"role": "assistant", "content": "a"}, {"role": "user", "content": "long " * 10}])
        made = episode.session.trajectories(1.0)
        (model,) = (await episode.client.models.list()).data
    assert engine.requests[0].sampling.max_new_tokens == 30 - len(engine.requests[0].input_ids)
    assert refused.value.code == "context_length_exceeded"
    assert [trajectory.is_truncated for trajectory in made] == [True, False]
    assert model.max_model_len == 30  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("reasoning", "told"), [("apart", ("So.", "hm")), ("inline", ("hm\n</think>\n\nSo.", None))])
async def test_thinking_that_the_prompt_began_is_told_apart_unless_it_shall_not(reasoning: str, told: object) -> None:
    tokenizer = tokenizer_of("deepseek_r1")
    engine = ScriptedEngine(lambda _: tokenizer.encode("hm\n</think>\n\nSo.<|EOS|>", add_special_tokens=False))
    async with opened(engine, tokenizer, reasoning=reasoning) as episode:
        answer = (await episode.ask()).choices[0].message
    assert tokenizer.decode(list(engine.requests[0].input_ids)).rstrip().endswith("<think>")
    assert (answer.content, answer.model_extra.get("reasoning_content")) == told
