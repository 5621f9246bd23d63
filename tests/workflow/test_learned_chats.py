"""Chats to fine-tune on: what is learned is what the model would write, after the prompt that it would get."""

from collections.abc import Sequence
from typing import Any

import pytest
from chat_templates import tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from talk import DEEPSEEK, GLM, QWEN3
from test_families import chats
from transformers import PreTrainedTokenizerFast

from arl.api.errors import DatasetError
from arl.run.finetuning.examples import Demonstration, to_demonstrations, to_preferences

Message = dict[str, Any]


def rendered(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))


def stretches(tokenizer: PreTrainedTokenizerFast, demonstration: Demonstration) -> list[tuple[str, str]]:
    """(everything before it, itself) of each stretch of learned tokens."""
    ids, mask = demonstration
    starts = [i for i in range(1, len(ids)) if mask[i] and not mask[i - 1]]
    ends = [next((j for j in range(i, len(ids)) if not mask[j]), len(ids)) for i in starts]
    return [
        (str(tokenizer.decode(ids[:start])), str(tokenizer.decode(ids[start:end])))
        for start, end in zip(starts, ends, strict=True)
    ]


def said_by(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


TAGGED = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}"
    "{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_the_mask_is_that_of_a_template_which_marks_what_the_model_says(data: st.DataObject) -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = TAGGED
    messages = data.draw(chats("phi4"))
    told: Any = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    ((ids, mask),) = to_demonstrations([{"messages": messages}], tokenizer)
    assert list(ids) == told["input_ids"][: len(ids)]
    assert list(mask) == told["assistant_masks"][: len(ids)]
    assert 1 not in told["assistant_masks"][len(ids) :]


def test_thinking_that_the_template_drops_later_is_learned_where_the_model_has_it_in_view() -> None:
    messages = [
        said_by("user", "a?"),
        said_by("assistant", "b", reasoning_content="hm"),
        said_by("user", "c?"),
        said_by("assistant", "<think>\nso\n</think>\n\nd"),
    ]
    first, second = to_demonstrations([{"messages": messages}], QWEN3)
    assert [said for _, said in stretches(QWEN3, first)] == ["<think>\nhm\n</think>\n\nb<|im_end|>"]
    ((prompt, said),) = stretches(QWEN3, second)
    assert said == "<think>\nso\n</think>\n\nd<|im_end|>"
    assert "hm" not in prompt


@pytest.mark.parametrize("content", ["hm\n</think>\n\nb", "<think>\nhm\n</think>\n\nb"])
def test_a_template_whose_prompt_begins_the_thinking_gets_the_content_word_for_word(content: str) -> None:
    (one,) = to_demonstrations([{"messages": [said_by("user", "a?"), said_by("assistant", content)]}], DEEPSEEK)
    expected = ("<|BOS|><|User|>a?<|Assistant|><think>\n", "hm\n</think>\n\nb<|EOS|>")
    assert stretches(DEEPSEEK, one) == [expected]


def test_a_model_whose_turns_end_with_the_next_ones_beginning_learns_that_beginning() -> None:
    messages = [said_by("user", "a?"), said_by("assistant", "b"), said_by("user", "c?"), said_by("assistant", "d")]
    (one,) = to_demonstrations([{"messages": messages}], GLM)
    assert [said for _, said in stretches(GLM, one)] == ["b<|User|>", "d<|User|>"]
    assert GLM.decode(one[0]) == rendered(GLM, messages) + "<|User|>"


CHATML = tokenizer_of("chatml")
ASKED = "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n"


def test_messages_of_weight_0_and_those_of_a_prompt_are_read_but_not_learned() -> None:
    history = [said_by("user", "a?"), said_by("assistant", "b", weight=0), said_by("user", "c?")]
    of_weights, of_prompt = to_demonstrations(
        [
            {"messages": [*history, said_by("assistant", "d", weight=1)]},
            {"prompt": history, "completion": [said_by("assistant", "d")]},
        ],
        CHATML,
    )
    assert of_weights == of_prompt
    assert [said for _, said in stretches(CHATML, of_prompt)] == ["d<|im_end|>"]


def test_texts_are_a_users_and_an_assistants_or_plain_without_a_template() -> None:
    row = {"prompt": "a?", "completion": "b"}
    (chat,) = to_demonstrations([row], CHATML)
    assert stretches(CHATML, chat) == [(ASKED, "b<|im_end|>")]
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = None
    (plain,) = to_demonstrations([row], tokenizer)
    assert stretches(tokenizer, plain) == [("a?", "b<|im_end|>")]


