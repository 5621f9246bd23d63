"""Calls as models write them, readable or not, and what each SDK makes of them."""

from typing import Any

import pytest
from programs import ADD, ASK, CALL_ADD, opened, saying, trained
from protocols import asked
from workflow.template_families import family_tokenizer

from arl.api.fakes import ScriptedEngine
from arl.api.types import SamplingParams
from arl.workflow.call_formats import QWEN_XML, ToolCall

BAD = '{"name": "add", "arguments": {"a": }}'
ENDING = {"chat": "tool_calls", "responses": "completed", "anthropic": "tool_use"}
IN_TEXT = {"chat": "stop", "responses": "completed", "anthropic": "end_turn"}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("protocol", list(ENDING))
async def test_an_unreadable_call_leaves_the_readable_ones_and_is_told_with_a_reason(
    protocol: str, streams: bool
) -> None:
    said = f"I add.\n<tool_call>\n{BAD}\n</tool_call>\n{CALL_ADD}"
    session, answer, _ = await asked(protocol, saying(said), streams=streams)
    assert answer is not None
    assert (answer.ending, answer.calls) == (ENDING[protocol], (("add", {"a": 1, "b": 2}),))
    assert (answer.text.startswith("I add."), BAD in answer.text) == (True, True)
    ((bad,), (made,)) = answer.faults, session.trajectories(1.0)
    assert (bad["text"].strip(), "one JSON object" in bad["reason"]) == (BAD, True)
    assert (trained(made), made.metrics["malformed_calls"]) == ([said], 1)


@pytest.mark.parametrize("protocol", list(ENDING))
async def test_an_answer_whose_calls_are_all_unreadable_is_text_and_counted(protocol: str) -> None:
    said = f"<tool_call>\n{BAD}\n</tool_call>\n<tool_call>?</tool_call>"
    session, answer, _ = await asked(protocol, saying(said))
    assert answer is not None
    assert (answer.text, answer.calls, answer.ending) == (said, (), IN_TEXT[protocol])
    assert (len(answer.faults), session.metrics["malformed_calls"]) == (2, 2)


@pytest.mark.parametrize("number", ["1e400", "NaN", "-Infinity"])
@pytest.mark.parametrize("protocol", list(ENDING))
async def test_a_number_that_sdks_cannot_send_back_makes_a_call_unreadable(protocol: str, number: str) -> None:
    said = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {number}}}}}\n</tool_call>'
    session, answer, _ = await asked(protocol, saying(said))
    assert answer is not None
    assert (answer.text, answer.calls, session.metrics["malformed_calls"]) == (said, (), 1)


@pytest.mark.parametrize("depth", [80, 900])
async def test_arguments_that_nest_too_deeply_to_be_sent_back_make_a_call_unreadable(depth: int) -> None:
    said = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {"[" * depth}{"]" * depth}}}}}\n</tool_call>'
    async with opened(saying(said), sampling=SamplingParams(max_new_tokens=4000)) as episode:
        message = (await episode.ask(tools=[ADD])).choices[0].message
    assert (message.content, message.tool_calls) == (said, None)
    assert "it nests more than 80" in message.model_extra["malformed_tool_calls"][0]["reason"]


WRITTEN = [
    ('{"a": 1.50, "b":1e3}', {"a": 1.5, "b": 1000.0}),
    (r'{"note": "caf\u00e9 \ud83d\ude00"}', {"note": "café \U0001f600"}),
    ('{"a": 1, "b": 0, "a": 2}', {"a": 2, "b": 0}),
    (r'{"note": "half \ud800 of a pair"}', {"note": "half \ufffd of a pair"}),
    (f'{{"a": {10**100}}}', {"a": 10**100}),
]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("written", "read"), WRITTEN)
@pytest.mark.parametrize("protocol", list(ENDING))
async def test_arguments_reach_a_program_as_the_model_wrote_them_if_they_are_text(
    protocol: str, written: str, read: dict[str, object], streams: bool
) -> None:
    said = f'<tool_call>\n{{"name": "add", "arguments": {written}}}\n</tool_call>'
    _, answer, _ = await asked(protocol, saying(said), streams=streams)
    assert answer is not None
    assert answer.calls == (("add", read),)


