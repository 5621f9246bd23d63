"""A history that grows is rendered for the cost of what is new, with the text of a whole rendering."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from chat_templates import tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from talk import CALL, QWEN3, RESULT, SPEC, SURE, THOUGHT, Talk, calling, user

from arl.api.errors import ModelError
from arl.workflow.chat_template import ChatTemplate
from arl.workflow.dialogue import Shown
from arl.workflow.rendering.history import History
from arl.workflow.rendering.incremental import Rendering, loop_context
from arl.workflow.rendering.watching import watched


@pytest.fixture(autouse=True, scope="module")
def _short_ones_too() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("arl.workflow.rendering.history._FEW", 1)
        yield


# Any template ---------------------------------------------------------------------------------------------------------

BEGIN = (
    "{% set n = namespace(at=-1, count=0, flag=false, text='', _hidden=1) %}{% set rest = messages[1:] %}"
    "{% set last = messages[-1] %}{% set number = messages | length %}"
    "{% macro show(m) %}({{ m.role }}{{ n.count }}{% if n.at > 2 %}+{% endif %}){% endmacro %}"
    "{% macro told() %}{% for o in messages %}{{ o.role[0] }}{% endfor %}{% endmacro %}"
)
FOLD = (
    "{% set f = namespace(at=-1, count=0, flag=false, text='') %}{% for m in messages %}{% set f.text = m.role %}"
    "{% if m.role == 'user' %}{% set f.at = loop.index0 %}{% set f.flag = 1 %}{% endif %}"
    "{% if m.role == 'tool' %}{% set f.count = f.count + 1 %}{% set f.flag = true %}{% endif %}{% endfor %}"
)
RESET = "{% set n.at = f.at %}{% set n.count = f.count %}{% set n.flag = f.flag %}{% set n.text = f.text %}"
"""Each loop begins with what the messages so far make of the namespace."""
LOOPS = (
    "messages", "messages", "rest", "messages[::-1]", "messages | reverse", "rest[::-1]", "messages[:-1]",
    "messages if m.role == 'user'",
)  # fmt: skip
STATEMENTS = (
    "{{ m.role[0] }}",
    "{{ m.content }}",
    "{{ loop.index0 }}",
    "{{ loop.revindex }}",
    "{{ loop.length }}",
    "{% if loop.first %}F{% endif %}",
    "{% if loop.last %}L{% endif %}",
    "{% if loop.previtem and loop.previtem.role == 'user' %}P{% endif %}",
    "{% if loop.nextitem %}{{ loop.nextitem.content }}{% endif %}",
    "{% if loop.index0 > n.at %}>{% endif %}",
    "{% if n.at >= loop.index0 %}<{% endif %}",
    "{% if n.at == loop.index0 %}={% endif %}",
    "{% if loop.index0 != n.at %}/{% endif %}",
    "{% if n.count < 3 %}few{% endif %}",
    "{% if n.flag == 1 %}one{% endif %}",
    "{% if m.role == 'user' %}{% set n.at = loop.index0 %}{% endif %}",
    "{% set index = (messages | length - 1) - loop.index0 %}{{ index }}",
    "{% if n.at < 0 and m.role == 'user' %}{% set n.at = messages | length - 1 - loop.index0 %}{% endif %}",
    "{% set n.count = n.count + 1 %}{{ n.count }}",
    "{% if m.role == 'tool' %}{% set n.flag = true %}{% elif n.flag %}!{% set n.flag = 1 %}{% endif %}",
    "{{ n.text }}{% set n.text = m.role %}",
    "{{ n.nothing }}{{ n.at is defined }}",
    "{{ (n | string)[:30] }}{% if n._hidden == 1 %}hidden{% endif %}",
    "{% if loop.first %}{% set n.list = [messages, m.content | map('upper')] %}{% endif %}{{ n.list[0] | length }}",
    "{{ n.list[1] | first }}",
    "{{ messages[-1].content }}",
    "{{ messages[loop.index0 - 1].content }}",
    "{{ (messages[loop.index0 + 1] or m).role }}",
    "{% for o in messages[loop.index:] %}{{ o.role[0] }}{% endfor %}",
    "{% for o in rest %}{{ loop.index }}{% endfor %}",
    "{{ messages | length }}{{ 'x' if m in rest }}",
    "{{ messages | map(attribute='role') | join }}",
    "{{ show(m) }}",
    "{{ told() }}",
    "{{ last.content }}",
    "{{ number }}",
    "{% set own = namespace(x=0) %}{% for c in m.content %}{% set own.x = own.x + 1 %}{% endfor %}{{ own.x }}",
    "{% set n.own = namespace(x=n.count) %}{{ n.own.x }}",
    "{{ m.content }}{% if m.content == 'stop' %}{% break %}{% endif %}",
    "{% if m.content == 'skip' %}{% continue %}{% endif %}{{ m.content }}",
    "{% if m.content == 'no' %}{{ raise_exception('no') }}{% endif %}",
    "{% generation %}{{ m.content }}{% endgeneration %}",
)
MESSAGES = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(("user", "assistant", "tool")),
    st.sampled_from(("a", "bé", "stop", "skip", "\ud800", "a" * 9)),
)
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(LOOPS), st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=4), st.booleans()),
    min_size=1,
    max_size=3,
)


TOKENIZER = tokenizer_of("chatml")


def program(loops: Sequence[tuple[str, Sequence[str], bool]]) -> str:
    made = [
        f"{RESET}{{% if {'true' if is_plain else 'number > 3'} %}}{{% for m in {items} %}}{''.join(body)}{{% endfor %}}"
        "|{{ n.count }}{{ n.at }}{% endif %}"
        for items, body, is_plain in loops
    ]
    return BEGIN + FOLD + "".join(made)


# A growing history in which each statement finds what it looks for.
SAID = (
    "user a",
    "assistant b",
    "tool c",
    "user skip",
    "tool d",
    "assistant e",
    "user f",
    "tool stop",
    "user g",
    "tool h",
)
GROWING = [{"role": role, "content": content} for role, content in map(str.split, SAID)]


def outcome(render: Any, *arguments: Any) -> Any:
    try:
        return render(*arguments)
    except ModelError as error:
        return str(error)


def check_growth(source: str, parts: Sequence[tuple[int, list[dict[str, str]]]]) -> None:
    """Each part follows the messages before it, of which the last are dropped first."""
    TOKENIZER.chat_template = source
    template = ChatTemplate(TOKENIZER)
    assert template.watched([]) is not None
    history, messages = History(template, ()), list[dict[str, str]]()
    for num_dropped, new in parts:
        after = max(0, len(messages) - num_dropped)
        last = messages[after - 1] if after else None
        messages[after:] = new
        assert outcome(history.render, new, after, last) == outcome(template.render, messages)


@pytest.mark.parametrize("items", ["messages", "messages[::-1]"])
def test_a_growing_history_has_the_text_of_a_whole_rendering(items: str) -> None:
    loops = [(items, [statement], True) for statement in STATEMENTS]
    check_growth(program(loops), [(0, [message]) for message in GROWING])
    ChatTemplate(TOKENIZER).render(GROWING[:-1])  # takes all but the last one


@settings(max_examples=40, deadline=None)
@given(loops=PROGRAMS, data=st.data())
def test_whatever_a_template_reads_and_writes_a_growing_history_has_its_text(
    loops: Sequence[tuple[str, Sequence[str], bool]], data: st.DataObject
) -> None:
    parts = st.tuples(st.sampled_from((0, 0, 0, 2)), st.lists(MESSAGES, min_size=1, max_size=4))
    check_growth(program(loops), data.draw(st.lists(parts, min_size=2, max_size=6)))


@pytest.mark.parametrize(
    "source",
    [
        "{% set sep = joiner(',') %}{% for m in messages %}{{ sep() }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% if loop.changed(m.role) %}{{ m.role }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ [1, 2] | random }}{% endfor %}",
        "{% for m in messages %}{{ [[1, 2]] | map('random') | first }}{% endfor %}",
        "{% for m in messages %}{{ loop }}{% endfor %}",
        "{{ messages[-1].content }}",
    ],
)
def test_a_template_that_cannot_be_followed_or_has_no_loop_is_rendered_as_a_whole(source: str) -> None:
    assert watched(source, loop_context) is None


def test_an_option_that_the_template_hides_by_a_later_assignment_stays_hidden() -> None:
    TOKENIZER.chat_template = "{% for m in messages %}{{ m.content }}{{ name }}{% endfor %}{% set name = 1 %}"
    template = ChatTemplate(TOKENIZER, {"name": "shown"})
    assert template.watched([]) is not None
    assert History(template, ()).render(GROWING) == template.render(GROWING) == "".join(m["content"] for m in GROWING)


def test_a_template_with_a_mistake_is_a_model_error_for_a_long_history_too() -> None:
    TOKENIZER.chat_template = "{% for m in messages %}{{ m. }}{% endfor %}"
    with pytest.raises(ModelError, match="does not take these messages: expected name or number"):
        History(ChatTemplate(TOKENIZER), ()).render(GROWING)


def test_options_that_are_no_variables_or_may_change_are_for_whole_renderings() -> None:
    for options in ({"chat_template": "{{ messages }}"}, {"names": {1, 2}}, {"now": print}):
        assert ChatTemplate(QWEN3, options).watched([]) is None
    assert ChatTemplate(QWEN3, {"enable_thinking": False}).watched([]) is not None


# What it costs --------------------------------------------------------------------------------------------------------


class Counted(dict[str, Any]):
    """A message that counts how often a template reads it."""

    num_reads = 0

    def __getitem__(self, name: str) -> Any:
        self.num_reads += 1
        return super().__getitem__(name)


FOLDED = (
    "{% set n = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set n.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ m.role }}{{ m.content if loop.index0 > n.last }}{% endfor %}"
)
"""As GLM's and MiniMax's: thinking stays after the last user's message."""


