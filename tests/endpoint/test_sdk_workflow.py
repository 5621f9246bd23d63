"""SDKWorkflow: programs as agents, in this process or in one of their own, and what one call of theirs may ask for."""

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from programs import ADD, ASK, CALL_ADD, Gated, opened, saying
from workflow.chat_templates import tokenizer_of
from workflow.scripted_answers import TOKENIZER, ended

from arl.api.errors import ConfigError, ProgramError, PromptTooLongError, ServerError, TrajectoryError
from arl.api.fakes import ScriptedEngine
from arl.api.types import Example, SamplingParams
from arl.endpoint import sdk_workflow
from arl.endpoint.proxy import OpenAIProxy
from arl.endpoint.sdk_workflow import Command, SDKWorkflow
from arl.rewards import InlineReward
from arl.runtime.clocks import CLOCK, EpisodeClock

PROGRAM = Command(arguments=[sys.executable, str(Path(__file__).with_name("chat_program.py"))], env={"MODEL": "mine"})
QUESTION: Example = {"question": "Why?", "answer": "Yes."}


def right(answer: str, data: Example) -> float:
    return float(answer == data["answer"])


def python(code: str) -> Command:
    return Command(arguments=[sys.executable, "-c", code])


async def run(program: Any, engine: ScriptedEngine, data: Example = QUESTION) -> Any:
    async with SDKWorkflow(program, InlineReward(right), TOKENIZER, sampling=SamplingParams(max_new_tokens=50)) as flow:
        return await flow.arun_episode(engine, data)


async def asks(base_url: str, api_key: str, data: Example) -> str:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = [{"role": "user", "content": data["question"]}]
        answer = await client.chat.completions.create(model="m", messages=messages)
        return answer.choices[0].message.content or ""


def asks_and_waits(base_url: str, api_key: str, data: Example) -> str:
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = [{"role": "user", "content": data["question"]}]
        return client.chat.completions.create(model="m", messages=messages).choices[0].message.content or ""


class Asker:
    async def __call__(self, base_url: str, api_key: str, data: Example) -> str:
        return await asks(base_url, api_key, data)


@pytest.mark.parametrize("program", [asks, asks_and_waits, lambda url, key, data: asks(url, key, data), Asker()])
async def test_a_function_is_called_as_it_is_and_rewarded_for_what_it_returns(program: Any) -> None:
    engine = saying("Yes.")
    (made,) = await run(program, engine)
    assert (made.reward, made.metrics["calls"]) == (1.0, 1)
    assert engine.requests[0].sampling.max_new_tokens == 50


async def test_a_program_in_a_process_of_its_own_is_trained() -> None:
    (made,) = await run(PROGRAM, saying("Maybe.", "Yes."))
    assert (made.reward, len(made.turns)) == (1.0, 2)