@pytest.mark.parametrize("written", [written for written, _ in WRITTEN[:3]])
async def test_arguments_that_travel_as_text_are_the_models_words(written: str) -> None:
    said = f'<tool_call>\n{{"name": "add", "arguments": {written}}}\n</tool_call>'
    async with opened(saying(said)) as episode:
        chat = (await episode.ask(tools=[ADD])).choices[0].message.tool_calls[0].function.arguments
        tool: Any = {"type": "function", **ADD["function"]}
        (item,) = (await episode.client.responses.create(model="any", input="?", tools=[tool])).output
    assert [chat, item.arguments] == [written, written]


def numbered(number: str, name: str = "add") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{}}, "id": "{number}"}}\n</tool_call>'


async def test_calls_of_one_answer_have_ids_of_their_own_and_all_that_is_told_of_them_is_text() -> None:
    said = [numbered("7"), numbered("7"), numbered(r"\ud800", r"\udfff"), r'<tool_call>{"name": "\ud800"}</tool_call>']
    async with opened(saying("".join(said), "Done.")) as episode:
        first = (await episode.ask(tools=[ADD])).choices[0].message
        ids, names = zip(*((call.id, call.function.name) for call in first.tool_calls), strict=True)
        results = [{"role": "tool", "tool_call_id": one, "content": "0"} for one in ids]
        await episode.ask([*ASK, first, *results], tools=[ADD])
        assert episode.session.metrics["branches"] == 0
    assert (ids[0], len(set(ids)), ids[2], names) == ("7", 3, "\ufffd", ("add", "add", "\ufffd"))
    assert first.model_extra["malformed_tool_calls"][0]["name"] == "\ufffd"


async def test_a_parameter_that_is_not_of_its_type_is_left_out_and_told_with_a_reason() -> None:
    said = QWEN_XML.write([ToolCall(name="add", arguments={"a": "many", "b": 2})])
    async with opened(saying(said), call_format=QWEN_XML) as episode:
        message = (await episode.ask(tools=[ADD])).choices[0].message
        assert episode.session.metrics["malformed_calls"] == 0
    assert message.tool_calls[0].function.arguments == '{"b": 2}'
    (told,) = message.model_extra["malformed_tool_calls"]
    assert told == {"name": "add", "text": "", "reason": "argument a: 'many' is not an integer; it was left out"}


OF_FIELDS = {
    "gpt-oss": "<|channel|>commentary to=functions.add <|constrain|>json<|message|>ARGUMENTS<|call|>",
    "mistral-v3": '[TOOL_CALLS] [{"name": "add", "arguments": ARGUMENTS, "id": "a1b2c3d4e"}]</s>',
    "kimi-k2-thinking": "<think>hm</think><|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    "<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|><|tool_calls_section_end|>[EOS]",
}
"""Families whose templates write calls themselves, from the fields of a message."""


@pytest.mark.parametrize("family", list(OF_FIELDS))
async def test_a_template_that_writes_calls_itself_does_not_replace_the_models_words(family: str) -> None:
    tokenizer = family_tokenizer(family)
    said = [OF_FIELDS[family].replace("ARGUMENTS", written) for written, _ in WRITTEN]
    answers = iter([*said, str(tokenizer.eos_token)])
    engine = ScriptedEngine(lambda _: tokenizer.encode(next(answers), add_special_tokens=False))
    messages: list[Any] = list(ASK)
    async with opened(engine, tokenizer) as episode:
        while calls := (message := (await episode.ask(messages, tools=[ADD])).choices[0].message).tool_calls:
            messages += [message, {"role": "tool", "tool_call_id": calls[0].id, "content": "0"}]
        assert episode.session.metrics["branches"] == 0
    seen = str(tokenizer.decode(list(engine.requests[-1].input_ids)))
    assert [seen.count(words) for words in said] == [1] * len(said)