def steps(name: str, number: int) -> list[dict[str, Any]]:
    said = {"role": "assistant", "content": "look"} if name in ("chatml", "alpaca", "deepseek_r1") else calling()
    return [{"role": "user", "content": "?"}, *[said, dict(RESULT)] * number]


@pytest.mark.parametrize("name", ["chatml", "alpaca", "deepseek_r1", "qwen2_5", "qwen3", "llama3", "mistral", "glm"])
def test_a_template_does_not_read_old_messages_again(name: str) -> None:
    tokenizer = tokenizer_of("chatml" if name == "glm" else name)
    template = watched(FOLDED if name == "glm" else str(tokenizer.chat_template), loop_context)
    assert template is not None
    variables = {**tokenizer.special_tokens_map, "tools": [SPEC], "add_generation_prompt": True}
    history = [Counted(message) for message in steps(name, 40)]
    before: Rendering | None = None
    for length in range(3, len(history) + 1, 2):
        before = Rendering(template, history[:length], before)
        before.run(variables)
    reads = [message.num_reads for message in history]
    first = 2 + (name == "llama3")  # of a conversation: each rendering looks there for a system's message
    assert max(reads[first:]) <= 3 * max(reads[first : first + 4])
    assert sum(reads[first:]) <= 2 * len(reads) * max(reads[-4:])