@pytest.mark.parametrize(("name", "given"), [("chatml", "a"), ("llama3", "<|begin_of_text|>")])
def test_all_of_a_text_is_learned_but_its_first_token(name: str, given: str) -> None:
    tokenizer = tokenizer_of(name)
    (one,) = to_demonstrations([{"text": "abc"}], tokenizer)
    ((before, learned),) = stretches(tokenizer, one)
    assert before == given
    assert before + learned == ("" if given == "a" else given) + "abc" + str(tokenizer.eos_token)


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "deepseek_r1"])
def test_a_text_that_is_rendered_already_begins_and_ends_once(name: str) -> None:
    tokenizer = tokenizer_of(name)
    chat = rendered(tokenizer, [said_by("user", f"a{tokenizer.bos_token or ''}?"), said_by("assistant", "b")])
    (one,) = to_demonstrations([{"text": chat}], tokenizer)
    assert tokenizer.decode(one[0]) == chat
    assert sum(one[1]) == len(one[0]) - 1
    bare = tokenizer_of(name)
    bare.chat_template = None
    prompt, completion = chat[: chat.rindex("b")], chat[chat.rindex("b") :]
    (two,) = to_demonstrations([{"prompt": prompt, "completion": completion}], bare)
    assert stretches(bare, two) == [(prompt, completion)]


def test_a_preference_learns_what_is_said_after_the_prompt_given_or_shared() -> None:
    prompt = [said_by("user", "a?")]
    rows = [
        {"prompt": "a?", "chosen": "b", "rejected": "c"},
        {"prompt": prompt, "chosen": [said_by("assistant", "b")], "rejected": [said_by("assistant", "c")]},
        {"chosen": [*prompt, said_by("assistant", "b")], "rejected": [*prompt, said_by("assistant", "c")]},
    ]
    made = to_preferences(rows, CHATML)
    assert made[0] == made[1] == made[2]
    assert stretches(CHATML, made[0].chosen) == [(ASKED, "b<|im_end|>")]
    assert stretches(CHATML, made[0].rejected) == [(ASKED, "c<|im_end|>")]


def test_answers_of_several_turns_are_one_sequence_even_where_the_template_would_rewrite_them() -> None:
    again = [said_by("assistant", "b", reasoning_content="hm"), said_by("user", "sure?"), said_by("assistant", "d")]
    row = {"prompt": "a?", "chosen": again, "rejected": "c"}
    (made,) = to_preferences([row], QWEN3)
    said = [said for _, said in stretches(QWEN3, made.chosen)]
    assert said == ["<think>\nhm\n</think>\n\nb<|im_end|>", "<think>\n\n</think>\n\nd<|im_end|>"]


def test_a_row_that_is_too_long_is_an_error_or_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "a?", "completion": text} for text in ("b", "b" * 50, "b" * 40)]
    limit = len(to_demonstrations(rows[:1], CHATML)[0][0])
    with pytest.raises(DatasetError, match=rf"row 1 has {limit + 49} tokens, more than max_tokens={limit}; shorten it"):
        to_demonstrations(rows, CHATML, max_tokens=limit)
    assert to_demonstrations(rows, CHATML, max_tokens=limit, too_long="drop") == to_demonstrations(rows[:1], CHATML)
    assert f"left out 2 of 3 rows, which have more than max_tokens={limit} tokens (the longest has" in caplog.text
    with pytest.raises(DatasetError, match="none of the 1 rows is left"):
        to_demonstrations(rows[1:2], CHATML, max_tokens=limit, too_long="drop")


USER = said_by("user", "a?")
ANSWERS = {"prompt": "a?", "chosen": "b", "rejected": "b"}


@pytest.mark.parametrize(
    ("read", "row", "message"),
    [
        (to_demonstrations, {"question": "a?"}, r"row 1: it has `question`, but needs `messages`, or .* with columns="),
        (to_demonstrations, {"messages": [USER]}, "row 1: there is nothing to learn: the assistant says nothing"),
        (
            to_demonstrations,
            {"messages": "a?"},
            "row 1: `messages` is a str; it must be a list of messages, or its JSON$",
        ),
        (to_demonstrations, {"messages": [{"from": "human"}]}, r"`messages` has \{'from': 'human'\} at position 0"),
        (
            to_demonstrations,
            {"prompt": 3, "completion": "b"},
            "`prompt` is a int; .* list of messages, or its JSON, or",
        ),
        (to_preferences, {"prompt": "a?", "chosen": "b"}, "it has `prompt`, `chosen`, but needs `chosen` and"),
        (to_preferences, ANSWERS, "chosen and rejected are the same, so there is nothing to prefer"),
        (to_preferences, {**ANSWERS, "chosen": [USER]}, "nothing to compare: the assistant says nothing"),
        (to_preferences, {"chosen": [USER], "rejected": [{**USER, "content": "b?"}]}, "begin differently"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_with_what_it_needs(read: Any, row: dict[str, Any], message: str) -> None:
    good = {"messages": [USER, said_by("assistant", "b")], "prompt": "a?", "chosen": "b", "rejected": "c"}
    with pytest.raises(DatasetError, match=message):
        read([good, row], CHATML)
