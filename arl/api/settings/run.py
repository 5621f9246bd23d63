"""Every setting of a run, in frozen sections. engines.py has the engines' sections, algorithm.py the algorithm's.

Each component gets only its own section. Times are in seconds (`_s`). A variant is a type, chosen by `kind`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self, cast
from urllib.parse import urlsplit
from zlib import crc32

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from arl.api.engine import InferenceEngine, WeightTransport
from arl.api.errors import ConfigError
from arl.api.settings.algorithm import AlgorithmConfig, preset
from arl.api.settings.endpoint import EndpointConfig
from arl.api.settings.engines import (
    AdapterWeightsConfig,
    DeltaWeightsConfig,
    DiskWeightsConfig,
    DistributedWeightsConfig,
    EngineConfig,
    LocalEngineConfig,
    PolicyConfig,
    RunningServersConfig,
    SGLangProcessesConfig,
    StartedServersConfig,
    TrainConfig,
    WeightsConfig,
    check_fused,
    policies_flaw,
)
from arl.api.settings.objective import PassAtKAdvantage
from arl.api.settings.sections import Section, laid_over
from arl.api.train_engine import Head, TrainEngine

METRICS_KEY = "ARL_METRICS_KEY"
"""The environment variable with the bearer token that scrapes must send."""


class RolloutConfig(Section):
    """How episodes run, and what happens when they fail."""

    batch_size: PositiveInt = 32
    """Groups in a batch (B): what the trainer takes at a time."""
    group_size: PositiveInt = 8
    """Episodes of each example."""
    max_staleness: NonNegativeInt = 2
    """How many versions older than the trainer's a trained token may be (eta). 0 is synchronous RL."""
    max_concurrent_episodes: PositiveInt = 1024
    """The most episodes that run at once, even if the buffer would admit more; of held-out ones a sixteenth of this."""
    num_workers: NonNegativeInt = 0
    """Worker processes that run the workflow. 0: it runs in the script's own process."""
    episode_timeout_s: PositiveFloat = 600.0
    """Longest time one episode may take, retries included. The wait for a place, or for a program elsewhere, does not
    count."""
    episode_retries: NonNegativeInt = 1
    """How often an episode that failed runs again."""
    min_group_size: PositiveInt = 2
    """The fewest finished episodes of a trained group; a smaller group is dropped. At most group_size. A task with a
    smaller group_size of its own needs as many."""
    max_failure_rate: float = Field(default=0.5, gt=0, le=1)
    """The share of the last 64 episodes that may fail. Above it the run stops with the first traceback."""
    drop_stragglers_after_s: PositiveFloat | None = None
    """A group that keeps the trainer waiting for longer is aborted and dropped. Unset: the trainer waits."""
    extra_episodes: NonNegativeInt = 0
    """Over-sampling: start this many episodes more than group_size for each example. The first group_size that finish
    are trained and the others are aborted, which favours short episodes."""
    replay_groups: NonNegativeInt = 0
    """How many groups of earlier batches are trained again with each batch, within max_staleness: those in which a
    trajectory has a reward above 0."""
    seed_requests: bool = False
    """Give each request without a seed one that depends on `seed`, the group, the episode and the request's number: an
    episode that runs again asks for the same tokens. SGLang needs --enable-deterministic-inference to use seeds."""
    shuffle: bool = True
    """Shuffle the dataset in each epoch, by seed. Off: keep its order. A curriculum chooses its own order."""

    @property
    def max_concurrent_held_out(self) -> int:
        """The most held-out episodes that run at once."""
        return max(self.max_concurrent_episodes // 16, 1)

    @model_validator(mode="after")
    def _group_sizes_fit(self) -> Self:
        if self._changed("min_group_size") and self.min_group_size > self.group_size:  # the default bends
            raise ValueError(
                f"min_group_size is {self.min_group_size}; it must be at most group_size {self.group_size}"
            )
        return self

    @model_validator(mode="after")
    def _replay_makes_sense(self) -> Self:
        if self.replay_groups and self.max_staleness == 0:
            raise ValueError(
                f"replay_groups is {self.replay_groups}, but max_staleness is 0, and a trained group is always older. "
                "Set max_staleness to 1 or more, or replay_groups to 0"
            )
        return self


class SuiteConfig(Section):
    """What differs for one of several held-out datasets."""

    every: PositiveInt | None = None
    """Play it each time this many versions were trained, a multiple of evaluation.every. Its reward is then not in the
    evaluation's own, which compares the same examples each time. Unset: in every evaluation, and in its reward."""
    episodes_per_example: PositiveInt | None = None
    """Unset: evaluation.episodes_per_example."""


class EvaluationConfig(Section):
    """Episodes on held-out examples, beside training."""

    every: PositiveInt | None = None
    """Evaluate each time this many versions were trained. Unset: only when asked."""
    episodes_per_example: PositiveInt = 1
    """How often each held-out example is played. With several, evaluations also have the metrics pass@1, pass@2,
    pass@4, ...: the chance that at least one of so many episodes has a reward of 1 or more."""
    suites: dict[str, SuiteConfig] = Field(default_factory=dict)
    """What differs for held-out datasets, by the names that they have: {"aime": {"every": 50,
    "episodes_per_example": 32}}. A task's examples are named by the task, or TASK/NAME."""
    hold_weights: bool = False
    """Servers keep the evaluated version until the evaluation ends. Newer weights wait, and training waits once it is
    max_staleness ahead. Otherwise an evaluation runs on weights that change meanwhile."""
    keep_best: str | None = None
    """The metric by which run_dir/best has the best evaluated model: reward, pass@4, episode/NAME, or SUITE/reward and
    so on for one held-out dataset. Higher is better. Needs hold_weights."""

    @property
    def needs_examples(self) -> list[str]:
        """The settings that have an effect with held-out examples alone."""
        return self._changed("hold_weights", "keep_best", "suites")

    def repeats_of(self, suite: str) -> int:
        """The episodes of each example of a held-out dataset."""
        own = self.suites.get(suite)
        return (own and own.episodes_per_example) or self.episodes_per_example

    @model_validator(mode="after")
    def _intervals_are_multiples(self) -> Self:
        for name, suite in self.suites.items():
            if suite.every is None:
                continue
            if self.every is None:
                raise ValueError(
                    f"suites has every={suite.every} for {name!r}, but evaluation.every is unset; set that, too"
                )
            if suite.every % self.every:
                raise ValueError(
                    f"suites has every={suite.every} for {name!r}, which is not a multiple of evaluation.every="
                    f"{self.every}: a suite is played beside the others, in some of their evaluations"
                )
        return self

    @model_validator(mode="after")
    def _best_model_is_one_model(self) -> Self:
        if self.keep_best is not None and not self.hold_weights:
            raise ValueError(
                f"keep_best is {self.keep_best!r}, but servers change their weights during an evaluation, so its "
                "numbers are of no single model; set hold_weights=true"
            )
        return self


class CheckpointConfig(Section):
    """Checkpoints, from which a rerun continues."""

    every: PositiveInt | None = None
    """Also save a checkpoint each time this many versions were trained. Unset: only by time (every_s)."""
    every_s: PositiveFloat | None = 300.0
    """Save a checkpoint, beside training, after the first step that ends this long after the last one. null: never."""
    notice_s: PositiveFloat | None = None
    """The process ends this long after a Ctrl-C, SIGTERM or SIGUSR1, even if the checkpoint is not done: less than the
    time until the kill (Kubernetes' grace period, Slurm's --signal). Unset, or in a notebook: no limit."""
    keep: PositiveInt = 2
    """How many of the newest checkpoints to keep."""


_ALL_TOKENS = 500_000
SAMPLED_SHARE, NUM_NOTABLE = 0.05, 2
"""With log.events.tokens=sampled: the share of the groups whose tokens are logged, and how many trajectories of each
notable kind."""


class EventsConfig(Section):
    """The event log, run_dir/events: what `arl view` shows."""

    tokens: Literal["all", "sampled", "none"] | None = None
    """Which episodes' tokens to log. sampled: of a twentieth of the groups, and of two trajectories of a batch for each
    of: highest and lowest reward, longest, most stale, largest weight; and of two that failed between two batches.
    Unset: all in batches of up to 500,000 tokens, sampled in larger ones."""
    max_gb: float = Field(default=5.0, ge=0.01)
    """Largest size of run_dir/events, in GB (10^9 bytes). The oldest tokens are deleted first, then turns and calls,
    then the rest."""

    def keeps(self, num_tokens: int) -> Literal["all", "sampled", "none"]:
        """Whose tokens to keep of a batch of so many, or of what comes between two batches."""
        return self.tokens or ("all" if num_tokens <= _ALL_TOKENS else "sampled")


def is_sampled(group_id: int) -> bool:
    """Whether the event log samples a group: the same groups in every process, spread evenly."""
    return crc32(str(group_id).encode()) < SAMPLED_SHARE * (1 << 32)


class TrackioConfig(Section):
    """trackio: its local database ($TRACKIO_DIR) and dashboard, or a Hugging Face Space."""

    kind: Literal["trackio"] = "trackio"
    project: str = "arl"
    name: str | None = None
    """The run's name; it gets a random ending. Unset: run_dir's."""
    group: str | None = None
    """Shown with the other runs of this group."""
    space_id: str | None = None
    """A Hugging Face Space that gets the run, instead of the database. Unset: $TRACKIO_SPACE_ID, if any."""


class WandbConfig(Section):
    """Weights & Biases."""

    kind: Literal["wandb"] = "wandb"
    project: str = "arl"
    entity: str | None = None
    """A user or a team. Unset: your own default."""
    name: str | None = None
    """The run's name. Unset: run_dir's."""
    group: str | None = None
    """Shown with the other runs of this group."""
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] | None = None
    """offline: write to run_dir/wandb alone, for `wandb sync`. Unset: $WANDB_MODE, or else online."""


