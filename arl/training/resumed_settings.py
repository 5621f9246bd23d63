"""Compares the settings of a run that continues with those that trained its checkpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

log = logging.getLogger(__name__)

_HARMLESS = frozenset(
    (
        "model",  # another name of the same model: another model is an error
        "run_dir", "steps", "log", "checkpoint", "stall", "evaluation", "engine", "weights", "endpoint",
        "rollout.num_workers", "rollout.max_concurrent_episodes", "rollout.max_failure_rate",
        "train.device", "train.num_threads", "train.num_ranks", "train.min_ranks", "train.ray_address",
        "train.startup_timeout_s", "train.rank_timeout_s", "train.replace_timeout_s", "train.max_recoveries",
        "train.tensor_parallel", "train.activation_checkpointing", "train.cpu_offload", "train.compile",
        "train.max_tokens_per_microbatch", "train.logprob_chunk_size", "train.share_prefixes",
    )
)  # fmt: skip
"""Settings and sections that change where, how fast and how far a run trains, but not what (except for rounding)."""
_MATTER = frozenset(
    (
        "engine.dtype", "engine.context_length", "engine.arguments", "engine.pause_mode",
        "engine.replay_truncation", "engine.replay_routing",
    )
)  # fmt: skip
"""Within a harmless section, what changes the tokens that are sampled, or how they are trained."""
_NAMED_BY_USERS = frozenset(("reward_weights",))
"""Mappings whose names are no settings."""
_LONGEST = 60


def say_changes(before: object, after: Mapping[str, Any], version: int, say: Callable[[str], None]) -> None:
    """Tell what differs: the log warns of settings that change what is trained, and `say` gets the others.

    before: the settings in the checkpoint of `version`; without any, nothing is told.
    """
    if not isinstance(before, Mapping):
        return
    known = cast("Mapping[str, Any]", before)
    found = [(name, f"{name} {_shown(was)} -> {_shown(now)}") for name, was, now in _changes(known, after)]
    matter = [text for name, text in found if not _is_harmless(name)]
    if matter:
        log.warning(
            "from version %d on, other settings than before change what is trained: %s", version, "; ".join(matter)
        )
    if others := [text for name, text in found if _is_harmless(name)]:
        say(f"other settings than before, which do not change what is trained: {'; '.join(others)}")


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, value before, value after). What only one of two versions of the settings knows is left out."""
    for name in (name for name in after if name in before):
        was, now = before[name], after[name]
        if isinstance(was, Mapping) and isinstance(now, Mapping) and name not in _NAMED_BY_USERS:
            yield from _changes(cast("Mapping[str, Any]", was), cast("Mapping[str, Any]", now), f"{path}{name}.")
        elif was != now:
            yield f"{path}{name}", was, now


def _is_harmless(name: str) -> bool:
    parts = name.split(".")
    return name not in _MATTER and any(".".join(parts[: i + 1]) in _HARMLESS for i in range(len(parts)))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
