"""Searches the text of all episodes, a slice at a time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator

from arl.api.errors import RunFileError
from arl.observe.events.records import EpisodeRecord
from arl.observe.events.run_record import RunRecord
from arl.observe.view.texts import Texts

_Frame = tuple[int, int, int]
"""Life, segment, offset."""


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
    def num_searched(self) -> int:
        return len(self._seen)

    @property
    def num_wanted(self) -> int:
        """Episodes that can be searched."""
        return sum(_is_over(episode) for episode in self._run.episodes)

    def scan(self, seconds: float) -> bool:
        """Search for a moment; returns whether there is more to see."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if next(self._rest, True):
                new = [episode for episode in reversed(self._run.episodes) if self._is_new(episode)]
                if not new:
                    return False
                self._rest = self._look_at(new)
        return True

    def _look_at(self, new: list[EpisodeRecord]) -> Iterator[None]:
        """Yields after every few episodes."""
        frames: defaultdict[_Frame, list[EpisodeRecord]] = defaultdict(list)
        for number, episode in enumerate(new):
            if self._holds(self._about(episode)):
                self.found.add(episode.index)
            for life, segment, offset, _ in episode.places.values():
                frames[life, segment, offset].append(episode)
            if not episode.places:
                self._seen[episode.index] = 0
            if number % 2000 == 1999:
                yield
        for frame, episodes in frames.items():
            yield from self._look_into(frame, {e.episode: e for e in episodes})

    def _look_into(self, frame: _Frame, episodes: dict[str, EpisodeRecord]) -> Iterator[None]:
        try:
            batch = self._run.files.tokens(*frame)
            names = batch.column("episode").to_pylist()
            for first in range(0, len(names), 64):
                token_ids = batch.column("token_ids").slice(first, 64).to_pylist()
                for name, text in zip(names[first : first + 64], self._texts.many(token_ids), strict=True):
                    if (episode := episodes.get(name)) and self._holds(text):
                        self.found.add(episode.index)
                yield
        except (RunFileError, LookupError, TypeError):
            pass  # its tokens were deleted or are damaged; the episode's page says so
        for episode in episodes.values():
            self._seen[episode.index] = len(episode.places)

    def _is_new(self, episode: EpisodeRecord) -> bool:
        return _is_over(episode) and self._seen.get(episode.index) != len(episode.places)

    def _holds(self, text: str) -> bool:
        return self._text in text.casefold()

    def _about(self, episode: EpisodeRecord) -> str:
        example = map(str, episode.example.values())
        return "\n".join((*example, episode.error, episode.message))


def _is_over(episode: EpisodeRecord) -> bool:
    return episode.ended is not None or episode.how == "lost"