class TensorBoardConfig(Section):
    """TensorBoard's event files."""

    kind: Literal["tensorboard"] = "tensorboard"
    directory: Path | None = None
    """The directory of the event files. Unset: run_dir/tensorboard."""


class MLflowConfig(Section):
    """MLflow: a local database, or a tracking server."""

    kind: Literal["mlflow"] = "mlflow"
    experiment: str = "arl"
    name: str | None = None
    """The run's name. Unset: run_dir's."""
    address: str | None = None
    """The tracking server, as MLflow's tracking URI. Unset: $MLFLOW_TRACKING_URI, or else a database in
    run_dir/mlflow."""


TrackerConfig = Annotated[
    TrackioConfig | WandbConfig | TensorBoardConfig | MLflowConfig,
    Field(discriminator="kind"),
]


class ConsoleConfig(Section):
    """The output of a run on the console."""

    console: bool = True
    """Print a live table."""
    format: Literal["text", "json"] = "text"
    """The form of stdout and stderr: text for people, or one JSON object for each line, for machines."""


class LogConfig(ConsoleConfig):
    """The output of a run, on the console and in files."""

    events: EventsConfig | None = EventsConfig()
    """The event log. null: none."""
    metrics_address: str | None = None
    """HOST:PORT at which Prometheus finds /metrics while the run trains, such as 127.0.0.1:9400. Unset: none. Beyond
    loopback scrapes must send the bearer token in $ARL_METRICS_KEY."""

    @property
    def key(self) -> str | None:
        return os.environ.get(METRICS_KEY) or None

    @property
    def metrics_host_and_port(self) -> tuple[str, int]:
        """Of metrics_address, which is set."""
        address = urlsplit(f"//{self.metrics_address}")
        return address.hostname or "", address.port or 0

    @field_validator("metrics_address")
    @classmethod
    def _is_an_address(cls, given: str | None) -> str | None:
        if given is None:
            return given
        try:
            address = urlsplit(f"//{given}")
            is_whole = bool(address.hostname and address.port) and given == address.netloc and "@" not in given
        except ValueError:
            is_whole = False
        if not is_whole:
            raise ValueError(f"metrics_address is {given!r}; write HOST:PORT, such as 127.0.0.1:9400 or [::1]:9400")
        return given

    trackers: tuple[TrackerConfig, ...] = ()
    """Experiment trackers: trackio, wandb, tensorboard, mlflow. Each is a name, or JSON with its settings:
    {"kind": "wandb", "project": "sums"}."""
    track_trajectories: NonNegativeInt = 4
    """How many trajectories of every tenth step, and of an evaluation, trackers get, with their text and their example;
    and at most how many episodes that failed."""

    @field_validator("trackers", mode="before")
    @classmethod
    def _by_name(cls, given: object) -> object:
        if isinstance(given, str) or not isinstance(given, Sequence):
            return ({"kind": given},) if isinstance(given, str) else given
        return tuple({"kind": one} if isinstance(one, str) else one for one in cast("Sequence[object]", given))


