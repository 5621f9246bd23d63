"""On the real templates of today's models, whatever is said: the model sees what a server renders, token by token, its
turns are kept where the template keeps them, and what it learns is what the template has it say.
"""

import asyncio
import copy
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scripted_answers import exact, response_of
from template_families import FAMILIES, XML, family_tokenizer, source_of

from arl.api.errors import DatasetError, ModelError
from arl.api.fakes import ScriptedEngine
from arl.api.types import ModelRequest, ModelResponse, SamplingParams, Trajectory
from arl.run.finetuning.examples import to_demonstrations
from arl.run.template_report import report_of
from arl.workflow.chat_template import template_of
from arl.workflow.conversation import Conversation, trajectories
from arl.workflow.dialogue import Dialogue
from arl.workflow.tool_agent import ToolAgentWorkflow
from arl.workflow.tools import Tool

Said = dict[str, Any]
SAMPLING = SamplingParams(max_new_tokens=1000)
TEXT = st.text(alphabet='ab \n\té😀{}"<>/&1.', max_size=8).map(str.strip)
WORDS = TEXT.filter(bool)
ARGUMENTS = st.fixed_dictionaries({"word": WORDS}, optional={"n": st.integers(-9, 9)})


async def look(word: str, n: int = 0) -> str:
    """Look.

    Args:
        word: what for
        n: how often
    """
    raise AssertionError("replaced")


LOOK = Tool.from_function(look)
SPECS: list[Any] = [LOOK.spec]
CALLING = [name for name, family in FAMILIES.items() if family.num_calls]
SHOWING_TOOLS = [name for name in CALLING if "tools" in str(family_tokenizer(name).chat_template)]


every = pytest.mark.parametrize("name", FAMILIES, scope="module")  # the families one by one: facts are kept of few
FEW = settings(max_examples=6, deadline=None, phases=[Phase.generate])


# What is said


def user(text: str) -> Said:
    return {"role": "user", "content": text}


@st.composite
def answers(draw: st.DrawFn, name: str, *, calls: bool = False, place: int = 0) -> Said:
    """A turn of the model. thought: its thinking, which each template has in a field of its own."""
    family = FAMILIES[name]
    content = st.just("") if calls and not family.says_beside else TEXT if family.takes_empty else WORDS
    said: Said = {"role": "assistant", "content": draw(content)}
    if family.thinks and (opens(name) or draw(st.booleans())):
        said["thought"] = draw(WORDS)
    if calls:
        functions = [
            {"name": "look", "arguments": draw(ARGUMENTS)} for _ in range(draw(st.integers(1, family.num_calls)))
        ]
        ids = [
            f"functions.look:{place + i}" if "kimi" in name else f"call{place + i:05}" for i in range(len(functions))
        ]
        said["tool_calls"] = [
            {"type": "function", "id": i, "function": function} for i, function in zip(ids, functions, strict=True)
        ]
    return said


@st.composite
def chats(draw: st.DrawFn, name: str) -> list[Said]:
    messages = [{"role": "system", "content": draw(WORDS)}] * draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        messages += [user(draw(TEXT)), draw(answers(name))]
    return messages


@st.composite
def episodes(draw: st.DrawFn, name: str) -> list[Said]:
    """A question, turns with calls and their results, and an answer."""
    messages, place = [user(draw(TEXT))], 0
    for _ in range(draw(st.integers(1, 3))):
        said = draw(answers(name, calls=True, place=place))
        place += len(said["tool_calls"])
        messages += [said, *(result(call["id"], draw(TEXT)) for call in said["tool_calls"])]
    return [*messages, draw(answers(name))]


def result(call: str, text: str) -> Said:
    return {"role": "tool", "name": "look", "content": text, "tool_call_id": call}


# What templates make of it, as transformers renders them


def shown(name: str, message: Said) -> Said:
    """The message in the form of the family's template."""
    said = dict(message)
    if "tool_calls" in said and name == "deepseek-v3":  # its template concatenates texts
        said["tool_calls"] = with_texts(said["tool_calls"])
    if (thought := said.pop("thought", None)) is None:
        return said
    is_apart = FAMILIES[name].thinks != "content"
    return {**said, FAMILIES[name].thinks: thought if is_apart else f"{thought}\n</think>\n\n{said['content']}"}


