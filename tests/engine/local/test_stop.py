"""Where a response stops: stop strings over any tokenization, stop tokens, the end of sequence."""

import pytest
from tiny_qwen import EOS, TOKENIZER, make_job, prompt_of, run_all

from arl.engine.local.running_batch import RunningBatch
from arl.engine.local.sampler import StopStrings

AB, CD, BC = (TOKENIZER.convert_tokens_to_ids(piece) for piece in ("ab", "cd", "bc"))


def ids(text: str) -> list[int]:
    """One token for each byte, whatever could be merged."""
    return [token for character in text for token in TOKENIZER.encode(character)]


def first_stop(tokens: list[int], *stop: str) -> tuple[int, str] | None:
    """After how many tokens generation stops, and at which string."""
    finder = StopStrings(TOKENIZER)
    for end in range(1, len(tokens) + 1):
        if (found := finder.find(tokens[:end], stop)) is not None:
            return end, found
    return None


@pytest.mark.parametrize(
    ("tokens", "stop", "wanted"),
    [
        (ids("xxstopyy"), ["stop"], (6, "stop")),
        ([*ids("x"), AB, CD, *ids("y")], ["bc"], (3, "bc")),
        ([*ids("xa"), BC, *ids("dy")], ["abcd"], (4, "abcd")),
        ([AB, AB, CD], ["abab", "abcd"], (2, "abab")),
        (ids("a né b"), ["né"], (5, "né")),
        (ids("one\n\ntwo"), ["\n\n"], (5, "\n\n")),
        ([*ids("x"), EOS], ["<|im_end|>"], (2, "<|im_end|>")),
        (ids("x" * 50 + "0123456789abcdefghij"), ["0123456789abcdefghij"], (70, "0123456789abcdefghij")),
        (ids("stostostosto"), ["stop"], None),
    ],
)
def test_stop_strings_are_found_at_the_token_that_completes_them(
    tokens: list[int], stop: list[str], wanted: tuple[int, str] | None
) -> None:
    assert first_stop(tokens, *stop) == wanted


def test_a_stop_token_at_the_last_allowed_place_is_a_stop(batch: RunningBatch) -> None:
    free = make_job(prompt_of(5, 1), temperature=0, max_new_tokens=1)
    run_all(batch, [free])
    (last,) = free.output_ids
    job = make_job(free.input_ids, temperature=0, max_new_tokens=1, stop_token_ids=(last,), ignore_eos=False)
    run_all(batch, [job])
    assert (job.output_ids, job.finish_reason) == (free.output_ids, {"type": "stop", "matched": last})
