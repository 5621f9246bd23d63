"""What a call may ask for beside its answer: fields that are ignored, a begun answer, a count, template options."""

import logging
from typing import Any

import anthropic
import openai
import pytest
from programs import ADD, ASK, CERTIFICATES, Opened, opened, saying, shown, trained
from protocols import asked, told_by
from workflow.chat_templates import tokenizer_of
from workflow.scripted_answers import calling, decode, encode
from workflow.template_families import family_tokenizer

from arl.api.errors import ConfigError
from arl.api.fakes import ScriptedEngine
from arl.endpoint.proxy import OpenAIProxy

UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
OF_UNIQUE = {"type": "json_schema", "json_schema": {"name": "n", "schema": UNIQUE}}
BETA_TOOL = {"name": "add", "input_schema": {"type": "object"}, "defer_loading": True}


def client_of_anthropic(episode: Opened) -> anthropic.AsyncAnthropic:
    key, http = episode.session.api_key, anthropic.DefaultAsyncHttpxClient(verify=CERTIFICATES)
    return anthropic.AsyncAnthropic(base_url=episode.session.url, api_key=key, http_client=http)


@pytest.mark.parametrize(
    ("protocol", "fields", "ignored"),
    [
        (
            "chat",
            {"frequency_penalty": 0.5, "logit_bias": {"7": 1}, "top_logprobs": 2, "best_of": 2},
            ("frequency_penalty", "logit_bias", "top_logprobs", "best_of"),
        ),
        ("chat", {"response_format": OF_UNIQUE}, ("response_format.json_schema.schema.uniqueItems",)),
        ("responses", {"truncation": "auto", "max_tool_calls": 3}, ("truncation", "max_tool_calls")),
        ("anthropic", {"tools": [BETA_TOOL], "container": "c"}, ("tools[0].defer_loading", "container")),
    ],
)
async def test_fields_may_be_ignored_with_a_warning_for_each_and_a_count(
    protocol: str, fields: dict[str, Any], ignored: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    session, answer, _ = await asked(protocol, saying("Well."), options={"unsupported": "ignore"}, **fields)
    assert answer is not None
    assert (answer.text, session.counts.refused) == ("Well.", 0)
    assert session.metrics["fields_ignored"] == len(ignored)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sorted(message.split(": ")[1].split(" ")[0] for message in told) == sorted(ignored)


async def test_a_field_that_is_ignored_in_many_calls_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(saying("a"), unsupported="ignore") as episode:
        for penalty in (0.1, 0.2, 0.3):
            await episode.ask(presence_penalty=penalty)
        assert episode.session.metrics["fields_ignored"] == 3
    assert [record.getMessage().split(" ")[:2] for record in caplog.records] == [
        ["/v1/chat/completions:", "presence_penalty"]
    ]


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]


