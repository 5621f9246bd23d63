"""The records that cross between components: requests, responses, trajectories, groups.

All are frozen and validated when built, so that no component checks one again. Token-level fields are aligned with
`token_ids`: index t belongs to `token_ids[t]`, whose log-probability is conditioned on `token_ids[:t]`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from arl.api.errors import TrajectoryError
from arl.api.grammar import Grammar
from arl.api.images import PlacedImage, placement_flaw

if TYPE_CHECKING:
    from arl.api.routed_experts import Routes
    from arl.api.sampling_mask import KeptIds
    from arl.api.token_arrays import Array, BoolColumn, FloatColumn, IntColumn, OptionalColumn

StopReason = Literal["stop", "length", "abort"]

NOT_SAMPLED = -1
"""The version of a token that no policy sampled: prompts, tool results, user turns."""

AGENT = "agent"
"""The role of an agent that nobody gave another."""

MIN_TEMPERATURE = 1e-3
"""The lowest temperature that samples: logits divided by much less do not fit float32. 0 is greedy."""

MAX_REWARD = 1e12
"""Rewards lie within ±MAX_REWARD: the square of their sum over a million tokens still fits float32."""

MAX_NUMBER = 3.4e38
"""Logprobs and metrics lie within ±MAX_NUMBER, the range of float32."""

_MOST = (1 << 31) - 1  # of int32, the type of token ids and versions
_TOKEN_ID = "a token id, an integer of at least 0, below 2^31"
_VERSION = "-1 (not sampled) or a policy version, below 2^31"


Arrays = Mapping[str, "Array"]
"""Arrays beside the tokens, for models of another kind: name -> numbers, whose first axis is the tokens. arl carries
them from an episode to the train engine, and never looks inside. docs/extending.md shows them in use."""
_NO_ARRAYS: Arrays = {}


def no_arrays() -> Arrays:
    """The default of a record's arrays: one mapping for all of them, as there may be many records."""
    return _NO_ARRAYS


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one response is sampled. Names and meaning are SGLang's."""

    max_new_tokens: int = 256
    temperature: float = 1.0
    """0 is greedy; otherwise at least MIN_TEMPERATURE."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability."""
    top_k: int = -1
    """Sample among this many likeliest tokens; -1: among all."""
    min_p: float = 0.0
    """Sample among tokens with at least this share of the likeliest token's probability."""
    stop: tuple[str, ...] = ()
    """Texts that end the response. They stay in its tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response, beside the model's end of sequence."""
    ignore_eos: bool = False
    """No token ends the response, not even one of stop_token_ids."""
    seed: int | None = None
    grammar: Grammar | None = None
    """The response must match it: each token is sampled among those that it allows, which its logprob is of too. An
    engine that cannot decode so raises."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or at least {MIN_TEMPERATURE}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1]")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be -1 (off) or at least 1")
        if "" in self.stop:
            raise ValueError("stop holds an empty string, which every text contains; leave it out")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; it must be in [0, 1]")

    @property
    def is_filtered(self) -> bool:
        """Whether top_p, top_k or min_p narrow what is sampled."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k != -1 or self.min_p > 0)

    @property
    def logprob_temperature(self) -> float:
        """Logits are divided by this before the log-softmax that gives logprobs; 1 for greedy sampling."""
        return self.temperature if self.temperature > 0 else 1.0