async def silent(base_url: str, api_key: str, data: Example) -> None:
    await asks(base_url, api_key, data)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (silent, "must return its final answer"),
        (python("import sys; sys.exit('the program is broken')"), "ended with status 1: the program is broken"),
        (Command(arguments=["no-such-program"]), "no-such-program could not be started"),
        (python("print('x' * (3 << 20))"), "printed more than"),
    ],
)
async def test_a_program_that_fails_fails_its_episode_with_its_own_words(program: Any, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        await run(program, saying("a"))


RUN = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', {!r}]{})"
DETACHED = "import os, sys; os.setsid(); sys.stdout.write('x' * 100); sys.stdout.flush(); sys.stdin.read()"


@pytest.mark.parametrize(
    ("code", "drain_s"),
    [
        ("import os; os.close(0)", None),
        (RUN.format("import time; time.sleep(600)", ""), None),  # killed with its group: it holds the pipe open
        (RUN.format(DETACHED, ", stdin=subprocess.PIPE"), 0.05),  # outside of the group: it is left behind
    ],
    ids=["its example", "its child", "a child that left"],
)
async def test_what_a_program_leaves_behind_is_not_waited_for(
    code: str, drain_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdk_workflow, "_DRAIN_S", drain_s or sdk_workflow._DRAIN_S)
    with pytest.raises(TrajectoryError, match="made no call"):
        await run(python(code), saying("a"), {"question": "x" * 1_000_000, "answer": ""})


async def test_a_program_is_killed_when_its_episode_is_cancelled(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "alive")
    program = python(f"import time; f = open({str(fifo)!r}, 'w'); f.write('x'); f.flush(); time.sleep(600)")
    async with asyncio.TaskGroup() as group:
        running = group.create_task(run(program, saying("a")))
        reading = await asyncio.to_thread(fifo.open)
        assert await asyncio.to_thread(reading.read, 1) == "x"
        running.cancel()
    with reading:
        assert await asyncio.to_thread(reading.read) == "", "the program's end closes the pipe"


async def test_more_programs_than_places_wait_for_one_and_their_time_limit_stands_still() -> None:
    waits, model = asyncio.Event(), Gated("Yes.")
    clock = EpisodeClock(60.0, on_change=lambda is_still: waits.set())

    async def third() -> Any:
        CLOCK.set(clock)
        async with clock.begin():
            return await flow.arun_episode(model.engine, QUESTION)

    program = replace(PROGRAM, max_processes=2)
    async with SDKWorkflow(program, InlineReward(right), TOKENIZER) as flow, asyncio.TaskGroup() as group:
        firsts = [group.create_task(flow.arun_episode(model.engine, QUESTION)) for _ in range(2)]
        for _ in range(2):
            await model.began.acquire()
        last = group.create_task(third())
        await waits.wait()
        assert clock.is_still
        assert len(model.engine.requests) == 2, "the third program has not begun"
        model.gate.set()
        await last
        assert not clock.is_still
    *early, late = (task.result()[0].metrics["program_wait_s"] for task in (*firsts, last))
    assert late > max(early)


async def test_the_programs_error_has_a_note_of_the_engines_failure() -> None:
    with pytest.raises(openai.InternalServerError) as failed:
        await run(asks, saying(ServerError("all servers are gone")))
    assert any("all servers are gone" in note for note in failed.value.__notes__)


async def test_a_program_that_found_no_room_in_the_context_has_no_answer_and_is_truncated() -> None:
    async def talks(base_url: str, api_key: str, data: Example) -> str:
        return "".join([await asks(base_url, api_key, data) for _ in range(3)])

    full = PromptTooLongError("the context is full")
    made = await run(talks, saying("Go on.", full), {"question": "?", "answer": ""})
    assert [(trajectory.reward, trajectory.is_truncated) for trajectory in made] == [(1.0, True)]
    assert made[0].metrics["context_full"] == 1.0
    with pytest.raises(openai.BadRequestError, match="the context is full"):  # nothing was recorded to train on
        await run(talks, saying(full))


def test_a_command_line_is_a_list_and_a_workflow_has_one_way_to_reach_the_model() -> None:
    for arguments in ("python agent.py", []):
        with pytest.raises(ConfigError, match="as a list"):
            Command(arguments=arguments)
    with pytest.raises(ConfigError, match="max_processes is 0; it must be at least 1"):
        Command(arguments=["true"], max_processes=0)
    assert Command(arguments=["true"]).num_places >= 8
    for tokenizer, proxy in ((None, None), (TOKENIZER, OpenAIProxy(TOKENIZER))):
        with pytest.raises(ConfigError, match="either a tokenizer"):
            SDKWorkflow(asks, InlineReward(right), tokenizer, proxy=proxy)


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


async def test_a_stream_gives_what_a_whole_answer_has() -> None:
    text = "Let me add oné and two, which is a task for a tool."
    async with opened(saying(f"{text}\n{CALL_ADD}")) as episode:
        whole = (await episode.ask(tools=[ADD], logprobs=True)).choices[0]
        chunks = [chunk async for chunk in await episode.ask(tools=[ADD], logprobs=True, stream=True)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert (deltas[0].role, "".join(delta.content or "" for delta in deltas)) == ("assistant", text)
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