def test_a_rendering_that_differs_from_a_whole_one_is_an_error_and_the_last_of_its_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = str(tokenizer.chat_template) + "{# of this test #}"
    template, run = ChatTemplate(tokenizer), Rendering.run

    def run_wrongly(rendering: Rendering, variables: Any) -> None:
        run(rendering, variables)
        rendering.text += " "

    monkeypatch.setattr(Rendering, "run", run_wrongly)
    with pytest.raises(ModelError, match="differs from that of the whole history"):
        History(template, ()).render([user("?")] * 64)
    assert History(template, ()).render([user("?")] * 64) == template.render([user("?")] * 64)


def test_a_history_that_another_line_has_changed_is_not_continued() -> None:
    history, first, other = History(ChatTemplate(QWEN3), ()), user("one"), user("two")
    history.render([first])
    assert history.render([SURE], 1, other) is None
    assert history.render([SURE], 2, first) is None
    assert history.render([SURE], 1, first) is not None


class KeptMeanwhile(Shown):
    """Another thread keeps its text in a longer one as soon as this thread has looked at it."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "_text":
            self.keep_in(Shown("a longer text"))
        return value

    def keep_in(self, longer: Shown) -> None:
        self.__dict__["_text"] = longer


def test_a_text_is_found_while_another_thread_keeps_it_in_a_longer_one() -> None:
    shown = Shown("a")
    shown.keep_in(KeptMeanwhile("a long"))
    assert shown.num_shared(Shown("a lot")) == 1


# In a dialogue --------------------------------------------------------------------------------------------------------


def test_a_long_dialogue_keeps_one_text_and_finds_where_a_rewritten_history_leaves_it() -> None:
    talk, messages = Talk(QWEN3), [user("begin")]
    for _ in range(40):
        messages = [*talk.say(messages, THOUGHT + CALL, calling(thought="hm")).messages, RESULT]
    last = talk.dialogue.turns[-1]
    assert len(last.path) == 40
    prompt = talk.prompt([*last.messages, SURE], after=last)
    assert prompt.parent is None, "the thinking is gone from all turns"
    texts = {id(text): len(text) for turn in last.path if isinstance(text := turn.prompt.shown.__dict__["_text"], str)}
    assert sum(texts.values()) == last.prompt.shown.length, "not a text for each turn"
    assert len(repr(last)) < 10 * len(talk.text(last)), "not a tree of all turns before it"


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=2, max_size=12))
def test_lines_that_take_turns_have_the_prompts_that_they_would_have_alone(steps: list[tuple[int, bool]]) -> None:
    talk = Talk(QWEN3)
    turns = [talk.say([user("?")], CALL, calling())]
    for number, is_tools in steps:
        after = turns[number % len(turns)]
        prompt = talk.prompt([*after.messages, RESULT if is_tools else SURE], after=after)
        alone = Talk(QWEN3).prompt(prompt.messages)
        assert talk.text(prompt) == talk.text(alone)
        turns.append(talk.answer(prompt, THOUGHT + CALL, calling(thought="hm")))
