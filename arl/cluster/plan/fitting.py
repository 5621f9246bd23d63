"""fitted: what the parts of a run cost, by least squares over the event log of a few trained steps.

Where the log has the CPU times of processes, these are taken: `Costs` wants the seconds of a process that computes
alone, and other programs may have used the machine.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from arl.api import events
from arl.api.errors import RunFileError
from arl.api.events import TurnEnded
from arl.cluster.plan.costs import (
    ControllerCosts,
    Costs,
    DecodeCosts,
    Deployment,
    Measured,
    MeasuredEpisode,
    MeasuredTurn,
    MemoryCosts,
    PrefillCosts,
    PublishCosts,
    SharedCores,
    TrainerCosts,
    Workload,
)
from arl.observe.events.run_record import RunRecord, read_run

_FEW = 4
"""Fewer iterations, or steps, say nothing."""
_NARROW = 0.15
"""Where a number varies by less than this share, what it costs cannot be told from a constant."""
_OWN_S = 0.005
"""Shorter times between an answer and the next request are the controller's own, not a tool's."""
_SGLANG_RUNNING, _ROUNDS = 256, 6
STATE_BYTES = 16
"""The trainer's bytes for a parameter: float32 weights, gradients, and AdamW's two moments."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_TOWERS = ("visual.", "model.visual.")
"""How the names of a vision tower's tensors begin."""
_HOW: dict[str, Any] = {"finished": "finished", "rejected": "rejected", "failed": "failed", "timed_out": "failed"}


def fitted(run_dir: str | Path) -> Costs:
    """Fit the costs of the run in `run_dir`, by the life that trained most steps.

    `Costs.measured` says what was seen, and in `notes` what could not be told apart. Raises RunFileError if there is no
    run, if it has no trained step or no episode that ended, if servers and trainer took turns, or if it trained several
    policies.
    """
    life = _Life(read_run(run_dir))
    if life.setting("engine", "colocated"):
        raise RunFileError(f"in {run_dir} servers and trainer took turns (engine.colocated), which is not modelled")
    if names := life.setting("policies"):
        raise RunFileError(f"{run_dir} trained several policies ({', '.join(names)}); a plan is for a run of one")
    episodes = tuple(_episodes(life))
    if not life.servers or not any(episode.turns for episode in episodes):
        raise RunFileError(f"{run_dir} has no episode that ended and was answered by a server, to learn costs from")
    decode, prefill, latency_s, running = _told_servers(life) or _guessed_servers(life)
    trainer, memory = _trainer(life), MemoryCosts()
    # CPU seconds of a request, with its part of its episode. What comes before the first batch warms up.
    first, last = min([r.t for r in life.of_kind(events.BatchTaken)] + [life.batches[0].t]), life.batches[-1].t
    number, used = sum(first <= turn.t <= last for turn in life.turns), life.cpu_s("", first, last)
    if not used or not number:
        life.notes.append("the log has no CPU times of training steps: the controller is taken for free")
    try:
        memory = model_memory(life.began.settings)
        life.notes.append("memory is that of weights, optimizer, keys and values; activations come on top")
    except (OSError, ValueError) as error:
        life.notes.append(f"memory is unknown, as the model's files are not here: {error}")
    forwarded = [step["forwarded_tokens"] for step in life.steps.values() if step.get("forwarded_tokens")]
    rank, server = (life.num_threads(name) if life.is_on_cpu(name) else 0 for name in ("train", "engine"))
    sections = [life.setting(name, default={}) for name in ("rollout", "engine", "train")]
    known = {name: value for section in sections for name, value in section.items() if value is not None}
    deployment = {name: value for name, value in known.items() if name in Deployment.__struct_fields__}
    deployment["num_servers"] = len(life.servers)
    deployment["drop_equal_rewards"] = bool(life.setting("algorithm", "dynamic_sampling", default=False))
    return Costs(
        decode=decode,
        prefill=prefill,
        trainer=trainer,
        publish=_publish(life),
        controller=ControllerCosts(per_request_s=used / number if used and number else 0.0, latency_s=latency_s),
        shared=SharedCores(cores=life.cores, rank=rank, server=server) if life.cores else None,
        workload=Workload(episodes=episodes),
        memory=memory,
        deployment=msgspec.convert(deployment, Deployment),
        measured=Measured(
            num_servers=(len(life.servers), len(life.servers)),
            num_ranks=(life.num_ranks, life.num_ranks),
            running_requests=(float(running.min()), float(running.max())),
            step_tokens=(min(forwarded), max(forwarded)),
            episodes_per_s=_episodes_per_s(life),
            notes=tuple(life.notes),
        ),
        source=str(run_dir),
    )