def with_texts(calls: Sequence[Said], **layout: Any) -> list[Said]:
    """The calls with their arguments as JSON."""
    functions = [
        {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False, **layout)}
        for call in calls
    ]
    return [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]


def served(name: str, messages: Sequence[Said], tools: Any = None, *, is_open: bool = True) -> str:
    """What a server would make of the messages."""
    told = [shown(name, message) for message in messages]
    tokenizer = family_tokenizer(name)
    return str(tokenizer.apply_chat_template(told, tools=tools, tokenize=False, add_generation_prompt=is_open))


def opens(name: str) -> bool:
    """Whether the prompt opens a thought."""
    return served(name, [user("?")]).rstrip().endswith("<think>")


def sampled(name: str, said: Said, tools: Any = None) -> tuple[str, str]:
    """What the model writes, and what ends its turn: the template's own words for it, after a question."""
    family, asked, thought = FAMILIES[name], [user("?")], said.get("thought", "")
    prompt, whole = served(name, asked, tools), served(name, [*asked, said], tools, is_open=False)
    words = whole.removeprefix(prompt)
    if thought and (thought not in words or words == whole):
        words, end = sampled(name, {key: value for key, value in said.items() if key != "thought"}, tools)
        return family.thought.format(thought) + words.removeprefix("<think></think>"), end
    if words == whole:
        assert name == "deepseek-r1-distill", "it does not show the thought that its prompt opens"
        return said["content"], family.eos
    if name.startswith("glm"):  # whose model ends its turn with what begins the next one
        return words, "<|observation|>" if "tool_calls" in said else "<|user|>"
    tokens = map(str, family_tokenizer(name).added_tokens_decoder.values())
    ends = family.ends or [token for token in tokens if not re.fullmatch(XML, token)]
    end = re.search(rf"({'|'.join(map(re.escape, ends))})+\s*$" if name != "phi3.5" else re.escape("<|end|>"), words)
    assert end, words
    return words[: end.start()], end[0].strip()


def encode(name: str, text: str) -> tuple[int, ...]:
    return tuple(family_tokenizer(name).encode(text, add_special_tokens=False))


def decoded(name: str, ids: Sequence[int]) -> str:
    return str(family_tokenizer(name).decode(list(ids)))


# A model that says it, and what it has seen and learns


class Model(ScriptedEngine):
    """Says these turns, each with a version and a logprob of its own. cut: those that a length limit ends."""

    def __init__(self, name: str, messages: Sequence[Said], tools: Any = None, cut: Sequence[bool] = ()) -> None:
        said = [message for message in messages if message["role"] == "assistant"]
        texts = [sampled(name, message, tools) for message in said]
        self.cut = [
            is_cut and bool(words) for is_cut, (words, _) in zip((*cut, *[False] * len(said)), texts, strict=False)
        ]
        self.texts = [(words, "" if is_cut else end) for is_cut, (words, end) in zip(self.cut, texts, strict=True)]
        self.outputs = [encode(name, words + end) for words, end in self.texts]
        super().__init__(self._say)

    def _say(self, request: ModelRequest) -> ModelResponse:
        number = len(self.requests) - 1
        reason = "length" if self.cut[number] else "stop"
        return response_of(self.outputs[number], version=number, logprob=-float(number), stop_reason=reason)


