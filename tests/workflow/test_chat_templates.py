"""A tokenizer's template is made once, and equal messages are rendered once, until something changes."""

from itertools import count
from typing import Any

import numpy as np
import pytest
from chat_templates import tokenizer_of

from arl.workflow.chat_template import ChatTemplate, template_of


def test_conversations_of_a_tokenizer_share_a_template_until_it_or_the_options_change() -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = f"{tokenizer.chat_template}{{% if enable_thinking or pair %}}{{% endif %}}"
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
    said, tokenizer, numbers = [{"role": "user", "content": "x"}], tokenizer_of("chatml"), count()
    tokenizer.chat_template = "{{ messages[0].content }}{{ number() }}"
    template = ChatTemplate(tokenizer, {"number": lambda: next(numbers)})
    assert len({template.render(said) for _ in range(3)}) == 3, "an option that is called"
    template = ChatTemplate(tokenizer)
    tokenizer.chat_template = "{{ [1, 2, 3, 4, 5, 6, 7, 8] | random }}"
    assert len({template.render(said) for _ in range(100)}) > 1
    for source in ("old", "new {{ messages[0].content }}"):
        tokenizer.chat_template = source
        text = template.render(said)
    assert text == "new x"
