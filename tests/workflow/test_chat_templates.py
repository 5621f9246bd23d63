"""On the templates of well-known models, whatever is said: the model sees what a server renders, token by token."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from chat_templates import tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_answers import response_of

from arl.api.types import Trajectory
from arl.workflow.chat_template import ChatTemplate, template_of
from arl.workflow.conversation import trajectories
from arl.workflow.dialogue import Dialogue, Turn

TEMPLATES = {name: ChatTemplate(tokenizer_of(name)) for name in ("chatml", "qwen2_5", "qwen3", "llama3", "mistral")}
SPEC = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
WITH_TOOLS = ("qwen2_5", "qwen3", "llama3", "mistral")

# What people and models write, without what would end a turn, and without the tags of thinking.
TEXT = st.text(alphabet='ab \n\té😀{}"<>/&1.', max_size=8)
ARGUMENTS = st.dictionaries(st.sampled_from(["word", "n"]), st.one_of(st.integers(), TEXT), max_size=2)
Said = dict[str, Any]


@st.composite
def answers(draw: st.DrawFn, name: str) -> Said:
    """What a model says, as it would be sent to a server later."""
    said: Said = {"role": "assistant", "content": draw(TEXT)}
    if name == "qwen3" and draw(st.booleans()):
        said["reasoning_content"] = draw(TEXT.filter(lambda text: text.strip() != "")).strip("\n")
        said["content"] = said["content"].lstrip("\n")
    if name in WITH_TOOLS and draw(st.booleans()):
        # Llama calls one tool at a time, and it and Mistral's say nothing beside a call.
        number = draw(st.integers(1, 1 if name == "llama3" else 2))
        said["tool_calls"] = [
            {"type": "function", "id": f"call{i:05d}", "function": {"name": "look", "arguments": draw(ARGUMENTS)}}
            for i in range(number)
        ]
        if name in ("llama3", "mistral"):
            said["content"] = None
    if name == "llama3" and said["content"]:
        said["content"] = said["content"].strip()
    return said


@st.composite
def conversations(draw: st.DrawFn, name: str) -> list[Said]:
    """What is said in turns, from the first message to the last answer."""
    messages = [{"role": "system", "content": draw(TEXT)}] * draw(st.booleans())
    messages.append({"role": "user", "content": draw(TEXT)})
    for _ in range(draw(st.integers(1, 4))):
        answer = draw(answers(name))
        messages.append(answer)
        results = [
            {"role": "tool", "content": draw(TEXT), "tool_call_id": call["id"]} for call in answer.get("tool_calls", ())
        ]
        messages += results or [{"role": "user", "content": draw(TEXT)}]
    while messages[-1]["role"] != "assistant":
        messages.pop()
    return messages


def canonical(name: str, said: Said) -> str:
    """The words of an answer as the template writes them, from its description alone."""
    calls = [call["function"] for call in said.get("tool_calls", ())]
    ids = [call["id"] for call in said.get("tool_calls", ())]
    arguments = [json.dumps(call["arguments"], ensure_ascii=False) for call in calls]
    if name == "llama3" and calls:
        return f'{{"name": "look", "parameters": {arguments[0]}}}'
    if name == "mistral" and calls:
        written = [f'{{"name": "look", "arguments": {a}, "id": "{i}"}}' for a, i in zip(arguments, ids, strict=True)]
        return f"[TOOL_CALLS] [{', '.join(written)}]"
    thought = f"<think>\n{said['reasoning_content']}\n</think>\n\n" if "reasoning_content" in said else ""
    parts = [said["content"]] if said["content"] or not calls else []
    parts += [f'<tool_call>\n{{"name": "look", "arguments": {a}}}\n</tool_call>' for a in arguments]
    # Qwen2.5's has a line break before the first call too where nothing is said: the one of the header.
    return thought + "\n".join(parts)


def served(template: ChatTemplate, messages: Sequence[Said], tools: Sequence[Said], is_open: bool = True) -> list[int]:
    """What a server would make of the messages."""
    plain = [{k: v for k, v in message.items() if v is not None or k == "content"} for message in messages]
    text = template.tokenizer.apply_chat_template(
        plain, tools=[dict(tool) for tool in tools] or None, tokenize=False, add_generation_prompt=is_open
    )
    return template.tokenizer.encode(str(text), add_special_tokens=False)


def as_clients_send(message: Said) -> Said:
    """An answer as it comes back: thinking dropped, JSON laid out anew, an empty text for none and none for empty."""
    sent = {name: value for name, value in message.items() if name != "reasoning_content"}
    if "tool_calls" in message:
        calls = [
            {**call, "function": {"name": "look", "arguments": json.dumps(call["function"]["arguments"], indent=2)}}
            for call in message["tool_calls"]
        ]
        sent |= {"tool_calls": calls, "content": message["content"] or ("" if message["content"] is None else None)}
    return sent


@dataclass
class Episode:
    """Says what is scripted, and notes what the model saw and sampled. One logprob and version for each turn."""

    template: ChatTemplate
    tools: Sequence[Said] = ()
    dialogue: Dialogue = field(init=False)
    inputs: list[tuple[int, ...]] = field(default_factory=list)
    outputs: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dialogue = Dialogue(self.template)

    def say(
        self, messages: Sequence[Said], words: str, said: Said, after: Turn | None, *, is_cut: bool = False
    ) -> Turn:
        prompt = self.dialogue.prompt(messages, self.tools, after=after)
        ids = (*self.template.encode(words), *([] if is_cut else [self.template.tokenizer.eos_token_id]))
        number = len(self.inputs)
        response = response_of(ids, version=number, logprob=-float(number), stop_reason="length" if is_cut else "stop")
        self.inputs.append(prompt.input_ids)
        self.outputs.append(ids)
        return self.dialogue.record(prompt, response, said)

    def check(self) -> tuple[Trajectory, ...]:
        """Every sampled token is trained exactly once, with its own logprob and version, and so is each reward."""
        number = len(self.inputs)
        made = trajectories(
            self.dialogue.turns, 0.5, metrics={"turns": number}, turn_rewards=[2.0**i for i in range(number)]
        )
        trained = [0] * number
        for trajectory in made:
            for version, start, stop in runs(trajectory.versions):
                if version >= 0:
                    assert tuple(trajectory.token_ids[:start]) == self.inputs[version]
                    assert tuple(trajectory.token_ids[start:stop]) == self.outputs[version]
                    assert set(trajectory.behavior_logprobs[start:stop]) == {-float(version)}
                    assert len(set(trajectory.loss_mask[start:stop])) == 1
                    trained[version] += sum(trajectory.loss_mask[start:stop])
                else:
                    assert not any(trajectory.loss_mask[start:stop])
                    assert not any(trajectory.behavior_logprobs[start:stop])
        assert trained == [len(ids) for ids in self.outputs]
        assert sum(turn.reward for t in made for turn in t.turns) == 2.0**number - 1
        assert [dict(t.metrics) for t in made] == [{"turns": number}, *[{}] * (len(made) - 1)]
        assert {t.reward for t in made} == {0.5}
        return made


def runs(versions: Sequence[int]) -> list[tuple[int, int, int]]:
    """(version, start, stop) of each stretch of equal versions."""
    found, start = [], 0
    for version, members in groupby(versions):
        length = len(list(members))
        found.append((version, start, start + length))
        start += length
    return found


def tools_for(messages: Sequence[Said]) -> list[Said]:
    return [SPEC] if any("tool_calls" in message for message in messages) else []


def played(name: str, messages: list[Said], *, by_messages: bool = False, cut: Sequence[bool] = ()) -> Episode:
    """The whole conversation, sampled canonically; by_messages: as a client has it that keeps its own record."""
    episode, last = Episode(TEMPLATES[name], tools_for(messages)), None
    sent: list[Said] = []
    number = 0
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            is_cut = number < len(cut) and cut[number] and "tool_calls" not in message
            number += 1
            shown = sent if by_messages else messages[:place]
            turn = episode.say(shown, canonical(name, message), message, None if by_messages else last, is_cut=is_cut)
            assert list(turn.prompt.input_ids) == served(episode.template, messages[:place], episode.tools)
            last = turn
        sent.append(as_clients_send(message) if message["role"] == "assistant" else message)
    return episode


every_template = pytest.mark.parametrize("name", TEMPLATES)


@every_template
@settings(max_examples=30, deadline=None)
@given(data=st.data(), by_messages=st.booleans())
def test_the_model_sees_what_a_server_renders_and_each_token_is_trained_once(
    name: str, data: st.DataObject, by_messages: bool
) -> None:
    messages = data.draw(conversations(name))
    episode = played(name, messages, by_messages=by_messages)
    made = episode.check()
    last = episode.dialogue.turns[-1]
    assert any(tuple(t.token_ids) == last.token_ids for t in made)
    has_rewritten = name == "qwen3" and any("reasoning_content" in message for message in messages)
    has_moved = name == "mistral" and bool(episode.tools)
    if not has_rewritten and not has_moved:
        assert len(made) == 1
        whole = served(episode.template, messages, episode.tools, is_open=False)
        if name != "qwen3":  # it shows a thought where the last turn had none
            assert whole[: len(last.token_ids)] == list(last.token_ids)
            assert len(whole) - len(last.token_ids) <= 1  # the line break after the end


@every_template
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_turns_that_were_cut_off_are_ended_as_the_template_ends_them(name: str, data: st.DataObject) -> None:
    messages = data.draw(conversations(name))
    for message in messages:
        if message["role"] == "assistant" and "tool_calls" not in message:
            message["content"] = message["content"] or "x"
    cut = [data.draw(st.booleans()) for _ in messages]
    made = played(name, messages, cut=cut).check()
    for trajectory in made:
        last = trajectory.turns[-1]
        ended = trajectory.token_ids[last.stop - 1] == TEMPLATES[name].tokenizer.eos_token_id
        assert trajectory.is_truncated == (last.stop == len(trajectory.token_ids) and not ended)


def test_conversations_of_a_tokenizer_share_a_template_until_it_or_the_options_change() -> None:
    tokenizer = tokenizer_of("chatml")
    shared = template_of(tokenizer)
    assert template_of(tokenizer, {}) is shared
    assert template_of(tokenizer, {"enable_thinking": False}) is not shared
    assert template_of(tokenizer_of("chatml")) is not shared
    odd = {"pair": (1, 2)}  # JSON would make it a list
    assert template_of(tokenizer, odd) is not template_of(tokenizer, odd)
    tokenizer.add_special_tokens({"eos_token": "<think>"})
    with_another_end = template_of(tokenizer)
    assert with_another_end is not shared
    tokenizer.add_tokens(["<new>"])
    with_another_token = template_of(tokenizer)
    assert with_another_token is not with_another_end
    tokenizer.chat_template = f"{tokenizer.chat_template} "
    assert template_of(tokenizer) is not with_another_token


def test_equal_messages_are_rendered_once_and_messages_of_other_types_apart() -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ m.n }}{% endfor %}"
    template = ChatTemplate(tokenizer)
    numbers: list[Any] = [1, True, 1.0, "1", -0.0, 0.0, np.int64(0), np.float64(0), np.bool_(True), np.int8(1)]
    numbers += [np.zeros(2, np.int32), np.zeros(2, np.float32)]
    for _ in range(2):
        texts = [template.render([{"role": "user", "content": "x", "n": n}]) for n in numbers]
        assert texts == [f"x{n}" for n in numbers]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template, "_text", None)  # which renders
        assert template.render([{"role": "user", "content": "x", "n": 1}]) == "x1"


def test_what_may_change_is_rendered_each_time() -> None:
    said, tokenizer, numbers = [{"role": "user", "content": "x"}], tokenizer_of("chatml"), iter(range(9))
    template = ChatTemplate(tokenizer, {"number": lambda: next(numbers)})
    tokenizer.chat_template = "{{ number() }}"
    assert [template.render(said) for _ in range(3)] == ["0", "1", "2"], "an option that is called"
    template = ChatTemplate(tokenizer)
    tokenizer.chat_template = "{{ [1, 2, 3, 4, 5, 6, 7, 8] | random }}"
    assert len({template.render(said) for _ in range(100)}) > 1
    for source in ("old", "new {{ messages[0].content }}"):
        tokenizer.chat_template = source
        text = template.render(said)
    assert text == "new x"