class _Life:
    """The records of that life of a run which trained most steps."""

    def __init__(self, run: RunRecord) -> None:
        trained = [life for life, record in run.system if isinstance(record, events.BatchTrained) and life in run.lives]
        if not trained:
            raise RunFileError(f"{run.run_dir} has no trained step to learn costs from; train at least five")
        number = max(trained, key=lambda life: (trained.count(life), life))
        self.run_dir, self.began, self.notes = run.run_dir, run.lives[number], list[str]()
        self.records = [record for life, record in run.system if life == number]
        self.batches, self.cores = self.of_kind(events.BatchTrained), self.began.cores
        self.groups = [group for group in run.groups if group.life == number]
        self.steps = {step["version"]: step for step in run.steps}
        turns = run.calls(self.began.t, max(record.t for record in self.records))
        self.turns = sorted((turn for turn in turns if isinstance(turn, TurnEnded) and turn.output > 0), key=_asked)
        self.servers = sorted({turn.server for turn in self.turns if turn.server})
        self.num_ranks = int(self.setting("train", "num_ranks", default=1))
        self.most_running = int(self.setting("engine", "max_running_requests", default=_SGLANG_RUNNING))

    def of_kind(self, kind: type[Any]) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]

    def setting(self, *names: str, default: Any = None) -> Any:
        value: Any = self.began.settings
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return default if value is None else value

    def num_threads(self, section: str) -> int:
        return int(self.setting(section, "num_threads", default=1))

    def is_on_cpu(self, section: str) -> bool:
        if section == "engine" and self.setting("engine", "kind") != "local":
            return self.setting("engine", "gpus_per_server") == 0
        return self.setting(section, "device", default="cpu") == "cpu"

    def cpu_s(self, name: str, first: float, last: float) -> float | None:
        """CPU seconds of a process between these times, "" for the controller; None if the log does not say."""
        read = [one for one in self.of_kind(events.CpuUsed) if not name or name in one.processes]
        used = [one.processes[name] if name else one.controller for one in read]
        return float(np.diff(np.interp([first, last], [one.t for one in read], used))[0]) if len(read) > 1 else None

    def pauses(self, server: str) -> list[tuple[float, float]]:
        """When it stood still for new weights."""
        begun, ended = (
            [r.t for r in self.of_kind(k) if r.server == server] for k in (events.ServerPaused, events.ServerResumed)
        )
        return [(t, end) for t in begun if (end := next((later for later in ended if later >= t), None)) is not None]


def _asked(turn: TurnEnded) -> float:
    return turn.t - turn.seconds


