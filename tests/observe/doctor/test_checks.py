"""What explains a difference of logprobs, on numbers that are made so; and the doctor's prompts."""

import numpy as np
import pytest

from arl.api.errors import ModelError
from arl.observe.doctor.checks import mislabelled, missing_share
from arl.observe.doctor.visit import TEXTS, long_prompt, short_prompts

RANDOM = np.random.default_rng(0)
BEFORE, UPDATE = -3 * RANDOM.random(180), 0.3 * RANDOM.random(180)


@pytest.mark.parametrize("share", [0.0, 0.04, 0.5, 1.0])
def test_the_share_of_an_update_that_is_missing_is_seen_through_rounding(share: float) -> None:
    told = BEFORE + (1 - share) * UPDATE + RANDOM.normal(scale=0.01, size=180)
    found, error = missing_share([BEFORE], [BEFORE + UPDATE], [told])
    assert found == pytest.approx(share, abs=4 * error)
    assert error < 0.006


def test_labels_that_change_elsewhere_than_the_weights_are_counted() -> None:
    of_old, of_new = np.full(10, -1.0), np.full(10, -2.0)
    told = np.concatenate([of_old[:6], [-1.9, -2.1, -1.7, -2.2]])  # in place: old keys and values remain
    assert mislabelled(of_old, of_new, told, 6, 1e-3) == (0, 0)
    assert mislabelled(of_old, of_new, told, 8, 1e-3) == (2, 0)
    assert mislabelled(of_old, of_new, told, 4, 1e-3) == (0, 2)


def test_a_token_of_new_weights_over_old_keys_that_comes_near_the_old_logprob_is_not_taken_for_an_old_one() -> None:
    of_old, of_new, told = np.array([-0.001, -0.5]), np.array([-0.008, -0.2]), np.array([-0.002, -0.4])
    assert mislabelled(of_old, of_new, told, 0, 1.6e-3) == (0, 0)
    assert mislabelled(of_old, of_new, np.array([-0.001 - 5e-6, -0.4]), 0, 1.6e-3) == (0, 1)


def of_bytes(text: str) -> list[int]:
    return [*text.encode()]


@pytest.mark.parametrize("length", [-16, 0, 1, 777])
def test_a_prompt_has_its_length_and_is_never_empty(length: int) -> None:
    assert len(long_prompt(of_bytes, length)) == max(length, 4)
    assert all(short_prompts(of_bytes, length))


def test_a_tokenizer_that_makes_one_token_of_a_text_is_refused() -> None:
    with pytest.raises(ModelError, match="makes 1 tokens of 'Q: What"):
        short_prompts(lambda text: [7] if text == TEXTS[2] else of_bytes(text), 48)