def new_id() -> str:
    """A random identifier for a request or a session."""
    return os.urandom(16).hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One turn: the tokens so far, and how to continue them."""

    input_ids: Sequence[int]
    """Conversations and the OpenAI endpoint give a read-only int32 array."""
    sampling: SamplingParams = SamplingParams()
    rid: str = field(default_factory=new_id)
    session_id: str | None = None
    """Requests with the same session id go to the same server, which has their prefix cached."""
    routes_from: int = 0
    """The response's routes begin with this token of input_ids; those before it are known. Below len(input_ids)."""
    images: tuple[PlacedImage, ...] = ()
    """What lies at the placeholders among input_ids, in order. An engine that cannot show images raises."""
    role: str = AGENT
    """The role of the agent that asks. In a run of several policies, its policy answers."""
    arrays: Arrays = field(default_factory=no_arrays, compare=False)
    """For an engine of your own: arrays with a row for each of input_ids, as Trajectory.arrays has."""

    def __post_init__(self) -> None:
        if len(self.input_ids) == 0:
            raise ValueError("input_ids is empty; a request needs at least one token to continue from")
        if flaw := _arrays_flaw(self.arrays, len(self.input_ids), "input_ids"):
            raise ValueError(flaw)
        if not 0 <= self.routes_from < len(self.input_ids):
            raise ValueError(
                f"routes_from is {self.routes_from}; it must be below {len(self.input_ids)}, the input_ids"
            )
        if flaw := placement_flaw(self.images, len(self.input_ids)):
            raise ValueError(flaw)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResponse:
    """The tokens sampled for one request. A weight update during the response shows in its versions alone."""

    output_ids: tuple[int, ...]
    """The sampled tokens, the stop token included."""
    output_logprobs: tuple[float, ...]
    """The behavior logprob of each token."""
    output_versions: tuple[int, ...]
    """The policy version that produced each token."""
    stop_reason: StopReason
    temperature: float = 1.0
    """The logits were divided by this before the log-softmax; recomputed logprobs must do the same."""
    kept_ids: KeptIds | None = None
    """The ids from which each token was sampled, under a grammar, top_p, top_k or min_p: logprobs are over these ids
    alone. Trajectories that are built by hand need them, too."""
    routes: Routes | None = None
    """For a mixture of experts: the experts that computed each token of input_ids and output_ids. They are unknown for
    the last token, and for tokens before the request's routes_from. Trajectories that are built by hand need them,
    too."""
    arrays: Arrays = field(default_factory=no_arrays, compare=False)
    """From an engine of your own: arrays with a row for each sampled token, as Trajectory.arrays has."""
    # How it was served, which makes no response another:
    server: str = field(default="", compare=False)
    """The address of the server that gave the last token, if there is one."""
    queued_s: float = field(default=0.0, compare=False)
    """How long the request waited for a server, in seconds."""
    sends: int = field(default=1, compare=False)
    """How often it was sent: pauses that abort, and servers that fail, make it more than one."""
    cached_tokens: int = field(default=0, compare=False)
    """Prompt tokens whose keys and values the server had computed before."""
    server_s: float = field(default=0.0, compare=False)
    """How long servers had the request, in seconds, by their own clocks; 0 if they do not say."""

    def __post_init__(self) -> None:
        n = len(self.output_ids)
        if len(self.output_logprobs) != n or len(self.output_versions) != n:
            raise ValueError(
                f"{n} tokens came with {len(self.output_logprobs)} logprobs and {len(self.output_versions)} versions; "
                "each token needs one of each"
            )
        if flaw := _arrays_flaw(self.arrays, n, "output_ids"):
            raise ValueError(flaw)
        if self.kept_ids is not None:
            if flaw := _kept_ids_flaw(self.kept_ids, self.output_ids):
                raise ValueError(flaw)
            object.__setattr__(self, "kept_ids", self.kept_ids.packed())
        if self.routes is not None and len(self.routes) <= n:
            raise ValueError(f"routes has {len(self.routes)} entries for a prompt and {n} tokens after it")


def _arrays_flaw(arrays: Arrays, num_rows: int, rows: str) -> str | None:
    if not arrays:
        return None
    from arl.api.token_arrays import arrays_flaw

    return arrays_flaw(arrays, num_rows, rows)


def _kept_ids_flaw(kept_ids: KeptIds, token_ids: Any) -> str | None:
    """Why these cannot be the sets that the tokens were sampled among; None if they can."""
    import numpy as np

    if len(kept_ids) != len(token_ids):
        return f"kept_ids has {len(kept_ids)} entries for {len(token_ids)} tokens; they must be equal"
    is_allowed = kept_ids.allows(np.asarray(token_ids, dtype=np.int32))
    if is_allowed.all():
        return None
    t = int(is_allowed.argmin())
    return f"token {t} has id {token_ids[t]}, which is not among the kept_ids that it was sampled among"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSpan:
    """One turn of a trajectory: the tokens [start, stop) that the model sampled, and what became of them."""

    start: int
    stop: int
    reward: float = 0.0
    """The environment's reward for this turn. The trajectory's own reward comes on top."""
    state: str | None = None
    """A key of the state in which the turn was taken. GiGPO compares the turns of a group that have the same key.
    None: compare this turn with no other."""

    def __post_init__(self) -> None:
        _make_plain(self, "start", int)
        _make_plain(self, "stop", int)
        if not 0 < self.start <= self.stop:
            raise TrajectoryError(f"a turn spans tokens {self.start} to {self.stop}; it must begin after token 0")
        _check_number(f"the reward of the turn at token {self.start}", self.reward, MAX_REWARD)
        _put_plain(self, "reward", self.reward)
        if self.state is not None:
            _check_name(f"the state of the turn at token {self.start}", self.state)
            _put_plain(self, "state", self.state)