class Config(Section):
    """A run. Run it again with the same run_dir, and it continues from the newest checkpoint there."""

    model: str
    """A Hugging Face model directory, or a model's name on the hub."""
    run_dir: Path = Path("runs/run")
    """Where metrics, the event log, checkpoints and logs go."""
    steps: PositiveInt = 100
    """Batches to train."""
    seed: int = 0
    """Seeds the dataset's order and the trainer's draws; with rollout.seed_requests sampling too."""
    record: bool = False
    """Record, in run_dir/recording, everything that each step's numbers depend on: `arl replay` trains the steps
    again."""
    engine: EngineConfig = LocalEngineConfig()
    """The inference servers, and how to speak to them."""
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    algorithm: AlgorithmConfig = preset("decoupled_ppo")
    weights: WeightsConfig = DiskWeightsConfig()
    """How weights reach the servers."""
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    stall_timeout_s: PositiveFloat | None = None
    """End the run, with a checkpoint, when nothing has moved for this long, and the process after twice as long: no
    batch is trained, no request answered, no episode ended, nothing delivered. Unset: keep waiting, and log every ten
    minutes, then less often, what waits for what. Set it far above the time that training a batch or writing the last
    checkpoint takes: nothing moves meanwhile."""
    endpoint: EndpointConfig = EndpointConfig()
    policies: dict[str, PolicyConfig] = Field(default_factory=dict)
    """Several policies, by name: the roles of each, and what it does not share with the others. Empty: one policy plays
    all roles."""

    @model_validator(mode="before")
    @classmethod
    def _over_the_defaults(cls, given: Any) -> object:
        """A section given in part keeps what the class set in its default, its kind first of all."""
        if not isinstance(given, dict):
            return given
        sections = {n: field.default for n, field in cls.model_fields.items() if isinstance(field.default, Section)}
        return {name: laid_over(sections.get(name), value) for name, value in cast("dict[str, Any]", given).items()}

    @model_validator(mode="after")
    def _mirrors_have_servers(self) -> Self:
        if not isinstance(self.weights, DeltaWeightsConfig):
            return self
        if not isinstance(self.engine, RunningServersConfig):
            raise ValueError(
                "weights.transport is delta, which is for servers on other machines, and "
                f"engine.kind={self.engine.kind} starts them on this one; use weights.transport=disk"
            )
        if self.engine.servers_file is not None:  # it may name mirrors and servers
            return self
        if not self.weights.mirrors:
            raise ValueError(
                "weights.mirrors is empty: name the mirror of each server on another machine; on this one use "
                "weights.transport=disk"
            )
        addresses = {address.rstrip("/") for address in self.engine.addresses}
        if unknown := [server for server in self.weights.mirrors if server.rstrip("/") not in addresses]:
            raise ValueError(
                f"weights.mirrors has a mirror for {unknown[0]}, which is not among engine.addresses: "
                f"{', '.join(self.engine.addresses)}"
            )
        return self

    @model_validator(mode="after")
    def _servers_can_take_turns(self) -> Self:
        if self.engine.colocated and not isinstance(self.weights, DiskWeightsConfig):
            why = {
                "distributed": "its groups would connect processes on one GPU, which NCCL refuses",
                "delta": "it is for servers on other machines, whose GPUs nobody shares",
                "adapter": "it needs the model's weights on the servers, which let go of them",
            }[self.weights.transport]
            raise ValueError(
                f"weights.transport is {self.weights.transport}, but with engine.colocated {why}; use disk, whose "
                "files are in this machine's memory"
            )
        return self

    @model_validator(mode="after")
    def _policies_fit(self) -> Self:
        if not self.policies:
            return self
        refused = {
            "record": self.record,
            "engine.colocated": self.engine.colocated,
            "engine.on_ray": self.engine_on_ray,
            "algorithm.reward_model": self.algorithm.reward_model is not None,
            "train.num_ranks above 1": self.train.is_over_ray,
        }
        if flaw := policies_flaw(self.policies, self.engine, self.weights, refused):
            raise ValueError(flaw)
        return self

    @model_validator(mode="after")
    def _ray_is_used(self) -> Self:
        if self.engine_on_ray and self.train.ray_address is None:
            raise ValueError("engine.on_ray is set, but train.ray_address is not: name the Ray cluster, such as auto")
        if self.train.ray_address is not None and not self.train.is_over_ray and not self.engine_on_ray:
            raise ValueError(
                "train.ray_address is set, but train.num_ranks is 1, which trains without Ray, and engine.on_ray is "
                "not set"
            )
        return self

    @property
    def engine_on_ray(self) -> bool:
        """Whether arl starts the servers on the nodes of the Ray cluster."""
        return isinstance(self.engine, StartedServersConfig) and self.engine.on_ray

    @model_validator(mode="after")
    def _each_worker_has_an_endpoint(self) -> Self:
        if self.endpoint.is_fixed and self.rollout.num_workers > 1:
            name = "port" if self.endpoint.port else "public_url"
            raise ValueError(
                f"endpoint.{name} is {getattr(self.endpoint, name)}, but each of rollout.num_workers="
                f"{self.rollout.num_workers} processes has an endpoint of its own; leave endpoint.{name} out, or set "
                "rollout.num_workers to 0"
            )
        return self

    @model_validator(mode="after")
    def _adapters_can_be_published(self) -> Self:
        if not isinstance(self.weights, AdapterWeightsConfig):
            return self
        if self.train.lora is None:
            raise ValueError(
                "weights.transport is adapter, but train.lora is unset, so there are no adapters; set train.lora, or "
                "use weights.transport=disk"
            )
        if self.engine.pause_mode != "in_place":
            raise ValueError(
                f"engine.pause_mode is {self.engine.pause_mode}, but weights.transport=adapter pauses nothing: a "
                "request keeps the adapter that it began with. Leave pause_mode at in_place"
            )
        is_sglang = self.engine.protocol == "sglang" and not isinstance(self.engine, LocalEngineConfig)
        if is_sglang and self.train.lora.target_modules != "all-linear":
            check_fused({name.rpartition(".")[2] for name in self.train.lora.target_modules})
        return self

    @model_validator(mode="after")
    def _vllm_can_do_it(self) -> Self:
        if self.engine.protocol != "vllm":
            return self
        if isinstance(self.weights, DistributedWeightsConfig) and not self.train.device.startswith("cuda"):
            raise ValueError(
                f"weights.transport is distributed, which vLLM takes over NCCL from a GPU, and train.device is "
                f"{self.train.device}; use weights.transport=disk"
            )
        if not self.engine.replay_truncation:
            raise ValueError(
                "engine.replay_truncation is false, but vLLM's logprobs under top_p, top_k and min_p are over the kept "
                "tokens, so a trainer of the whole distribution would not agree with them; leave it on"
            )
        return self

    @model_validator(mode="after")
    def _servers_look_at_seeds(self) -> Self:
        flag = "--enable-deterministic-inference"
        if not isinstance(self.engine, SGLangProcessesConfig) or flag in self.engine.arguments:
            return self
        if self.rollout.seed_requests:
            raise ValueError(
                f"rollout.seed_requests is set, but servers honour seeds only with {flag}; add it to engine.arguments"
            )
        return self

    @model_validator(mode="after")
    def _fewer_ranks_can_share(self) -> Self:
        train, batch_size = self.train, self.rollout.batch_size
        least, most = train.min_ranks or train.num_ranks, train.num_ranks
        if least < most and len(train.rank_counts(batch_size)) == 1:
            raise ValueError(
                f"train.min_ranks is {least}, but no count from {least} to {most - 1} shares rollout.batch_size="
                f"{batch_size} evenly, or keeps train.tensor_parallel whole; set min_ranks lower, or another batch_size"
            )
        return self

    @model_validator(mode="after")
    def _groups_fit_the_algorithm(self) -> Self:
        rollout, algorithm = self.rollout, self.algorithm
        if rollout.batch_size % algorithm.minibatches:
            raise ValueError(
                f"algorithm.minibatches is {algorithm.minibatches}; it must divide "
                f"rollout.batch_size={rollout.batch_size} (a preset takes its paper's value); set one of them"
            )
        if flaw := _group_size_flaw("rollout.group_size", rollout.group_size, algorithm):
            raise ValueError(flaw)
        return self