@pytest.mark.parametrize(
    ("protocol", "fields"),
    [
        ("chat", {"messages": IMAGE}),
        ("chat", {"temperature": -1}),
        ("responses", {"background": True}),
        ("responses", {"tools": [{"type": "web_search"}]}),
        ("anthropic", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
    ],
)
async def test_a_call_that_would_mean_something_else_without_a_field_is_refused_whatever_the_setting(
    protocol: str, fields: dict[str, Any]
) -> None:
    engine = saying("never")
    session, _, error = await asked(protocol, engine, options={"unsupported": "ignore"}, **fields)
    assert (error.status_code, session.counts.ignored, engine.requests) == (400, 0, [])


def test_the_setting_has_two_values() -> None:
    with pytest.raises(ConfigError, match='"refuse" or "ignore"'):
        OpenAIProxy(tokenizer_of("chatml"), unsupported="drop")  # pyright: ignore[reportArgumentType]


async def test_the_model_continues_a_begun_answer_which_is_not_trained() -> None:
    engine = saying(" so, yes.", "Bye.")
    begun = [*ASK, {"role": "assistant", "content": "I think"}]
    said = {"role": "assistant", "content": "I think so, yes."}
    async with opened(engine) as episode, client_of_anthropic(episode) as client:
        answer = await client.messages.create(model="m", max_tokens=50, messages=begun)
        assert [block.text for block in answer.content if block.type == "text"] == [" so, yes."]
        bye: Any = [*ASK, said, {"role": "user", "content": "Bye?"}]
        await client.messages.create(model="m", max_tokens=50, messages=bye)
        (made,) = episode.session.trajectories(1.0)
    assert shown(engine.requests[0]).endswith("<|im_start|>assistant\nI think")
    assert trained(made) == [" so, yes.", "Bye."]
    assert decode(made.token_ids).count("I think so, yes.<|im_end|>") == 1
    n = len(engine.requests[0].input_ids)
    assert engine.requests[0].input_ids[n - len(encode("I think")) :] == tuple(encode("I think"))
    assert not made.loss_mask[:n].any()


@pytest.mark.parametrize(
    ("tokenizer", "begin"),
    [(tokenizer_of("deepseek_r1"), "<think>"), (family_tokenizer("gpt-oss"), "<|channel|>final<|message|>")],
)
async def test_an_answer_that_has_a_beginning_of_its_own_cannot_be_begun(tokenizer: Any, begin: str) -> None:
    messages = [*ASK, {"role": "assistant", "content": "I think"}]
    _, _, error = await asked("anthropic", saying("never"), tokenizer=tokenizer, tools=[], messages=messages)
    assert (error.status_code, f"begin with {begin}" in told_by(error)[0]) == (400, True)


async def test_tokens_are_counted_without_a_call_of_the_model() -> None:
    tool: Any = {"name": "add", "input_schema": ADD["function"]["parameters"]}
    async with opened(engine := saying("a")) as episode, client_of_anthropic(episode) as client:
        counted = await client.messages.count_tokens(model="m", messages=ASK, tools=[tool], system="Be brief.")
        assert (engine.requests, episode.session.metrics["calls"]) == ([], 0)
        answer = await client.messages.create(model="m", max_tokens=5, messages=ASK, tools=[tool], system="Be brief.")
        with pytest.raises(anthropic.BadRequestError, match="messages is empty"):
            await client.messages.count_tokens(model="m", messages=[])
    assert counted.input_tokens == answer.usage.input_tokens == len(engine.requests[0].input_ids)


async def test_the_templates_options_are_part_of_a_conversations_identity() -> None:
    tokenizer = tokenizer_of("qwen3")
    engine = ScriptedEngine(lambda _: tokenizer.encode("So.<|im_end|>", add_special_tokens=False))
    silent = {"chat_template_kwargs": {"enable_thinking": False}}
    said = [{"role": "assistant", "content": "So."}, {"role": "user", "content": "And?"}]
    async with opened(engine, tokenizer) as episode:
        for messages, more in ((ASK, {}), ([*ASK, *said], silent), ([*ASK, *said, *said], silent), (ASK, silent)):
            await episode.ask(messages, extra_body=more)
        made = episode.session.trajectories(1.0)
    ends = [tokenizer.decode(list(request.input_ids)).endswith("</think>\n\n") for request in engine.requests]
    assert ends == [False, True, True, True]
    assert sum(len(trajectory.turns) for trajectory in made) == 4
    assert sum(int(trajectory.loss_mask.sum()) for trajectory in made) == 4 * 4
    whole = tokenizer.decode(made[0].token_ids.tolist())
    assert "And?" not in whole, "another option begins another conversation"


@pytest.mark.parametrize("options", [{"enable_thinkng": False}, {"enable_thinking": "false"}, {"tokenize": True}])
async def test_an_option_that_would_do_nothing_is_refused_by_its_name_or_ignored_with_a_warning(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, (name,) = tokenizer_of("qwen3"), options
    engine = ScriptedEngine(lambda _: tokenizer.encode("So.<|im_end|>", add_special_tokens=False))
    _, _, error = await asked("chat", engine, tokenizer=tokenizer, chat_template_kwargs=options)
    message, _, param = told_by(error)
    assert (error.status_code, param) == (400, f"chat_template_kwargs.{name}")
    assert ("give True or False" if name == "enable_thinking" else "it reads enable_thinking") in message
    async with opened(engine, tokenizer, unsupported="ignore") as episode:
        for _ in range(2):
            await episode.ask(extra_body={"chat_template_kwargs": options})
        assert (episode.session.metrics["fields_ignored"], len(caplog.records)) == (2, 1)


async def test_the_other_calls_of_an_answer_that_may_have_one_are_still_shown_to_the_model() -> None:
    two = f"{calling('add', a=1)}\n{calling('add', a=2)}"
    async with opened(engine := saying(two, "Done.")) as episode:
        said = (await episode.ask(tools=[ADD], parallel_tool_calls=False)).choices[0].message
        result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "1"}
        await episode.ask([*ASK, said, result], tools=[ADD], parallel_tool_calls=False)
        (made,) = episode.session.trajectories(1.0)
    assert (len(said.tool_calls), made.metrics["branches"], trained(made)) == (1, 0, [two, "Done."])
    assert two in shown(engine.requests[1])


async def test_a_text_and_its_answer_are_continued_token_by_token() -> None:
    """As programs that write prompts of their own do: with text, and with tokens."""
    engine = saying("two", "three", "four", "five")
    async with opened(engine) as episode:
        create = episode.client.completions.create
        first = await create(model="m", prompt="one ", max_tokens=50, logprobs=0, echo=True)
        await create(model="m", prompt="one two<|im_end|> and ", temperature=0.5)
        ids = episode.session.turns()[1].token_ids
        await create(model="m", prompt=[*ids, *encode(" so ")], temperature=0.5)
        await create(model="m", prompt="one two", extra_body={"regex": "[a-z]+"})
        made = episode.session.trajectories(1.0)
    choice = first.choices[0]
    assert (choice.text, choice.finish_reason) == ("one two", "stop")
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or ()) == "two<|im_end|>"
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (4, 4)
    assert [trained(trajectory) for trajectory in made] == [["two"], ["three", "four"], ["five"]]
    assert decode(made[1].token_ids) == "one two<|im_end|> and three<|im_end|> so four<|im_end|>"
    assert decode(made[2].token_ids) == "one twofive<|im_end|>", "without its end, the answer is another text"
    assert engine.requests[3].sampling.grammar is not None