def check(name: str, messages: Sequence[Said], model: Model, made: Sequence[Trajectory], tools: Any = None) -> None:
    """The model saw what a server renders, after its own tokens where the template keeps them; and each of its tokens
    is trained once, in as few trajectories as the template allows."""
    told: list[tuple[str, tuple[int, ...]]] = []
    parents = set[int]()
    for place in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
        prompt = served(name, messages[:place], tools)
        expected = encode(name, prompt)
        for before in reversed(range(len(told))):
            kept, (words, end) = told[before][0] + model.texts[before][0], model.texts[before]
            if prompt.startswith(kept):
                rest = prompt[len(kept) :]
                written = next((one for one in (end, *FAMILIES[name].ends) if end and rest.startswith(one)), "")
                expected = (*told[before][1], *encode(name, words + end), *encode(name, rest[len(written) :]))
                parents.add(before)
                break
        seen = tuple(model.requests[len(told)].input_ids)
        if seen != expected:
            at = max(
                0, next(i for i, pair in enumerate(zip(seen, (*expected, -1), strict=False)) if len({*pair}) > 1) - 9
            )
            raise AssertionError(
                f"turn {len(told)}: {decoded(name, seen[at:][:60])!r}, not {decoded(name, expected[at:][:60])!r}"
            )
        told.append((prompt, expected))
    assert len(made) == len(told) - len(parents)
    trained = [0] * len(told)
    for one in made:
        for version in {version for version in one.versions.tolist() if version >= 0}:
            (places,) = (one.versions == version).nonzero()
            start, stop = int(places[0]), int(places[-1]) + 1
            assert tuple(one.token_ids[:start]) == tuple(model.requests[version].input_ids)
            assert tuple(one.token_ids[start:stop]) == model.outputs[version]
            assert {*one.behavior_logprobs[start:stop].tolist()} == {-float(version)}
            trained[version] += int(one.loss_mask[start:stop].sum())
        assert not one.loss_mask[one.versions < 0].any()
        assert one.is_truncated == model.cut[int(one.versions.max())]
    assert trained == [len(ids) for ids in model.outputs]


async def with_a_client(name: str, messages: Sequence[Said], model: Model, tools: Any = ()) -> Sequence[Trajectory]:
    """As a program plays it that keeps its own record, and sends it without thinking and with its own JSON."""
    dialogue, sent = Dialogue(template_of(family_tokenizer(name))), list[Said]()
    for message in messages:
        if message["role"] == "assistant":
            prompt = dialogue.prompt(sent, tools)
            response = await model.agenerate(ModelRequest(input_ids=prompt.input_ids, sampling=SAMPLING))
            answer = {key if key != "thought" else "reasoning_content": value for key, value in message.items()}
            dialogue.record(prompt, response, answer)
            message = {key: value for key, value in message.items() if key != "thought"}
            if "tool_calls" in message:
                message |= {
                    "tool_calls": with_texts(message["tool_calls"], indent=1),
                    "content": message["content"] or None,
                }
        sent.append(message)
    return trajectories(dialogue.turns, 1.0)


async def in_a_conversation(name: str, messages: Sequence[Said], model: Model) -> Sequence[Trajectory]:
    chat = Conversation(family_tokenizer(name), [])
    for message in messages:
        if message["role"] == "assistant":
            await chat.agenerate(model, SAMPLING)
        else:
            chat.add(message)
    return chat.trajectories(1.0)


@every
@FEW
@given(data=st.data(), by_client=st.booleans(), cut=st.lists(st.booleans(), max_size=3))
def test_a_chat_is_what_a_server_renders(name: str, data: st.DataObject, by_client: bool, cut: list[bool]) -> None:
    messages = data.draw(chats(name))
    model = Model(name, messages, cut=cut)
    made = asyncio.run((with_a_client if by_client else in_a_conversation)(name, messages, model))
    check(name, messages, model, made)


@pytest.mark.parametrize("name", [n for n in SHOWING_TOOLS if FAMILIES[n].is_read], scope="module")
@FEW
@given(data=st.data(), by_client=st.booleans())
def test_an_episode_with_tools_is_what_a_server_renders(name: str, data: st.DataObject, by_client: bool) -> None:
    messages = data.draw(episodes(name))
    model = Model(name, messages, SPECS)
    results = [message["content"] for message in messages if message["role"] == "tool"]

    async def answered(word: str, n: int = 0) -> str:
        return results.pop(0)

    if by_client:
        made = asyncio.run(with_a_client(name, messages, model, SPECS))
    else:
        workflow = ToolAgentWorkflow(
            tokenizer=family_tokenizer(name), reward=exact, tools=[replace(LOOK, function=answered)], sampling=SAMPLING
        )
        example = {"question": messages[0]["content"], "answer": ""}
        made = asyncio.run(workflow.arun_episode(model, example))
        assert not results, "each call was read"
    check(name, messages, model, made, SPECS)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.thinks], scope="module")
