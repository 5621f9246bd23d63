"""The doctor's prompts, of any tokenizer and for any context."""

import pytest

from arl.api.errors import ModelError
from arl.observe.doctor.probes import TEXTS, long_prompt, short_prompts


def of_bytes(text: str) -> list[int]:
    return [*text.encode()]


@pytest.mark.parametrize("length", [-16, 0, 1])
def test_no_prompt_is_empty_however_short_the_context(length: int) -> None:
    assert long_prompt(of_bytes, length)
    assert all(short_prompts(of_bytes, length))


def test_a_long_prompt_has_its_length() -> None:
    assert len(long_prompt(of_bytes, 777)) == 777


def test_a_tokenizer_that_makes_one_token_of_a_text_is_refused() -> None:
    with pytest.raises(ModelError, match="makes 1 tokens of 'Q: What"):
        short_prompts(lambda text: [7] if text == TEXTS[2] else of_bytes(text), 48)
