"""`arl.show`: trajectories with their text, in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from arl.api.errors import ConfigError, RunFileError
from arl.api.html import (
    MOST_SHOWN,
    MOST_TOKENS,
    MOST_TOKENS_EACH,
    ShownTokens,
    line_html,
    several_html,
    tokens_html,
    trajectory_html,
)
from arl.api.images import num_drawn
from arl.api.types import Group, Trajectory
from arl.observe.events.records import TokenRecord
from arl.observe.events.run_record import RunRecord
from arl.observe.view.texts import Texts, find_texts


class NotebookPicture:
    """A picture that a notebook draws at the end of a cell."""

    def __init__(self, html: str) -> None:
        self._html = html

    def _repr_html_(self) -> str:
        return self._html


def show(
    record: Trajectory | Group | Sequence[Trajectory] | RunRecord, tokenizer: Any = None, *, episode: str | None = None
) -> NotebookPicture:
    """Show tokens as text, coloured by the version that sampled them. Point at a token to see its numbers.

    record: what an episode returned, or a group; or a run of `arl.read_run`, together with an episode's name, such as
        "13.4" or "e2.0" (the newest of this name). Without `episode`, an overview of the run.
    tokenizer: of `arl.load_tokenizer`; a run has its own. Without one, ids are shown.

    Raises RunFileError if the run has no such episode, or its tokens were deleted; ConfigError for an object that is
    not a tokenizer.
    """
    if isinstance(record, RunRecord):
        return NotebookPicture(record._repr_html_() if episode is None else _episode_html(record, episode))  # pyright: ignore[reportPrivateUsage]
    texts = _texts(tokenizer)
    if isinstance(record, Trajectory):
        pieces = texts.pieces(record.token_ids.tolist(), 0, num_drawn(record.images, MOST_TOKENS)) if texts else None
        return NotebookPicture(trajectory_html(record, pieces))
    if isinstance(record, Group):
        return NotebookPicture(record.html(_pieces(texts, record.trajectories)))
    return NotebookPicture(several_html("Trajectories", {"number": str(len(record))}, record, _pieces(texts, record)))


def _texts(tokenizer: Any) -> Texts | None:
    """transformers' fast tokenizers hold one of tokenizers."""
    if tokenizer is None:
        return None
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(inner, "decode_batch"):
        raise ConfigError(f"show got a {type(tokenizer).__name__} as tokenizer; give one of arl.load_tokenizer(model)")
    return Texts(inner)


def _pieces(texts: Texts | None, trajectories: Sequence[Trajectory]) -> list[list[str]] | None:
    """Of those that are shown."""
    if texts is None:
        return None
    shown = ((one.token_ids.tolist(), num_drawn(one.images, MOST_TOKENS_EACH)) for one in trajectories[:MOST_SHOWN])
    return [texts.pieces(token_ids, 0, most) for token_ids, most in shown]


def _episode_html(run: RunRecord, name: str) -> str:
    episode = next((known for known in reversed(run.episodes) if known.episode == name), None)
    if episode is None:
        raise RunFileError(f"{run.run_dir} has no episode {name}")
    known = {"how": episode.how, "reward": episode.reward, "step": episode.step, "life": episode.life}
    known["error"] = f"{episode.error}: {episode.message}" if episode.error else None
    facts = {name: str(value) for name, value in known.items() if value is not None}
    texts = find_texts(run.run_dir, run.settings)
    parts = [_record_html(one, texts) for one in run.tokens(episode)] or ["<div>its tokens were not kept</div>"]
    return f"<div>{line_html(f'Episode {name}', facts)}{''.join(parts)}</div>"


def _record_html(tokens: TokenRecord, texts: Texts) -> str:
    most = num_drawn(tokens.images, MOST_TOKENS)
    own = {name: column[:most].tolist() for name, column in tokens.columns.items()}
    token_ids, mask, logprobs, versions = (
        own.pop(name) for name in ("token_ids", "loss_mask", "behavior_logprobs", "versions")
    )
    shown = ShownTokens(
        token_ids=token_ids,
        loss_mask=mask,
        versions=versions,
        logprobs=logprobs,
        pieces=texts.pieces(tokens.columns["token_ids"].tolist(), 0, most) if texts.is_known else None,
        more=own,
        images=tokens.images,
    )
    facts = {"tokens": str(tokens.row.tokens), "turns": str(len(tokens.row.turns))}
    return line_html(tokens.row.role, facts) + tokens_html(shown, tokens.row.tokens)
