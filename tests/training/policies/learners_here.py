"""Learners of several policies in this process, with real engines: what they train is what processes would train."""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from arl.api.settings.engines import PolicyRoles
from arl.api.settings.run import Config
from arl.api.train_engine import Saving
from arl.api.types import Group
from arl.run.learner import host_learner
from arl.run.servers import of_policy
from arl.training.batch_codec import FlatBatch
from arl.training.learner_process import RemoteBatch
from arl.training.learner_recovery import RecoveringLearner
from arl.training.policies import PolicyLearners

_ONE_AT_A_TIME = Lock()
"""Torch's process group is this process's."""
ROLES = {"solver": "writer", "critic": "reader"}
"""The roles of random_groups, and their policies here."""


class LearnerHere:
    """Stands for a RemoteLearner; see there."""

    num_ranks = 1

    def __init__(self, config: Config) -> None:
        with _ONE_AT_A_TIME:
            self._host = host_learner(config)
        self.engine = self._host._learner.engine

    @property
    def version(self) -> int:
        return self._host.version()

    def prepare_flat(self, batch: FlatBatch) -> RemoteBatch:
        with _ONE_AT_A_TIME:
            return RemoteBatch(advantages=self._host.prepare(batch))

    def train(self, batch: RemoteBatch) -> Any:
        with _ONE_AT_A_TIME:
            return self._host.train()[0]

    def save(self, directory: Path) -> Saving:
        with _ONE_AT_A_TIME:
            return self._host._learner.save(directory)

    def load(self, directory: Path) -> None:
        with _ONE_AT_A_TIME:
            self._host.load(directory)

    def weights(self) -> dict[str, Any]:
        with _ONE_AT_A_TIME:
            return dict(self._host._learner.fingerprint())

    def whereabouts(self) -> str:
        return "here"

    def close(self) -> None:
        self._host.close()


def settings(model: Path, run_dir: Path, **changes: Any) -> Config:
    policies = {policy: {"roles": [role]} for role, policy in ROLES.items()}
    policies["reader"]["lr"] = 3e-3
    return Config.model_validate(
        {
            "model": str(model),
            "run_dir": str(run_dir),
            "rollout": {"batch_size": 4, "group_size": 6, "max_staleness": 4},
            "train": {"optimizer": {"lr": 1e-3, "eps": 1e-3}, "max_tokens_per_microbatch": 60},
            "policies": policies,
            **changes,
        }
    )


def alone(config: Config, policy: str) -> LearnerHere:
    """A learner as a run of this policy alone has it."""
    return LearnerHere(of_policy(config, policy))


def together(config: Config) -> PolicyLearners:
    def start(name: str) -> RecoveringLearner:
        begin: Any = partial(LearnerHere, of_policy(config, name))
        return RecoveringLearner(begin, config.run_dir / "checkpoints", config.train, within=f"engine/{name}")

    return PolicyLearners({name: partial(start, name) for name in config.policies}, PolicyRoles.of(config.policies))


def of_role(role: str, groups: Sequence[Group]) -> list[Group]:
    """The slow twin of share_of, for roles of one policy each."""
    return [_of_role(role, group) for group in groups]


def _of_role(role: str, group: Group) -> Group:
    pairs: Iterable[tuple[Any, int]] = [
        (t, i) for t, i in zip(group.trajectories, group.episode_indices, strict=True) if t.role == role
    ]
    return Group(
        group_id=group.group_id,
        example_id=group.example_id,
        stamp=group.stamp,
        trajectories=tuple(t for t, _ in pairs),
        episode_indices=tuple(i for _, i in pairs),
        greedy_rewards={role: group.greedy_rewards[role]} if role in group.greedy_rewards else {},
    )