def _check_number(name: str, value: Any, limit: float) -> None:
    """Raise TrajectoryError unless it is a finite number within ±limit."""
    if not (type(value) in (int, float) and -limit <= value <= limit):
        from arl.api import token_arrays

        token_arrays.check_number(name, value, limit)


def _make_plain(record: object, name: str, kind: type[int | float]) -> None:
    """Make one of numpy's own numbers Python's, as JSON takes no others."""
    value = getattr(record, name)
    if type(value) is not kind:
        if not hasattr(value, "__float__" if kind is float else "__index__"):
            raise TrajectoryError(f"{name} is {value!r:.40}; it must be of type {kind.__name__}")
        object.__setattr__(record, name, kind(value))


def _plain(value: Any) -> Any:
    """A checked name or number as Python's own: JSON takes neither numpy's nor a bool for one."""
    if type(value) in (int, float, str):
        return value
    return str.__str__(value) if isinstance(value, str) else float(value)


def _put_plain(record: object, name: str, value: Any) -> None:
    if (plain := _plain(value)) is not value:
        object.__setattr__(record, name, plain)


def _check_name(what: str, name: Any) -> None:
    """Raise TrajectoryError unless it is a str: others change on their way to the trainer's process, as JSON."""
    if not isinstance(name, str):
        raise TrajectoryError(f"{what} is {name!r:.40}; it must be a str")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """The token-level record that an episode returns. Token-level fields have length T = len(token_ids).

    Give any sequences of numbers for them. They become read-only numpy arrays of 13 bytes a token together. Two
    trajectories are equal if all their numbers are. Raises TrajectoryError naming the field that is wrong.
    """

    token_ids: IntColumn
    """int32: prompt, sampled and environment tokens, in the order in which the model saw them."""
    loss_mask: BoolColumn
    """bool: whether a token is trained; only sampled tokens can be."""
    behavior_logprobs: FloatColumn
    """float32: the sampler's logprob of each sampled token; 0.0 elsewhere."""
    versions: IntColumn
    """int32: the policy version that sampled each token; -1 where none did."""
    reward: float
    """The reward of the outcome."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """The named parts of the reward, for advantages that normalise them separately (GDPO)."""
    token_rewards: OptionalColumn = None  # pyright: ignore[reportAssignmentType] - it is given a sequence or None
    """float64, or None: process rewards beside the outcome, one for each token."""
    turns: tuple[TurnSpan, ...] = ()
    """Where each turn lies, in order. A turn can have a process reward."""
    is_truncated: bool = False
    """Whether a length limit ended the trajectory."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Name -> number; logs show the mean over episodes."""
    role: str = AGENT
    """The agent's role, in multi-agent episodes."""
    temperature: float = 1.0
    """Logits are divided by this before logprobs, for every sampled token."""
    kept_ids: KeptIds | None = None
    """The ids from which each token was sampled; None: each from the whole vocabulary. Logprobs are over these ids
    alone, so without them a response under a grammar would be trained with wrong logprobs. Such an episode fails."""
    routes: Routes | None = None
    """For a mixture of experts: the experts that computed each token. The trainer uses the same."""
    images: tuple[PlacedImage, ...] = ()
    """What the model saw at the placeholders among token_ids, in order. Equal images are held once."""
    arrays: Arrays = field(default_factory=no_arrays)
    """For a model of another kind (docs/extending.md): what it needs of each token beside the id, such as the latents
    of a denoising step. Name -> numpy array of numbers, whose first axis is the tokens; it becomes read-only. With
    arrays, logprobs may be above 0, as those of densities are."""
    num_trained_tokens: int = field(init=False, repr=False)
    oldest_version: int | None = field(init=False, repr=False)
    """The smallest version among trained tokens; None when no token is trained."""
    newest_version: int | None = field(init=False, repr=False)
    """The largest version among trained tokens; None when no token is trained."""

    def __post_init__(self) -> None:
        if (n := len(self.token_ids)) == 0:
            raise TrajectoryError("token_ids is empty; return None from arun_episode to reject an episode")
        for name in COLUMNS:
            values = getattr(self, name)
            if values is not None and len(values) != n:
                raise TrajectoryError(f"{name} has {len(values)} entries for {n} token_ids; they must be equal")
        if flaw := _arrays_flaw(self.arrays, len(self.token_ids), "token_ids"):
            raise TrajectoryError(flaw)
        self._build_columns()
        self._check_numbers()
        self._check_parts()
        if self.loss_mask.item(0):
            raise TrajectoryError("loss_mask[0] is 1; the first token has no context and so no logprob to train")

    def __eq__(self, other: object) -> bool:
        from arl.api.token_arrays import are_equal

        if not isinstance(other, Trajectory):
            return NotImplemented
        return all(are_equal(getattr(self, name), getattr(other, name)) for name in self.__slots__)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy's fields are not checked again. (Python 3.11.3 and older would ignore a __setstate__ here.)"""
        return _trajectory_of, tuple(getattr(self, name) for name in self.__slots__)

    def _build_columns(self) -> None:
        from arl.api import token_arrays

        put = object.__setattr__
        if self.arrays:
            put(self, "arrays", token_arrays.kept_arrays(self.arrays))
        put(self, "token_ids", token_arrays.integers("token_ids", self.token_ids, 0, _MOST, _TOKEN_ID))
        if self.token_rewards is not None:
            put(self, "token_rewards", token_arrays.rewards("token_rewards", self.token_rewards, MAX_REWARD))
        logprobs = token_arrays.logprobs(
            "behavior_logprobs", self.behavior_logprobs, MAX_NUMBER, may_be_positive=bool(self.arrays)
        )
        put(self, "behavior_logprobs", logprobs)
        mask = token_arrays.integers("loss_mask", self.loss_mask, 0, 1, "0 or 1")
        put(self, "loss_mask", mask)
        versions = token_arrays.integers("versions", self.versions, NOT_SAMPLED, _MOST, _VERSION)
        put(self, "versions", versions)
        trained = versions[mask]
        put(self, "num_trained_tokens", trained.size)
        put(self, "oldest_version", trained.item(trained.argmin()) if trained.size else None)
        put(self, "newest_version", trained.item(trained.argmax()) if trained.size else None)
        if self.oldest_version == NOT_SAMPLED:
            t = int((mask & (versions == NOT_SAMPLED)).argmax())
            raise TrajectoryError(f"loss_mask[{t}] is 1 but versions[{t}] is -1: only sampled tokens are trained")

    def _check_parts(self) -> None:
        """Turns, kept ids, routes and images."""
        n, end = len(self.token_ids), 0
        for turn in self.turns:
            if turn.start < end:
                raise TrajectoryError(f"a turn begins at token {turn.start}, before the one before it ends at {end}")
            end = turn.stop
        if end > n:
            raise TrajectoryError(f"a turn ends at token {end}, but there are {n} token_ids")
        if self.kept_ids is not None:
            if flaw := _kept_ids_flaw(self.kept_ids, self.token_ids):
                raise TrajectoryError(flaw)
            object.__setattr__(self, "kept_ids", self.kept_ids.packed())  # it may wait for long
        if self.routes is not None and len(self.routes) != n:
            raise TrajectoryError(f"routes has {len(self.routes)} entries for {n} token_ids; they must be equal")
        if flaw := placement_flaw(self.images, n):
            raise TrajectoryError(flaw)
        for number, placed in enumerate(self.images):
            if self.loss_mask[placed.start : placed.stop].any():
                raise TrajectoryError(f"loss_mask is 1 within image {number}, whose placeholders nobody sampled")

    def _check_numbers(self) -> None:
        _check_number("reward", self.reward, MAX_REWARD)
        _check_name("role", self.role)
        _put_plain(self, "reward", self.reward)
        _put_plain(self, "role", self.role)
        for name, numbers, limit in (("metrics", self.metrics, MAX_NUMBER), ("rewards", self.rewards, MAX_REWARD)):
            for key, value in numbers.items():
                _check_name(f"a name in {name}", key)
                _check_number(f"{name}[{key!r}]", value, limit)
            if not all(type(value) in (int, float) for value in numbers.values()):
                object.__setattr__(self, name, {_plain(key): _plain(value) for key, value in numbers.items()})
        _make_plain(self, "temperature", float)
        object.__setattr__(self, "is_truncated", bool(self.is_truncated))
        if not MIN_TEMPERATURE <= self.temperature <= MAX_NUMBER:
            bounds = f"at least {MIN_TEMPERATURE}, and finite"
            raise TrajectoryError(f"temperature is {self.temperature}; it must be {bounds}")

    def _repr_html_(self) -> str:
        """For a notebook. `arl.show` knows the text of the tokens, too."""
        from arl.api.html import trajectory_html

        return trajectory_html(self)

    @property
    def process_rewards(self) -> list[float]:
        """The rewards of its turns and tokens, which come on top of the outcome's."""
        of_turns = [turn.reward for turn in self.turns]
        return of_turns if self.token_rewards is None else of_turns + self.token_rewards.tolist()

    @property
    def total_reward(self) -> float:
        """Outcome and process rewards, added up."""
        return math.fsum((self.reward, *self.process_rewards))