def test_a_reward_reads_thinking_in_think_tags_whatever_the_models_own(name: str) -> None:
    dialogue = Dialogue(template_of(family_tokenizer(name)))
    model = Model(name, [{"role": "assistant", "thought": "1", "content": "a"}])
    turn = dialogue.record(dialogue.prompt([user("?")]), response_of(model.outputs[0]))
    thinking, _, content = turn.text.partition("</think>")
    assert (thinking.strip().removeprefix("<think>").strip(), content.strip()) == ("1", "a")


@pytest.mark.parametrize(
    ("name", "end", "shown"),
    [
        (
            "gpt-oss",
            "<|return|>",
            "<|start|>assistant<|channel|>final<|message|><|end|><|start|>user<|message|>!<|end|>",
        ),
        ("glm4.5", "<|user|>", "<|assistant|>\n<think></think><|user|>\n!"),
        ("mistral-small-4", "</s>", "[/INST]</s>[INST]!"),
        ("qwen3.8", "<|im_end|>", "<|im_start|>assistant\n<think>\n\n</think>\n\n<|im_end|>\n<|im_start|>user\n!"),
    ],
)
def test_a_turn_that_ends_at_once_is_shown_as_one_without_text(name: str, end: str, shown: str) -> None:
    dialogue, asked = Dialogue(template_of(family_tokenizer(name))), [user("?")]
    turn = dialogue.record(dialogue.prompt(asked), response_of(encode(name, end)))
    prompt = dialogue.prompt([*asked, turn.message, user("!")], after=turn)
    assert shown in decoded(name, prompt.input_ids)


@every
@FEW
@given(data=st.data())
def test_no_control_token_comes_from_what_people_and_tools_say(name: str, data: st.DataObject) -> None:
    tokenizer = family_tokenizer(name)
    tags = {i: str(t) for i, t in tokenizer.added_tokens_decoder.items() if t.special or not re.fullmatch(XML, str(t))}
    said = st.lists(st.sampled_from([*tags.values(), "ab", "<|", "|>", "\n", "é"]), min_size=1, max_size=6).map("".join)
    messages = data.draw(episodes(name) if name in CALLING else chats(name))[:-1]
    tools = SPECS if name in SHOWING_TOOLS else None
    forged = [{**m, "content": data.draw(said)} if m["role"] in ("user", "tool") else m for m in messages]
    seen = [
        Dialogue(template_of(tokenizer)).prompt([shown(name, m) for m in told], tools or ()).input_ids
        for told in (messages, forged)
    ]
    plain, found = ([tags[i] for i in ids if i in tags] for ids in seen)
    assert found == plain
    assert decoded(name, seen[1]) == served(name, forged, tools)


@every
@FEW
@given(data=st.data())
def test_a_row_teaches_the_templates_own_words_and_no_answer_within_a_thought(name: str, data: st.DataObject) -> None:
    with_calls = name in CALLING and data.draw(st.booleans())
    messages = data.draw(episodes(name) if with_calls else chats(name))
    tools = SPECS if with_calls and name in SHOWING_TOOLS else None
    if data.draw(st.booleans()):
        messages = [{key: value for key, value in message.items() if key != "thought"} for message in messages]
    row = [{key if key != "thought" else "reasoning_content": v for key, v in m.items()} for m in messages]
    try:
        made = to_demonstrations([{"messages": row, "tools": tools}], family_tokenizer(name))
    except DatasetError:
        assert name == "kimi-k2-thinking", "it shows no thinking before an answer"
        return
    learned = stretches(name, made)
    ends = re.compile("|".join(map(re.escape, FAMILIES[name].ends)) or "(?!)")
    said_after = {ends.sub("", prompt): said for prompt, said in learned}
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(said_after) == len(places)
    for place in places:
        message, said = messages[place], said_after[ends.sub("", served(name, messages[:place], tools))]
        if opens(name) and "thought" not in message:
            thought, _, said = said.partition("</think>")
            assert not thought.strip()
            assert said.lstrip().startswith(message["content"])
        else:
            assert said == "".join(sampled(name, message, tools))


