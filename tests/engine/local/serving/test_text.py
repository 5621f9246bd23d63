"""From text to tokens and back."""

from __future__ import annotations

from typing import Any

import pytest

from arl.api.types import SamplingParams
from arl.engine.local.job import Job, Text, TextError, TextOptions
from arl.engine.tiny import tiny_tokenizer

SNOWMAN = "a\u2603b"


def finished_or_running(text: str, finish_reason: dict[str, Any] | None, stop: tuple[str, ...] = ()) -> Job:
    output_ids = tiny_tokenizer().encode(text)
    return Job(
        rid="r", input_ids=[1], sampling=SamplingParams(stop=stop), output_ids=output_ids, finish_reason=finish_reason
    )


def test_a_character_is_held_back_until_it_is_whole() -> None:
    text, job = Text(tiny_tokenizer()), finished_or_running(SNOWMAN, None)
    shown = [text.decode(job, num_tokens, TextOptions()) for num_tokens in range(1, 6)]
    assert shown == ["a", "a", "a", "a\u2603", "a\u2603b"]


def test_what_may_begin_a_stop_string_is_held_back_until_it_cannot() -> None:
    text, job = Text(tiny_tokenizer()), finished_or_running("xENx", None, stop=("END",))
    assert [text.decode(job, n, TextOptions()) for n in range(1, 5)] == ["x", "x", "x", "xENx"]


def test_a_finished_text_ends_before_its_stop_string_unless_it_is_to_stay() -> None:
    text, job = Text(tiny_tokenizer()), finished_or_running("xEND", {"type": "stop", "matched": "END"}, ("END",))
    assert text.decode(job, 4, TextOptions()) == "x"
    assert text.decode(job, 4, TextOptions(trim_stop=False)) == "xEND"


def test_a_tokenizer_without_chat_template_says_so() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(TextError, match="has no chat template; send input_ids"):
        Text(tokenizer).chat_prompt([{"role": "user", "content": "hi"}], None, {})


def test_what_a_template_raises_is_told() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('only one message, please') }}"
    with pytest.raises(TextError, match="only one message, please"):
        Text(tokenizer).chat_prompt([{"role": "user", "content": "hi"}], None, {})