def _trajectory_of(*values: Any) -> Trajectory:
    """values: all fields of a trajectory that was built elsewhere, in their order."""
    made = object.__new__(Trajectory)
    for name, value in zip(Trajectory.__slots__, values, strict=True):
        object.__setattr__(made, name, value)
        if name in COLUMNS and value is not None:
            value.flags.writeable = False
    for array in made.arrays.values():
        array.flags.writeable = False
    return made


COLUMNS = ("token_ids", "loss_mask", "behavior_logprobs", "versions", "token_rewards")
"""The token-level fields of Trajectory. The last may be None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The finished episodes of one example: the unit of admission, staleness and advantages."""

    group_id: int
    """Unique in a run."""
    example_id: tuple[int, int]
    """(epoch, index in the dataset), of its task if there are several."""
    stamp: int
    """The published version when the group was admitted."""
    trajectories: tuple[Trajectory, ...]
    episode_indices: tuple[int, ...]
    """For each trajectory, the index of the episode that returned it."""
    greedy_rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """role -> reward of the greedy episode, the baseline of ReMax; empty without a greedy episode."""
    example: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The example's columns as JSON values: 2,000 characters of each, and some 20,000 of all."""
    task: str = ""
    """The name of its task; "" in a run without tasks."""

    def __post_init__(self) -> None:
        if len(self.trajectories) != len(self.episode_indices):
            raise ValueError("a group needs one episode index for each of its trajectories")

    def _repr_html_(self) -> str:
        """For a notebook."""
        return self.html()

    def html(self, pieces: Sequence[Sequence[str]] | None = None) -> str:
        """The HTML that a notebook shows. pieces: the text of each trajectory's first tokens, if it is known."""
        from arl.api.html import several_html

        facts = {
            **({"task": self.task} if self.task else {}),
            "example": f"{self.example_id[1]} of epoch {self.example_id[0]}",
            "episodes": str(self.num_episodes),
            "admitted at version": str(self.stamp),
        }
        return several_html(f"Group {self.group_id}", facts, self.trajectories, pieces)

    @property
    def num_episodes(self) -> int:
        return len(set(self.episode_indices))

    @property
    def oldest_version(self) -> int:
        """The oldest version of a trained token; the stamp when nothing is trained."""
        versions = [v for trajectory in self.trajectories if (v := trajectory.oldest_version) is not None]
        return min(versions, default=self.stamp)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """The statistics of one training step. `async for step in trainer` yields them. Times are in wall-clock seconds."""

    version: int
    """The trainer's version after the step."""
    reward: float
    """Mean reward over the batch's episodes."""
    num_episodes: int
    mean_staleness: float
    max_staleness_seen: int
    """Largest staleness among the batch's trained tokens."""
    wait_s: float
    """How long the trainer waited for the batch."""
    train_s: float
    """Advantages, proximal logprobs and optimizer steps took this long."""
    metrics: Mapping[str, float]
    """All metrics of the step, flat, as in metrics.jsonl."""
    remark: str = ""
    """A few words about what has begun to look wrong (docs/healthy.md); empty in most steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Results on the held-out examples at one version."""

    version: int
    reward: float
    """Mean over all episodes; with names, the mean of the rewards of those that each evaluation plays. A failed episode
    counts as 0."""
    num_episodes: int
    num_failed: int
    wall_s: float
    """Duration in seconds."""
    metrics: Mapping[str, float]
    """Means of the workflow's metrics and of the parts of its reward; with several episodes an example, pass@k. With
    names, means of theirs. at_version: the share of the sampled tokens that are of `version`."""
    by_name: Mapping[str, Evaluation] | None = None
    """The results on each held-out dataset that was played, if they have names."""
    standard_error: float | None = None
    """The standard error of `reward`: the standard deviation of the examples' rewards over the root of their number.
    None with one example, and in rows that do not have it."""


Example = Mapping[str, Any]
"""A dataset row, as `arun_episode` receives it."""