@pytest.mark.parametrize(
    ("name", "file", "learned"),
    [
        ("gemma4", "google-gemma-4-31B-it", "Four.<turn|>"),
        ("qwen3", "Qwen-QwQ-32B", "Four.<|im_end|>"),
        ("deepseek-v3", "deepseek-ai-DeepSeek-V3.2", "Four.<\uff5cend▁of▁sentence\uff5c>"),
        ("nemotron3-nano", "NVIDIA-Nemotron-Nano-v2", "\n</think>\n\nFour.\n"),
    ],
)
def test_an_answer_is_learned_after_the_thought_that_its_prompt_closes_or_opens(
    name: str, file: str, learned: str
) -> None:
    tokenizer = copy.deepcopy(family_tokenizer(name))
    tokenizer.chat_template = source_of(file)
    ((ids, mask, *_),) = to_demonstrations([{"prompt": "2+2?", "completion": "Four."}], tokenizer)
    assert decoded(name, [i for i, m in zip(ids, mask, strict=True) if m]).startswith(learned)


def stretches(name: str, made: Sequence[Any]) -> list[tuple[str, str]]:
    """(everything before it, itself) of each stretch of learned tokens."""
    found = list[tuple[str, str]]()
    for ids, mask, *_ in made:
        for one in re.finditer("1+", "".join(map(str, mask))):
            found.append((decoded(name, ids[: one.start()]), decoded(name, ids[one.start() : one.end()])))
    return found


@pytest.mark.parametrize("ids", [("c1", "c2"), (None, None)])
def test_a_row_on_kimi_has_the_names_of_calls_in_their_ids_and_each_result_beside_its_call(ids: Sequence[Any]) -> None:
    calls = [{"id": i, "type": "function", "function": {"name": f"f{n}", "arguments": {}}} for n, i in enumerate(ids)]
    results = [{"role": "tool", "tool_call_id": i, "content": f"R{n}"} for n, i in enumerate(ids)]
    row = [user("?"), {"role": "assistant", "tool_calls": calls}, *results, {"role": "assistant", "content": "a"}]
    made = to_demonstrations([{"messages": row}], family_tokenizer("kimi-k2"))
    text = decoded("kimi-k2", made[-1][0])
    assert re.findall(r"(functions\.\S+?)(?:<|\n(R\d))", text) == [
        ("functions.f0:0", ""), ("functions.f1:1", ""), ("functions.f0:0", "R0"), ("functions.f1:1", "R1")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("qwen3", {"enable_thinkng": False}, "reads no option 'enable_thinkng'; it reads enable_thinking"),
        ("deepseek-r1-distill", {"enable_thinking": True}, "reads no option 'enable_thinking'; it reads none"),
        ("qwen3", {"enable_thinking": "false"}, "is the text 'false'; give True or False"),
        ("qwen3.5", {"content": "of a macro"}, "reads no option 'content'"),
    ],
)
def test_an_option_that_a_template_does_not_read_is_refused(name: str, options: dict[str, Any], what: str) -> None:
    with pytest.raises(ModelError, match=what):
        Conversation(family_tokenizer(name), [], template_options=options)


@pytest.mark.parametrize("name", ["gpt-oss", "gemma4"])
@pytest.mark.parametrize(("thought", "text"), [({}, ""), ({"reasoning_content": "hm"}, "<think>\nhm\n</think>\n\n")])
def test_the_text_of_a_turn_of_calls_alone_is_its_thinking(name: str, thought: Said, text: str) -> None:
    template = template_of(family_tokenizer(name))
    call = {"type": "function", "id": "call00000", "function": {"name": "look", "arguments": {"word": "ab"}}}
    said = {"role": "assistant", "content": None, "tool_calls": [call], **thought}
    dialogue = Dialogue(template)
    turn = dialogue.record(dialogue.prompt([user("?")], SPECS), response_of(template.encode("x")), said)
    assert (turn.words, turn.text) == ("x", text)


