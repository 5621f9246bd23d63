"""fitted: what the parts of a run cost, from the event log of a few trained steps.

turns, pauses --> server_fit.py --> DecodeCosts, PrefillCosts       batches, metrics.jsonl --> TrainerCosts
snapshots, loads --> PublishCosts      CPU times --> ControllerCosts      episodes --> measured_episodes.py --> Workload

The log shows what happened, on a machine that other programs may have used, too. Where it has the CPU times of
processes, their clocks are used: `Costs` wants the seconds of a process that computes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from arl.api import events
from arl.api.errors import RunFileError
from arl.api.events import TurnEnded
from arl.eventlog.run_record import read_run
from arl.plan.costs import (
    ControllerCosts,
    Costs,
    Deployment,
    Measured,
    MemoryCosts,
    PublishCosts,
    Range,
    SharedCores,
    TrainerCosts,
)
from arl.plan.least_squares import robust
from arl.plan.measured_episodes import forwarded_share, measured_workload
from arl.plan.model_memory import model_memory
from arl.plan.run_life import RunLife
from arl.plan.server_fit import NARROW, ServerFit

_SHORT = 0.25
"""The quantile of load times that is taken as the time of a load: this share of loads is shorter."""


def fitted(run_dir: str | Path) -> Costs:
    """Fit the costs of the run in `run_dir`, by the life that trained most steps.

    `Costs.measured` says what was seen, and in `notes` what could not be told apart, and how well the costs explain the
    run. Raises RunFileError if there is no run, if it has no trained step or no episode that ended, if servers and
    trainer took turns, or if it trained several policies.
    """
    seen = RunLife.of(read_run(run_dir))
    if seen.setting("engine", "colocated"):
        raise RunFileError(f"in {run_dir} servers and trainer took turns (engine.colocated), which is not simulated")
    if names := seen.setting("policies"):
        raise RunFileError(f"{run_dir} trained several policies ({', '.join(names)}); a plan is for a run of one")
    workload = measured_workload(seen.run, seen.number, seen.calls, forwarded_share(seen.steps))
    if workload is None or not seen.servers:
        raise RunFileError(f"{run_dir} has no episode that ended and was answered by a server, to learn costs from")
    servers, notes = ServerFit(seen), list[str]()
    decode, prefill, latency_s = servers.costs()
    trainer, controller = _trainer(seen, notes), _controller(seen, latency_s, notes)
    return Costs(
        decode=decode,
        prefill=prefill,
        trainer=trainer,
        publish=_publish(seen),
        controller=controller,
        shared=_shared(seen),
        workload=workload,
        memory=_memory(seen, notes),
        deployment=_deployment(seen),
        measured=_measured(seen, servers, [*servers.notes, *notes]),
        source=str(run_dir),
    )


def _trainer(seen: RunLife, notes: list[str]) -> TrainerCosts:
    """Raises RunFileError if nothing says how many tokens the steps forwarded."""
    num_ranks = int(seen.setting("train", "num_ranks", default=1))
    forwarded = {int(step["version"]): float(step.get("forwarded_tokens", 0.0)) for step in seen.steps}
    batches = [batch for batch in seen.batches if forwarded.get(batch.version)]
    if not batches:
        raise RunFileError(f"no metrics.jsonl in {seen.run.run_dir} says how many tokens its steps forwarded")
    warm = [batch for batch in batches if batch.version > seen.first]
    if not warm:
        notes.append("the only step is the first, which also warms up: the trainer's costs are too high; train five")
    batches = warm or batches
    seconds = np.array([_step_s(seen, batch) for batch in batches])
    tokens = np.array([forwarded[batch.version] for batch in batches]) / num_ranks
    snapshots = [record.seconds for record in seen.of_kind(events.SnapshotTaken) if record.version >= seen.first]
    snapshot_s = median(snapshots) if snapshots else 0.0
    if len(batches) >= 3 and tokens.std() / tokens.mean() >= NARROW:
        (base_s, per_token_s), error = robust(np.array([np.ones(len(tokens)), tokens]).T, seconds, (1, 0))
        if per_token_s > 0:
            notes.append(f"steps took {100 * error:.0f} % more or less than the trainer's costs say (mean)")
            return TrainerCosts(base_s=float(base_s), per_token_s=float(per_token_s), snapshot_s=snapshot_s)
    notes.append(
        f"all steps forwarded about {num_ranks * tokens.mean():,.0f} tokens: what a step costs whatever its batch "
        "could not be told; all of it is taken for the tokens'"
    )
    return TrainerCosts(per_token_s=float(np.median(seconds / tokens)), snapshot_s=snapshot_s)


def _step_s(seen: RunLife, batch: events.BatchTrained) -> float:
    """Seconds of a step; where one thread of one process trains on the CPU, those in which it computed."""
    is_alone = seen.setting("train", "num_ranks", default=1) == seen.num_threads("train") == 1
    if not (is_alone and seen.trains_on_cpu and batch.cpu_s):
        return batch.seconds
    return min(batch.cpu_s, batch.seconds)


def _publish(seen: RunLife) -> PublishCosts:
    """transfer_s: from the snapshot to the first pause. load_s: a short pause, as other processes make some longer."""
    snapshots = [record.t for record in seen.of_kind(events.SnapshotTaken) if record.version >= seen.first]
    pauses = sorted(span for server in seen.servers for span in seen.pauses(server))
    firsts = [next((begin for begin, _ in pauses if begin >= t), None) for t in snapshots]
    transfers = [begin - t for begin, t in zip(firsts, snapshots, strict=True) if begin is not None]
    loads = [end - begin for begin, end in pauses if snapshots and begin >= snapshots[0]]
    load_s = float(np.quantile(loads, _SHORT)) if loads else 0.0
    return PublishCosts(transfer_s=median(transfers) if transfers else 0.0, load_s=load_s)


def _controller(seen: RunLife, latency_s: float, notes: list[str]) -> ControllerCosts:
    """CPU seconds a request and an episode: how many there were between two readings of the controller's CPU time.

    A beginning and an end are half of one each. What comes before the first batch is left out: it warms up.
    """
    if (used := seen.cpu("")) is None:
        notes.append("the log has no CPU times: the controller is taken for free")
        return ControllerCosts(latency_s=latency_s)
    taken = [record.t for record in seen.of_kind(events.BatchTaken)]
    edges = np.unique(np.clip(used[0], min([*taken, seen.batches[0].t]), seen.batches[-1].t))
    turns = [call for call in seen.calls if isinstance(call, TurnEnded)]
    episodes = [one for one in seen.run.episodes if one.life == seen.number]
    ends = (
        [t for turn in turns for t in (turn.t - turn.seconds, turn.t)],
        [t for one in episodes for t in (one.began, one.ended) if t is not None],
    )
    spent = np.diff(np.interp(edges, *used))
    counts = np.array([np.diff(np.searchsorted(sorted(times), edges)) for times in ends]) / 2
    is_known = (counts.sum(0) > 0) & (spent > 0)
    if not is_known.any():
        notes.append("the run was too short to tell what the controller costs: it is taken for free")
    per_unit = robust(counts[:, is_known].T, spent[is_known], (0, 1))[0] if is_known.any() else np.zeros(2)
    said_s = float(counts.sum(1) @ per_unit)
    per_request_s, per_episode_s = map(float, per_unit * (float(spent.sum()) / said_s if said_s else 0.0))
    return ControllerCosts(per_request_s=per_request_s, per_episode_s=per_episode_s, latency_s=latency_s)


def _memory(seen: RunLife, notes: list[str]) -> MemoryCosts:
    beside = [role for role in ("critic", "reward_model") if seen.setting("algorithm", role) is not None]
    has_reference = seen.setting("algorithm", "kl", "coefficient", default=0) > 0
    has_reference |= seen.setting("algorithm", "loss", "kind") in ("dpo", "kto")
    try:
        memory = model_memory(
            Path(seen.setting("model", default="")),
            served_as=seen.setting("engine", "dtype"),
            trains_adapter=seen.setting("train", "lora") is not None,
            freezes_tower=bool(seen.setting("train", "freeze_vision_tower")),
            num_models=1 + len(beside),
            num_references=int(has_reference) + ("reward_model" in beside),
        )
    except (OSError, ValueError) as error:
        notes.append(f"memory is not told, as the model's files are not here: {error}")
        return MemoryCosts()
    notes.append("memory is that of weights, optimizer, keys and values; activations come on top")
    return memory


def _shared(seen: RunLife) -> SharedCores | None:
    if not seen.began.cores:
        return None
    return SharedCores(
        cores=seen.began.cores,
        rank=seen.num_threads("train") if seen.trains_on_cpu else 0,
        server=seen.num_threads("engine") if seen.serves_on_cpu else 0,
    )


def _deployment(seen: RunLife) -> Deployment:
    """The settings of these names, of whatever section."""
    sections = [seen.setting(name, default={}) for name in ("rollout", "engine", "train")]
    known = {name: value for section in sections for name, value in section.items() if value is not None}
    values = {name: value for name, value in known.items() if name in Deployment.__struct_fields__}
    values["num_servers"] = max(len(seen.servers), 1)
    values["drop_equal_rewards"] = bool(seen.setting("algorithm", "dynamic_sampling", default=False))
    return msgspec.convert(values, Deployment)


def _measured(seen: RunLife, servers: ServerFit, notes: Sequence[str]) -> Measured:
    running = servers.running
    num_servers, num_ranks = float(len(seen.servers)), float(seen.setting("train", "num_ranks", default=1))
    return Measured(
        num_servers=(num_servers, num_servers),
        num_ranks=(num_ranks, num_ranks),
        running_requests=_range(running[running > 0]),
        context_tokens=(0.0, servers.most_context),
        step_tokens=_range([float(step["forwarded_tokens"]) for step in seen.steps if "forwarded_tokens" in step]),
        notes=tuple(notes),
    )


def _range(values: Any) -> Range | None:
    return (float(min(values)), float(max(values))) if len(values) else None
