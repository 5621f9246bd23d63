"""The text of tokens, by the run's own tokenizer; and the search for text in all episodes, a slice at a time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arl.api.errors import RunFileError
from arl.observe.events.records import EpisodeRecord
from arl.observe.events.run_record import RunRecord

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTEXT = 8
"""Tokens before a window that are decoded with it: its first character may begin there."""
_LONGEST = 8
"""A character has 4 bytes at most; bytes that are none after this many tokens are shown as they are."""
_BROKEN = "\ufffd"


class Texts:
    """Decodes tokens. Without a tokenizer, a token's text is its id."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    @property
    def is_known(self) -> bool:
        return self._tokenizer is not None

    def whole(self, token_ids: Sequence[int]) -> str:
        return self.many([token_ids])[0]

    def said(self, token_ids: Sequence[int]) -> str:
        """The text of a turn, without the special tokens that end it."""
        added = self._tokenizer.get_added_tokens_decoder() if self._tokenizer else {}
        length = len(token_ids)
        while length and (end := added.get(token_ids[length - 1])) and end.special:
            length -= 1
        return self.whole(token_ids[:length])

    def many(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The text of each row. Ids outside the vocabulary have none."""
        if self._tokenizer is None:
            return [" ".join(map(str, row)) for row in rows]
        valid = [[token for token in row if 0 <= token < 1 << 32] for row in rows]  # it takes uint32 alone
        return self._tokenizer.decode_batch(valid, skip_special_tokens=False)

    def pieces(self, token_ids: Sequence[int], start: int = 0, stop: int | None = None) -> list[str]:
        """One string for each of the tokens start <= index < stop; joined, they are the text.

        A character that several tokens make belongs to the last of them.
        """
        stop = len(token_ids) if stop is None else min(stop, len(token_ids))
        if self._tokenizer is None:
            return [f"{token} " for token in token_ids[start:stop]]
        begin = max(0, start - _CONTEXT)
        return self._pieces(token_ids[begin : stop + _LONGEST])[start - begin : stop - begin]

    def _pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Decode each token behind a few others: some tokenizers write a token differently at the beginning."""
        pieces: list[str] = []
        first = told = 0
        known = ""
        for end in range(1, len(token_ids) + 1):
            text = self.whole(token_ids[first:end])
            if text.endswith(_BROKEN) and end - told < _LONGEST and end < len(token_ids):
                pieces.append("")
                continue
            pieces.append(text[len(known) :])
            first, told = told, end
            known = self.whole(token_ids[first:end])
        return pieces


def find_texts(run_dir: Path, settings: dict[str, Any]) -> Texts:
    """With the tokenizer that the run left in its log, or its model's."""
    model = settings.get("model")
    for place in (run_dir / "events", *([Path(model)] if isinstance(model, str) else []), run_dir / "model"):
        try:
            if (file := place / "tokenizer.json").is_file():
                from tokenizers import Tokenizer

                return Texts(Tokenizer.from_file(str(file)))
        except Exception:  # noqa: BLE001, S110 - tokenizers raises nothing narrower for a file that is none
            pass
    return Texts(None)


class TextSearch:
    """Episodes whose tokens, example or error hold `text`, upper or lower case, newest first.

    Each `scan` looks at some of those that it has not seen; episodes that come or end later are seen later.
    """

    def __init__(self, run: RunRecord, texts: Texts, text: str) -> None:
        self._run = run
        self._texts = texts
        self._text = text.casefold()
        self._seen: dict[int, int] = {}
        """Index of an episode -> how many of its trajectories were looked at."""
        self.found: set[int] = set()
        """Indices."""
        self._rest: Iterator[None] = iter(())

    @property
    def progress(self) -> dict[str, int]:
        """How many episodes were searched, of those that can be."""
        return {"done": len(self._seen), "total": sum(_is_over(episode) for episode in self._run.episodes)}

    def scan(self, seconds: float) -> bool:
        """Search for a moment; returns whether there is more to see."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if next(self._rest, True):
                seen, last_first = self._seen, reversed(self._run.episodes)
                new = [e for e in last_first if _is_over(e) and seen.get(e.index) != len(e.places)]
                if not new:
                    return False
                self._rest = self._look_at(new)
        return True

    def _look_at(self, new: list[EpisodeRecord]) -> Iterator[None]:
        """Yields after every few episodes."""
        frames: defaultdict[tuple[int, int, int], dict[str, EpisodeRecord]] = defaultdict(dict)
        for number, episode in enumerate(new):
            about = "\n".join((*map(str, episode.example.values()), episode.error, episode.message))
            if self._text in about.casefold():
                self.found.add(episode.index)
            for life, segment, offset, _ in episode.places.values():
                frames[life, segment, offset][episode.episode] = episode
            if not episode.places:
                self._seen[episode.index] = 0
            if number % 2000 == 1999:
                yield
        for frame, episodes in frames.items():
            try:
                batch = self._run.files.tokens(*frame)
                names = batch.column("episode").to_pylist()
                for first in range(0, len(names), 64):
                    token_ids = batch.column("token_ids").slice(first, 64).to_pylist()
                    for name, text in zip(names[first : first + 64], self._texts.many(token_ids), strict=True):
                        if (episode := episodes.get(name)) and self._text in text.casefold():
                            self.found.add(episode.index)
                    yield
            except (RunFileError, LookupError, TypeError):
                pass  # its tokens were deleted or are damaged; the episode's page says so
            for episode in episodes.values():
                self._seen[episode.index] = len(episode.places)


def _is_over(episode: EpisodeRecord) -> bool:
    return episode.ended is not None or episode.how == "lost"