@every
def test_what_a_template_would_leave_out_of_a_row_is_an_error(name: str) -> None:
    say, asked = {"role": "assistant", "content": "Aa"}, user("?")
    call = {"type": "function", "id": "call00000", "function": {"name": "look", "arguments": {"word": "ab"}}}
    marked = {**call, "function": {"name": "MARK", "arguments": {}}}
    for messages in (
        [asked, {**say, "reasoning_content": "MARK"}],
        [asked, {**say, "content": "<think>\nMARK\n</think>\n\nAa"}],
        [asked, {**say, "content": "MARK <think>\nb\n</think>\n\nAa"}],
        [{"role": "developer", "content": "MARK"}, asked, say],
        [{"role": "critic", "content": "MARK"}, asked, say],
        [asked, say, {"role": "system", "content": "MARK"}, asked, say],
        [asked, say, result("call00000", "MARK"), say],
        [asked, {**say, "tool_calls": [call]}, result("call00000", "MARK"), say],
        [asked, {**say, "content": "MARK", "tool_calls": [call]}],
        [asked, {**say, "content": None, "tool_calls": [marked]}],
        [asked, {**say, "content": None, "tool_calls": [call, marked]}],
    ):
        try:
            made = to_demonstrations([{"messages": messages}], family_tokenizer(name))
        except DatasetError:
            continue
        text = decoded(name, made[-1][0])
        assert "MARK" in text, messages
        assert "None" not in text, messages


@pytest.mark.parametrize(
    ("name", "written", "instead", "named", "answer"),
    [
        ("qwen3", "message.reasoning_content", "message.thoughts", "thinking", "in the content"),  # a dropped field
        ("qwen2.5", "message.tool_calls", "message.calls", "calls", "-"),
        ("qwen2.5", r'"arguments": ', r'"args": ', "calls round trip", "no: "),  # other separators
        ("llama3.1", "id|>\\n\\n' }}\n{%- endif %}\n", "id|>\\n' }}\n{%- endif %}\n", "answers begin with", r"'\n'"),
        ("qwen2.5", r"{{- '<|im_start|>assistant\n' }}", r"{{- '<|im_start|>assistant: ' }}", "SFT mask", "no: "),
        ("qwen3.5", "enable_thinking is false", "enable_thinking is none or true", "prompt opens", "-"),  # defaults
        ("nemotron3-nano", "is defined else True", "is defined else False", "prompt opens", "-"),
        ("granite4", "if add_generation_prompt", "if false", "prompt is the template's own", "no: add_generation"),
        ("lfm2", 'message.get("content")', 'message["content"] ~ ""', "content beside calls", '""'),  # None in print
    ],
)  # fmt: skip
def test_the_command_names_what_is_changed_in_a_template(
    name: str, written: str, instead: str, named: str, answer: str
) -> None:
    tokenizer = copy.deepcopy(family_tokenizer(name))
    before = report_of(tokenizer)
    assert written in str(tokenizer.chat_template)
    tokenizer.chat_template = str(tokenizer.chat_template).replace(written, instead)
    after = report_of(tokenizer)
    found = {**after.facts, **after.checks}[named]
    assert found == answer or (answer[:3] == "no:" and found.startswith(answer))
    assert found != {**before.facts, **before.checks}[named]


PAGE, TABLE = (
    Path(__file__).parents[2] / "docs" / "templates.md",
    re.compile(r"(?<=<!-- families -->\n).*(?=<!-- /f)", re.S),
)
FACTS = ("calls", "thinking", "prompt opens", "answers begin with", "turn ends", "answers come back as")
CHECKS = ("prompt is the template's own", "history extends", "calls round trip", "SFT mask")


def table() -> str:
    """The answers of the command. `PYTHONPATH=tests python tests/workflow/test_families.py` writes them."""
    lines = [f"| family | {' | '.join((*FACTS, *CHECKS))} |", "|---" * (1 + len(FACTS) + len(CHECKS)) + "|"]
    for name in FAMILIES:
        report = report_of(family_tokenizer(name))
        texts = [report.facts[fact] for fact in FACTS]
        shown = [f"`{text}`".replace("|", r"\|") if re.search(r"[<\[\\']", text) else text for text in texts]
        lines.append(
            f"| {' | '.join([name, *shown, *(report.checks[check].split()[0].strip(':') for check in CHECKS)])} |"
        )
    return "\n".join(lines) + "\n"


@pytest.mark.runs
def test_the_page_has_the_answers_of_the_command() -> None:
    assert TABLE.findall(PAGE.read_text()) == [table()]


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
