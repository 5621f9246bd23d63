"""Composes what the trainer's process computes: the learner, and the train engines of its policy and its critic.

Functions import what is heavy, because the controller's process names them without calling them.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arl.api.config import Config
from arl.api.engine import Head, TrainEngine
from arl.api.engine_config import TrainConfig
from arl.api.errors import ConfigError
from arl.engine.model_files import load_tokenizer
from arl.training.remote_learner import LearnerHost

if TYPE_CHECKING:
    from arl.training.learner import Learner


def load_train_engine(
    model: str | Path, settings: TrainConfig | None = None, *, seed: int = 0, head: Head = "policy"
) -> TrainEngine:
    """The train engine alone, on as many ranks as `settings` says, for fine-tuning; see docs/finetuning.md.

    seed: initialises a head that the model lacks. head: the head to train; "value" for a reward model. Close the
    engine after use. Raises ConfigError, ModelError.
    """
    settings, hook = settings or TrainConfig(), sys.excepthook
    try:
        if settings.num_ranks == 1:
            from arl.engine.fsdp.train_engine import FSDPTrainEngine

            return FSDPTrainEngine(str(model), settings, seed, head)
        from arl.engine.fsdp.ray_engine import RayTrainEngine

        return RayTrainEngine(str(model), settings, seed, head)
    finally:
        sys.excepthook = hook  # torch's would begin every later traceback of this process with [rank0]


def host_learner(config: Config) -> LearnerHost:
    """The learner of a run, as a RemoteLearner calls it. Raises ConfigError, ModelError, TrainingError."""
    from arl.eventlog.token_frames import frames_of

    return LearnerHost(load_learner(config), frames_of)


def load_learner(config: Config) -> Learner:
    """The policy's engine; and the critic's beside it, if any. A failure closes what was built."""
    from arl.training.learner import Learner

    _check_critics_tokens(config)
    with ExitStack() as stack:
        engines: list[TrainEngine] = []
        for model, train, head in _loads(config):
            engine: Any = load_train_engine(model, train, seed=config.seed, head=head)
            stack.callback(engine.close)
            if train.num_ranks > 1:
                engine.check_shares(config.run_dir)
            engines.append(engine)
        learner = Learner(
            engines[0],
            config.algorithm,
            critic=engines[1] if len(engines) > 1 else None,
            max_staleness=config.rollout.max_staleness,
            seed=config.seed,
            events=config.log.events,
        )
        stack.pop_all()
    return learner


def _check_critics_tokens(config: Config) -> None:
    """Raise ConfigError for a critic whose tokens differ from the policy's; it may know more tokens."""
    critic = config.algorithm.critic
    if critic is None or critic.model is None:
        return
    vocabulary, known = (load_tokenizer(model).get_vocab() for model in (config.model, critic.model))
    if not vocabulary.items() <= known.items():
        token = next(token for token, i in vocabulary.items() if known.get(token) != i)
        raise ConfigError(
            f"algorithm.critic.model {critic.model} has other tokens than {config.model}: {token!r} is "
            f"{known.get(token, 'none')} there and {vocabulary[token]} here; use a critic of the same family"
        )


def _loads(config: Config) -> list[tuple[str, TrainConfig, Head]]:
    train, critic = config.train, config.algorithm.critic
    if critic is None:
        return [(config.model, train, "policy")]
    if train.num_ranks > 1:
        from arl.engine.fsdp.ray_engine import check_gpus

        check_gpus(train, num_engines=2)
    optimizer = train.optimizer.model_copy(update={"lr": critic.lr})
    own = train.model_copy(update={"optimizer": optimizer})
    return [(config.model, train, "policy"), (critic.model or config.model, own, "value")]
