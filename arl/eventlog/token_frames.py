"""Trajectories packed into frames for the log's files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import zstandard

from arl.api.events import KeptTokens, TokenFrame, short, short_names, timestamp
from arl.api.types import Trajectory
from arl.eventlog.segments import TokenRow, new_packer, pack_tokens, packed_frame

_FRAME_TOKENS = 1_000_000
"""A frame of tokens ends after the trajectory that makes it this long."""
_TOKEN_COLUMNS = ("token_ids", "loss_mask", "behavior_logprobs", "versions")


def frames_of(blocks: Iterable[KeptTokens | TokenFrame]) -> Iterator[TokenFrame]:
    """The blocks in frames of some _FRAME_TOKENS tokens, each with the same columns; packed ones as they are.

    Raises an error of msgspec for a role or metric that JSON cannot hold.
    """
    packer, frame = new_packer(), _OpenFrame()
    for block in blocks:
        if isinstance(block, TokenFrame):
            yield block
            continue
        for part in _parts(block):
            if frame.parts and not frame.takes(part):
                yield frame.packed(packer)
                frame = _OpenFrame()
            frame.add(part)
    if frame.parts:
        yield frame.packed(packer)


def _parts(block: KeptTokens) -> Iterator[KeptTokens]:
    """The block in parts of no more tokens than that."""
    if num_tokens(block) <= _FRAME_TOKENS:
        yield block
        return
    start = 0
    for row in block.rows:
        stop = start + row[2].num_trained_tokens
        trained = {name: column[start:stop] for name, column in block.trained.items()}
        yield KeptTokens(rows=[row], trained=trained)
        start = stop


def num_tokens(block: KeptTokens | TokenFrame) -> int:
    if isinstance(block, TokenFrame):
        return block.num_tokens
    return sum(len(trajectory.token_ids) for _, _, trajectory in block.rows)


class _OpenFrame:
    def __init__(self) -> None:
        self.parts: list[KeptTokens] = []
        self._num_tokens = 0

    def takes(self, part: KeptTokens) -> bool:
        is_alike = self.parts[0].trained.keys() == part.trained.keys()
        return is_alike and self._num_tokens + num_tokens(part) <= _FRAME_TOKENS

    def add(self, part: KeptTokens) -> None:
        self.parts.append(part)
        self._num_tokens += num_tokens(part)

    def packed(self, packer: zstandard.ZstdCompressor) -> TokenFrame:
        rows, names = [row for part in self.parts for row in part.rows], self.parts[0].trained
        members = [trajectory for _, _, trajectory in rows]
        columns = {name: np.concatenate([getattr(t, name) for t in members]) for name in _TOKEN_COLUMNS}
        if any(t.token_rewards is not None for t in members):
            zeros = (np.zeros(len(t.token_ids)) if t.token_rewards is None else t.token_rewards for t in members)
            columns["token_rewards"] = np.concatenate([*zeros]).astype(np.float32)
        columns |= {name: np.concatenate([part.trained[name] for part in self.parts]) for name in names}
        raw, t = pack_tokens([_token_row(*row, is_trained=bool(names)) for row in rows], columns), timestamp()
        return TokenFrame(
            rows=[(episode, number) for episode, number, _ in rows],
            num_tokens=self._num_tokens,
            frame=packed_frame(packer, raw, len(rows), t, t),
            images=[*{placed.image: None for one in members for placed in one.images}],
        )


def _token_row(episode: str, number: int, trajectory: Trajectory, *, is_trained: bool) -> TokenRow:
    states = [turn.state and short(turn.state) for turn in trajectory.turns]
    return TokenRow(
        episode=episode,
        number=number,
        tokens=len(trajectory.token_ids),
        trained=trajectory.num_trained_tokens if is_trained else 0,
        role=short(trajectory.role),
        reward=trajectory.reward,
        rewards=short_names(trajectory.rewards),
        metrics=short_names(trajectory.metrics),
        turns=[(turn.start, turn.stop, turn.reward) for turn in trajectory.turns],
        states=states if any(state is not None for state in states) else [],
        temperature=trajectory.temperature,
        is_truncated=trajectory.is_truncated,
        images=[(p.image.digest, p.image.width, p.image.height, p.start, p.stop) for p in trajectory.images],
    )
