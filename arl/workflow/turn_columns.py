"""What turns consist of, as flat arrays: prompts that grow with a line of turns, and the columns of trajectories.

Dialogue and Conversation import it when they need it first, since numpy takes long to import.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from arl.api import token_arrays
from arl.api.errors import TrajectoryError
from arl.api.routed_experts import Routes
from arl.api.sampling_mask import KeptIds
from arl.api.types import MAX_NUMBER, NOT_SAMPLED, ModelResponse

Ids = npt.NDArray[np.int32]
_MOST = (1 << 31) - 1
Columns = tuple[Ids, npt.NDArray[np.float32], Ids]
"""Token ids, logprobs and versions of what the model was given and said in a turn."""
Part = tuple[tuple[int, ...], ModelResponse, bool]
"""A turn: the tokens that the model was given, its response, and whether this is trained."""


def columns_of(given_ids: Sequence[int], response: ModelResponse) -> Columns:
    """Raises TrajectoryError for an answer with other things than token ids, logprobs and versions."""
    ids, n = (*given_ids, *response.output_ids), len(given_ids)
    if not ids:
        return np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32)
    versions = (*(NOT_SAMPLED,) * n, *response.output_versions)
    return (
        token_arrays.integers("token_ids", ids, 0, _MOST, "a token id, an integer of at least 0, below 2^31"),
        token_arrays.logprobs("behavior_logprobs", (*(0.0,) * n, *response.output_logprobs), MAX_NUMBER),
        token_arrays.integers("versions", versions, NOT_SAMPLED, _MOST, "a policy version, below 2^31"),
    )


def joined(
    turns: Sequence[Part], known: dict[tuple[int, int], Columns]
) -> tuple[Ids, npt.NDArray[np.bool_], npt.NDArray[np.float32], Ids]:
    """The token_ids, loss_mask, logprobs and versions of turns. known: by the id() of both parts of a turn; others are
    added. Raises TrajectoryError for an answer with other things than token ids, logprobs and versions."""
    parts: list[Columns] = []
    loss_mask, start = np.zeros(sum(len(given) + len(response.output_ids) for given, response, _ in turns), np.bool_), 0
    for given_ids, response, is_trained in turns:
        key = id(given_ids), id(response)
        if (part := known.get(key)) is None:
            part = known[key] = columns_of(given_ids, response)
        parts.append(part)
        loss_mask[start + len(given_ids) : start + len(part[0])] = is_trained
        start += len(part[0])
    token_ids, logprobs, versions = (np.concatenate(column) for column in zip(*parts, strict=True))
    for column in (token_ids, loss_mask, logprobs, versions):
        column.flags.writeable = False  # so that a trajectory takes it as it is
    return token_ids, loss_mask, logprobs, versions


def kept_ids(turns: Sequence[Part]) -> KeptIds | None:
    """The ids from which each token of the turns was sampled; None if all were sampled from the whole vocabulary."""
    parts: list[KeptIds | int] = []
    for given_ids, response, _ in turns:
        parts += [len(given_ids), len(response.output_ids) if response.kept_ids is None else response.kept_ids]
    return KeptIds.joined(parts)


def routes(turns: Sequence[Part]) -> Routes | None:
    """Which experts computed each token of the turns; None if that is unknown of all.

    A token has the routes of the turn that computed it first. For a sampled token's context that is the turn which
    sampled it; a later turn may have computed it again, by other weights. The last token of a turn was first computed
    by the next turn, and that of the last turn never. Raises TrajectoryError for routes of other tokens.
    """
    parts: list[Routes | int] = []
    start = decided = 0
    for given_ids, response, _ in turns:
        start += len(given_ids) + len(response.output_ids)
        if response.routes is None:
            continue
        if len(response.routes) != start:
            what = f"routes has {len(response.routes)} entries for the {start} tokens of a turn's prompt and answer"
            raise TrajectoryError(f"{what}; they must be equal")
        parts.append(response.routes.take(slice(decided, start - 1)) or start - 1 - decided)
        decided = start - 1
    return Routes.joined([*parts, start - decided])


class TokenLine:
    """Token ids that only ever grow. `view`s of their beginning stay as they are."""

    def __init__(self, ids: Sequence[int] | Ids = ()) -> None:
        self._ids = np.array(ids, np.int32)
        self._length = len(ids)
        self._lock = threading.Lock()

    def view(self, length: int) -> Ids:
        """The first tokens, read-only."""
        seen = self._ids[:length]
        seen.flags.writeable = False
        return seen

    def extended(self, length: int, more: Sequence[int]) -> TokenLine:
        """The line of its first `length` tokens and these: itself, unless others follow there already."""
        new = np.array(more, np.int32)
        with self._lock:
            known = self._ids[length : self._length]
            if not np.array_equal(known, new[: len(known)]):
                return TokenLine(np.concatenate((self._ids[:length], new)))
            new = new[len(known) :]
            end = self._length + len(new)
            if end > len(self._ids):
                grown = np.empty(max(end, 2 * len(self._ids)), np.int32)
                grown[: self._length] = self._ids[: self._length]
                self._ids = grown
            self._ids[self._length : end] = new
            self._length = end
            return self
