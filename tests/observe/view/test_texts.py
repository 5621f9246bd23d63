"""Pieces of text, one for each token."""

import random
from pathlib import Path

import pytest
from made_run import byte_tokenizer, tokens_of
from tokenizers import Tokenizer, decoders, models

from arl.observe.view.texts import Texts, find_texts

WORDS = ("▁the", "▁cat", "s", "▁", "!", "▁日")


def sentencepiece_like() -> Tokenizer:
    """As Llama 2's: a word begins with its space, which the first one of a text loses; other characters are bytes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


TOKENIZERS = {"bytes": byte_tokenizer(), "sentencepiece": sentencepiece_like()}


@pytest.mark.parametrize(
    "text", ["plain", "naïve ☃ 日本語", "🦙🦙 llama", "<b>&amp;\x00\x1b[31m\n\t ", "\ufffd is a character"]
)
def test_pieces_join_to_the_text_and_a_character_belongs_to_its_last_token(text: str) -> None:
    pieces = Texts(TOKENIZERS["bytes"]).pieces(tokens_of(text))
    assert "".join(pieces) == text
    ends = [len(text[: i + 1].encode()) - 1 for i in range(len(text))]
    assert "\ufffd" in text or [i for i, piece in enumerate(pieces) if piece] == ends


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_any_tokens_join_to_what_the_tokenizer_makes_of_them(kind: str, seed: int) -> None:
    """Bytes that are no text may be shown in other numbers of replacement characters."""
    tokenizer, draw = TOKENIZERS[kind], random.Random(seed)
    token_ids = [draw.randrange(256, 262) if draw.random() < 0.5 else draw.randrange(65, 90) for _ in range(50)]
    token_ids = [token for token in token_ids if tokenizer.id_to_token(token)]
    assert "".join(Texts(tokenizer).pieces(token_ids)) == tokenizer.decode(token_ids, skip_special_tokens=False)


def test_a_word_keeps_its_leading_space() -> None:
    token_ids = [256 + WORDS.index(word) for word in ("▁the", "▁cat", "s", "▁the", "!")]
    assert Texts(TOKENIZERS["sentencepiece"]).pieces(token_ids) == ["the", " cat", "s", " the", "!"]


@pytest.mark.parametrize("size", [1, 3, 7])
def test_windows_end_to_end_are_the_whole(size: int) -> None:
    token_ids = tokens_of("naïve ☃ 日本語 🦙🦙 " * 4)
    texts = Texts(TOKENIZERS["bytes"])
    windows = [texts.pieces(token_ids, start, start + size) for start in range(0, len(token_ids), size)]
    assert [piece for window in windows for piece in window] == texts.pieces(token_ids)


def test_bytes_that_are_no_text_cost_a_bounded_window() -> None:
    token_ids = tokens_of("\u0080" * 2)[1:2] * 500
    pieces = Texts(TOKENIZERS["bytes"]).pieces(token_ids)
    assert len(pieces) == 500
    assert all(len(piece) <= 8 for piece in pieces)
    assert "".join(pieces).count("\ufffd") == 500


@pytest.mark.parametrize("token", [-1, 1 << 31, 1 << 40, 100_000])
def test_ids_outside_the_vocabulary_have_no_text(token: int) -> None:
    a, b = tokens_of("ab")
    assert Texts(TOKENIZERS["bytes"]).pieces([a, token, b]) == ["a", "", "b"]


def test_the_tokenizer_of_the_log_comes_before_the_models(tmp_path: Path) -> None:
    run_dir, model = tmp_path / "run", tmp_path / "model"
    (run_dir / "events").mkdir(parents=True)
    model.mkdir()
    assert not find_texts(run_dir, {"model": str(model)}).is_known
    TOKENIZERS["bytes"].save(str(model / "tokenizer.json"))
    assert find_texts(run_dir, {"model": str(model)}).whole(tokens_of("a")) == "a"
    TOKENIZERS["sentencepiece"].save(str(run_dir / "events" / "tokenizer.json"))
    assert find_texts(run_dir, {"model": str(model)}).whole([256]) == "the"