async def test_a_text_that_a_template_rendered_begins_once() -> None:
    tokenizer = tokenizer_of("llama3")
    text = str(tokenizer.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True))
    engine = ScriptedEngine.saying(tokenizer, "b", "b")
    async with opened(engine, tokenizer) as episode:
        for prompt in (text, "a" + text):
            await episode.client.completions.create(model="m", prompt=prompt)
    begin = str(tokenizer.bos_token)
    assert [tokenizer.decode(list(r.input_ids)) for r in engine.requests] == [text, begin + "a" + text]


async def test_a_streamed_completion_is_the_whole_one() -> None:
    async with opened(saying("A long answer to a short text.")) as episode:
        whole = await episode.client.completions.create(model="m", prompt=["Why?"], n=2)
        stream = await episode.client.completions.create(model="m", prompt=["Why?"], n=2, stream=True)
        texts, endings = {0: "", 1: ""}, []
        async for chunk in stream:
            (choice,) = chunk.choices
            texts[choice.index] += choice.text
            endings += [choice.finish_reason] if choice.finish_reason else []
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert endings == ["stop", "stop"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1 << 20]}, "prompt"),
        ({"suffix": "."}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 2}, "logprobs"),
        ({"regex": "a", "guided_regex": "b"}, "regex"),
    ],
)
async def test_a_completion_that_cannot_be_made_is_refused(fields: dict[str, Any], param: str) -> None:
    async with opened(saying("never")) as episode:
        with pytest.raises(openai.BadRequestError) as refused:
            await episode.client.completions.create(model="m", prompt="a", extra_body=fields)
    assert refused.value.param == param