# Engines of a user's own, for `launch`: a model of another kind, with its own sampler, training and transport


class TrainEngineLoader(Protocol):
    """Loads a train engine; `arl.load_train_engine` is one."""

    def __call__(self, model: str, settings: TrainConfig, /, *, seed: int, head: Head) -> TrainEngine:
        """model, settings, seed: the run's. head: "value" for the critic that algorithm.critic asks for.

        An engine refuses, with an error, a setting or head that it cannot honour.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnEngines:
    """Take the places of the engines that `engine`, `train` and `weights` name. The run closes all three at its end.

    docs/extending.md says what each must promise.
    """

    inference: InferenceEngine
    """What episodes sample from."""
    train: TrainEngineLoader
    """Called in the trainer's process, again after each loss of it: so it must pickle, as a class or function of a
    module, or of the script, does."""
    transport: WeightTransport
    """Brings weights to `inference`. Its snapshots come from the trainer's process: `write` alone works there."""

    def check(self, config: Config) -> None:
        """Raise ConfigError for settings of the engines that these replace."""
        for wrong in self._unused(config):
            raise ConfigError(f"{wrong}, but the engines are launch's `engines`; leave it out")

    def _unused(self, config: Config) -> Iterator[str]:
        fields = type(config).model_fields
        for name in ("engine", "weights"):
            if getattr(config, name) != fields[name].get_default(call_default_factory=True):
                yield f"{name} is set"
        if config.train.is_over_ray:
            yield f"train.num_ranks is {config.train.num_ranks}, which arl's own train engine alone has"
        if config.record:
            yield "record is set, and `arl replay` could not load the train engine"


def check_group_size(name: str, group_size: int, algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError for one that the algorithm cannot use. name: what the error calls it."""
    if flaw := _group_size_flaw(name, group_size, algorithm):
        raise ConfigError(flaw)


def _group_size_flaw(name: str, group_size: int, algorithm: AlgorithmConfig) -> str | None:
    if group_size == 1 and algorithm.is_group_relative:
        other = (
            ""
            if algorithm.advantage.kind in ("pairs", "labels")
            else (", or algorithm.advantage to one that does not compare, such as baseline=none")
        )
        return (
            f"{name} is 1, but algorithm.preset={algorithm.preset} compares the episodes of a group: all advantages "
            f"would be 0. Set group_size to 2 or more{other}"
        )
    if isinstance(algorithm.advantage, PassAtKAdvantage) and algorithm.advantage.k >= group_size:
        return (
            f"algorithm.advantage.k is {algorithm.advantage.k}; it must be below {name}={group_size}, or all "
            "advantages are equal"
        )
    return None
