"""What explains a difference of logprobs, on numbers that are made so."""

import numpy as np
import pytest

from arl.observe.doctor.evidence import (
    first_far,
    kept_mass,
    mislabelled,
    missing_tail,
    reported_temperature,
    sampled_temperature,
)
from arl.observe.doctor.reference_model import chosen

RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.normal(size=(600, 80)).astype(np.float32) * 2


def drawn(temperature: float, mask: np.ndarray | None = None) -> list[int]:
    """A token of each row, by Gumbel's trick."""
    scaled = LOGITS / temperature + RANDOM.gumbel(size=LOGITS.shape)
    return (scaled if mask is None else np.where(mask, scaled, -np.inf)).argmax(-1).tolist()


def test_chosen_is_the_log_softmax() -> None:
    tokens = drawn(1.0)
    probs = np.exp(LOGITS.astype(np.float64) / 0.7)
    expected = np.log(probs / probs.sum(-1, keepdims=True))[np.arange(len(LOGITS)), tokens]
    np.testing.assert_allclose(chosen(LOGITS, tokens, 0.7), expected, atol=1e-9)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_the_temperature_of_reported_logprobs_is_found(temperature: float) -> None:
    tokens = drawn(1.0)
    found, left = reported_temperature(LOGITS, tokens, chosen(LOGITS, tokens, temperature))
    assert found == pytest.approx(temperature, rel=1e-3)
    assert left < 1e-3


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_samples_are_likeliest_at_the_temperature_that_they_are_drawn_at(temperature: float) -> None:
    tokens = drawn(temperature)
    found, surprise = sampled_temperature(LOGITS, tokens, temperature)
    assert found == pytest.approx(temperature, rel=0.1)
    assert surprise < 15
    assert sampled_temperature(LOGITS, tokens, temperature * 1.6)[1] > 40


def test_samples_of_the_whole_distribution_miss_no_tail() -> None:
    assert min(missing_tail(LOGITS, drawn(1.0), 1.0).chance for _ in range(20)) > 1e-4


def test_a_tail_that_is_never_sampled_is_found_with_its_limit() -> None:
    ranks = (-LOGITS).argsort(-1).argsort(-1)
    top_k = missing_tail(LOGITS, drawn(1.0, ranks < 20), 1.0)
    assert (top_k.kind, top_k.value) == ("top_k", 20)
    assert top_k.chance < 1e-9
    probs = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    above = np.array([[row[row > p].sum() for p in row] for row in probs])
    top_p = missing_tail(LOGITS, drawn(1.0, above <= 0.9), 1.0)
    assert top_p.kind == "top_p"
    assert top_p.value == pytest.approx(0.9, abs=0.01)


def test_renormalised_logprobs_tell_what_was_kept() -> None:
    of_all = np.array([-1.0, -2.0, -0.5])
    assert kept_mass(of_all - np.log(0.8), of_all) == pytest.approx(0.8)
    assert kept_mass(of_all, of_all) is None
    assert kept_mass(of_all + np.array([0.2, -0.2, 0.2]), of_all) is None


def test_the_place_from_which_rows_differ_is_found() -> None:
    ours = np.zeros(100)
    assert first_far(ours, ours + 1e-6, 1e-3) is None
    assert first_far(np.where(np.arange(100) < 60, ours, 0.5), ours, 1e-3) == 60
    assert first_far(np.where(np.arange(100) < 95, ours, 0.5), ours, 1e-3) == 95


def test_labels_that_change_where_the_weights_do_not_are_counted() -> None:
    """Ten tokens, the first six of the old weights; behind them keys and values are of neither."""
    of_old, of_new = np.zeros(10), np.full(10, 0.5)
    told = np.array([0.0] * 6 + [0.4] * 4)
    assert mislabelled(of_old, of_new, told, 6, 1e-3) == (0, 0)
    assert mislabelled(of_old, of_new, told, 8, 1e-3) == (2, 0)
    assert mislabelled(of_old, of_new, told, 4, 1e-3) == (0, 2)


def test_a_token_of_new_weights_over_old_keys_that_comes_near_the_old_logprob_is_not_taken_for_an_old_one() -> None:
    of_old, of_new, told = np.array([-0.001, -0.5]), np.array([-0.008, -0.2]), np.array([-0.002, -0.4])
    assert mislabelled(of_old, of_new, told, 0, 1.6e-3) == (0, 0)
    assert mislabelled(of_old, of_new, np.array([-0.001 - 5e-6, -0.4]), 0, 1.6e-3) == (0, 1)