def _episodes(life: _Life) -> list[MeasuredEpisode]:
    """Those of groups that have ended, in order of admission, up to the first that has not: of later groups, only the
    short ones have ended."""
    turns: defaultdict[str, list[TurnEnded]] = defaultdict(list)
    for turn in life.turns:
        turns[turn.episode].append(turn)
    ended = [group for group in life.groups if group.outcome]
    first = next((i for i, group in enumerate(life.groups) if not group.outcome), len(life.groups))
    known = [life.steps.get(batch.version, {}) for batch in life.batches]
    tokens, forwarded = (sum(step.get(name, 0.0) for step in known) for name in ("tokens", "forwarded_tokens"))
    found: list[MeasuredEpisode] = []
    for group in ended[: max(first, len(ended) // 2, 1)]:
        whole = [one for one in group.episodes if one.how in _HOW and not one.episode.endswith("greedy")]
        # Tokens that were not forwarded are those that a group shares: all but one of its episodes save them.
        share = max(1 - forwarded / tokens, 0.0) * len(whole) / (len(whole) - 1) if tokens and len(whole) > 1 else 0.0
        for episode in whole:
            own, ends = turns[episode.episode], episode.ended or episode.began
            played = [
                MeasuredTurn(
                    prompt_tokens=turn.prompt,
                    cached_tokens=min(turn.cached, turn.prompt),
                    new_tokens=turn.output,
                    tool_s=_waited(asked - turn.t),
                )
                for turn, asked in zip(own, [*map(_asked, own[1:]), ends], strict=True)
            ]
            found.append(
                MeasuredEpisode(
                    group=group.group,
                    turns=tuple(played),
                    before_s=_waited(_asked(own[0]) - episode.began) if own else 0.0,
                    tokens=episode.num_tokens,
                    shared_tokens=int(min(share, 1.0) * episode.num_tokens),
                    reward=episode.reward or 0.0,
                    how=_HOW[episode.how],
                )
            )
    return found


def _waited(seconds: float) -> float:
    return seconds if seconds > _OWN_S else 0.0


def _nonnegative(columns: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares of relative errors, with coefficients [K] of at least 0: the column with the most negative one is
    left out until none is. columns [N, K], wanted [N] > 0."""
    used = np.flatnonzero(np.abs(columns).sum(0) > 0)
    while len(used):
        scaled = columns[:, used] / wanted[:, None]
        sizes = np.linalg.norm(scaled, axis=0)
        found = np.linalg.lstsq(scaled / sizes, np.ones(len(wanted)), rcond=None)[0]
        if (found >= 0).all():
            return np.bincount(used, found / sizes, columns.shape[1])
        used = np.delete(used, found.argmin())
    return np.zeros(columns.shape[1])


Servers = tuple[DecodeCosts, PrefillCosts, float, np.ndarray]
"""Costs, the seconds of a request in which nobody computes, and how many requests ran at once."""


def _told_servers(life: _Life) -> Servers | None:
    """From the times of iterations that embedded servers tell (ServerWorked): by the number of running requests.

    The tokens that requests hold are part of these times, as the workload stays the same.
    """
    sums: defaultdict[tuple[bool, int], np.ndarray] = defaultdict(lambda: np.zeros(5))
    beside_s = 0.0
    for server in life.servers:
        told = [record for record in life.of_kind(events.ServerWorked) if record.server == server]
        for record, sign in zip((told[-1], told[0]), (1.0, -1.0), strict=True) if len(told) > 1 else ():
            for row in record.iterations:
                values = np.array([row.number, row.decoded, row.prompt, row.begun, row.seconds])
                sums[row.reads, int(row.decoded / row.number).bit_length()] += sign * values
        if told and all(record.is_cpu_time for record in told) and (used := life.cpu_s(server, told[0].t, told[-1].t)):
            loads_s = sum(end - t for t, end in life.pauses(server) if told[0].t <= t < told[-1].t)
            beside_s += used - loads_s - sum(r.seconds for r in told[-1].iterations)
            beside_s += sum(r.seconds for r in told[0].iterations)
    rows = [(reads, sums[reads, size]) for reads, size in sorted(sums) if sums[reads, size][0] >= _FEW]
    decoding, reading = (np.array([row for reads, row in rows if reads is kind]) for kind in (False, True))
    if not len(decoding) or not len(reading):
        return None
    running, seconds = decoding[:, 1] / decoding[:, 0], np.maximum.accumulate(decoding[:, 4] / decoding[:, 0])
    points = {max(round(n), 1): float(s) for n, s in zip(running, seconds, strict=True)}
    decode = DecodeCosts(points=tuple(sorted(points.items())), max_running_requests=life.most_running)
    decode_s = decode.iteration_s(reading[:, 1] / reading[:, 0], 0.0) * (reading[:, 1] > 0)
    read_s = np.maximum(reading[:, 4] - reading[:, 0] * decode_s, 1e-3 * reading[:, 4])
    per_token_s, per_request_s = map(float, _nonnegative(reading[:, 2:4], read_s))
    per_request_s += max(beside_s, 0.0) / float(reading[:, 3].sum())
    ways_s = [turn.seconds - turn.queued_s - turn.server_s for turn in life.turns if turn.server_s and turn.sends == 1]
    latency_s = max(float(np.quantile(ways_s, 0.1)), 0.0) if ways_s else 0.0
    return decode, PrefillCosts(per_token_s=per_token_s, per_request_s=per_request_s), latency_s, running


def _guessed_servers(life: _Life) -> Servers:
    """From the times of turns: each takes a latency, the reading of prompts that came in its time, and iterations that
    take as long as so many running requests make them. Requests beyond the most that run wait, as if all took turns.

    What ran in the time of a turn is a mean over its iterations, so the costs say what that was: rounds.
    """
    table, found, is_narrow = np.zeros((0, 7)), np.array([0.0, 0.0, 1.0, 0.0, 0.0]), False
    for _ in range(_ROUNDS):
        table = np.concatenate([_turn_rows(life, server, found) for server in life.servers])
        running = table[:, 6]
        is_narrow = len(table) > 0 and running.std() < _NARROW * running.mean()
        if is_narrow:
            table[:, [3 if life.is_on_cpu("engine") else 4, 5]] = 0.0
        found = _nonnegative(table[:, 1:6], table[:, 0])
        if found[2:].sum() <= 0:
            raise RunFileError(f"the turns of {life.run_dir} do not tell what an iteration takes; train longer")
    if found[2] + found[3] <= 0:  # it cannot be all context
        found[3], found[4] = found[4] * table[:, 5].sum() / table[:, 4].sum(), 0.0
    latency_s, per_token_s, base_s, per_running_s, per_context_s = map(float, found)
    running, most = np.minimum(table[:, 6], life.most_running), life.most_running
    if is_narrow:
        life.notes.append(
            f"always about {running.mean():.0f} requests ran at once: what an iteration costs, and what a request in "
            f"it costs, could not be told apart; all of it is taken for the {'iteration' if base_s else 'request'}'s"
        )
    error = np.abs(table[:, 1:6] @ found / table[:, 0] - 1).mean()
    life.notes.append(f"turns took {100 * error:.0f} % more or less than the servers' costs say (mean)")
    points = tuple((n, base_s + n * per_running_s) for n in sorted({1, most}))
    decode = DecodeCosts(points=points, per_context_token_s=per_context_s, max_running_requests=most)
    return decode, PrefillCosts(per_token_s=per_token_s), latency_s, running


def _turn_rows(life: _Life, server: str, costs: np.ndarray) -> np.ndarray:
    """[N, 7] For each whole turn: its seconds without pauses; 1, the prompt tokens that were read in its time, what its
    new tokens take of costs[2:]; requests that ran at once.

    costs: a latency; of a token read, an iteration, a running request, a token that these hold.
    """
    own = [turn for turn in life.turns if turn.server == server]
    begun, ended = np.array([(_asked(turn) + turn.queued_s, turn.t) for turn in own]).T
    pauses, arrived = np.array(life.pauses(server)).reshape(-1, 2), np.sort(begun)
    edges = np.unique(np.concatenate([begun, ended, pauses.reshape(-1)]))
    number = np.searchsorted(arrived, edges, "right") - np.searchsorted(np.sort(ended), edges, "right")
    is_paused = np.searchsorted(pauses[:, 0], edges, "right") > np.searchsorted(np.sort(pauses[:, 1]), edges, "right")
    worked_s, held = np.diff(edges) * ~is_paused[:-1], np.maximum(number[:-1], 1)
    unread = np.array([max(turn.prompt - turn.cached, 1) for turn in own])
    sizes = np.array([turn.prompt + turn.output / 2 for turn in own])
    changes = [np.bincount(np.searchsorted(edges, times), sizes, len(edges)) for times in (begun, ended)]
    context = np.maximum(np.cumsum(changes[0] - changes[1])[:-1], 1.0)
    parts = np.array([np.maximum(held / life.most_running, 1.0), held, context])
    iterations = worked_s / (costs[2:] @ parts)

    def during(values: np.ndarray) -> np.ndarray:
        """[N] Sums over the time of each turn."""
        sums = np.concatenate([[0.0], np.cumsum(values)])
        return sums[np.searchsorted(edges, ended)] - sums[np.searchsorted(edges, begun)]

    count, lasted_s = np.maximum(during(iterations), 1e-12), during(worked_s)
    read = during(np.bincount(np.searchsorted(edges, begun), unread, len(edges))[:-1])
    tokens = np.array([turn.output + 0.5 for turn in own])
    decoded = [tokens * during(iterations * part) / count for part in parts]
    rows = np.array([lasted_s, np.ones(len(own)), read, *decoded, during(iterations * held) / count]).T
    is_whole = np.array([turn.sends == 1 and turn.stop in ("stop", "length") for turn in own])
    return rows[is_whole & (lasted_s > 1e-4)]


def _trainer(life: _Life) -> TrainerCosts:
    """Raises RunFileError if nothing says how many tokens the steps forwarded."""
    forwarded = {version: float(step.get("forwarded_tokens", 0.0)) for version, step in life.steps.items()}
    batches = [batch for batch in life.batches if forwarded.get(batch.version)]
    if not batches:
        raise RunFileError(f"no metrics.jsonl in {life.run_dir} says how many tokens its steps forwarded")
    first = life.began.version + 1
    warm = [batch for batch in batches if batch.version > first]
    if not warm:
        life.notes.append("the only step also warms up: the trainer's costs are too high; train five")
    batches = warm or batches
    # One thread of one process on the CPU: the seconds in which it computed.
    is_alone = life.is_on_cpu("train") and life.num_ranks == life.num_threads("train") == 1
    seconds = np.array([min(b.cpu_s or b.seconds, b.seconds) if is_alone else b.seconds for b in batches])
    tokens = np.array([forwarded[batch.version] for batch in batches]) / life.num_ranks
    snapshots = [record.seconds for record in life.of_kind(events.SnapshotTaken) if record.version >= first]
    base_s, per_token_s = 0.0, float(np.median(seconds / tokens))
    if len(batches) >= 3 and tokens.std() / tokens.mean() >= _NARROW:
        base_s, per_token_s = map(float, _nonnegative(np.column_stack([np.ones(len(tokens)), tokens]), seconds))
    else:
        life.notes.append(
            f"all steps forwarded about {life.num_ranks * tokens.mean():,.0f} tokens: what a step costs whatever its "
            "batch could not be told; all of it is taken for the tokens'"
        )
    return TrainerCosts(base_s=base_s, per_token_s=per_token_s, snapshot_s=median(snapshots) if snapshots else 0.0)


def _publish(life: _Life) -> PublishCosts:
    """transfer_s: from the snapshot to the first pause. load_s: a short pause, as other processes make some longer."""
    snapshots = [record.t for record in life.of_kind(events.SnapshotTaken) if record.version > life.began.version]
    pauses = sorted(span for server in life.servers for span in life.pauses(server))
    waits = (next((begin - t for begin, _ in pauses if begin >= t), None) for t in snapshots)
    transfers = [wait for wait in waits if wait is not None]
    loads = [end - begin for begin, end in pauses if snapshots and begin >= snapshots[0]]
    load_s = float(np.quantile(loads, 0.25)) if loads else 0.0
    return PublishCosts(transfer_s=median(transfers) if transfers else 0.0, load_s=load_s)


def _episodes_per_s(life: _Life) -> float:
    """Of the steps after those that fill the pipeline."""
    filling = int(life.setting("rollout", "max_staleness", default=0)) + 2
    steady = life.batches[filling - 1 :]
    if len(steady) <= _FEW:
        life.notes.append(f"train {filling + _FEW} steps or more to see the model's error on this run itself")
        return 0.0
    sizes = {group.group: sum(one.how == "finished" for one in group.episodes) for group in life.groups}
    number = sum(sizes.get(group, 0) for batch in steady[1:] for group in batch.groups)
    return number / (steady[-1].t - steady[0].t)


def model_memory(settings: dict[str, Any]) -> MemoryCosts:
    """Of servers and trainer, without activations. settings: those of a run.

    An adapter is small next to the frozen float32 weights. A critic or reward model is as large as the policy; a KL
    penalty, DPO, KTO and a reward model hold a frozen copy. Raises OSError or ValueError if the files do not say.
    """
    directory = Path(settings.get("model") or "")
    algorithm, train = settings.get("algorithm") or {}, settings.get("train") or {}
    config = json.loads((directory / "config.json").read_text())
    config |= config.get("text_config") or {}  # a model that sees describes its language model apart
    try:
        dtype = (settings.get("engine") or {}).get("dtype") or config.get("dtype") or config["torch_dtype"]
        value_bytes, heads = _DTYPE_BYTES[dtype], int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        kv_values = 2 * int(config["num_hidden_layers"]) * int(config.get("num_key_value_heads") or heads) * head_dim
    except (KeyError, TypeError) as error:
        raise ValueError(f"{directory / 'config.json'} has no usable {error}") from error
    parameters, of_tower = _num_parameters(directory)
    frozen = parameters if train.get("lora") else of_tower if train.get("freeze_vision_tower") else 0
    has_reward_model = algorithm.get("reward_model") is not None
    num_models = 1 + (algorithm.get("critic") is not None) + has_reward_model
    has_reference = (algorithm.get("kl") or {}).get("coefficient", 0) > 0
    has_reference |= (algorithm.get("loss") or {}).get("kind") in ("dpo", "kto")
    trained_bytes = STATE_BYTES * num_models + 4 * (has_reference + has_reward_model)
    return MemoryCosts(
        server_weights=value_bytes * parameters,
        kv_per_token=value_bytes * kv_values,
        trainer_state=4 * num_models * frozen + trained_bytes * (parameters - frozen),
    )


def _num_parameters(directory: Path) -> tuple[int, int]:
    """Of the whole model, and of its vision tower."""
    from safetensors import safe_open  # not needed where costs are guessed

    sizes: dict[str, int] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "numpy") as opened:
            file: Any = opened
            sizes |= {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if not sizes:
        raise FileNotFoundError(f"{directory} has no *.safetensors")
    return sum(sizes.values()), sum(size for name, size in sizes.items() if name.startswith(_TOWERS))
