"""Composes what the trainer's process computes: the learner, and the train engines of the policy and models beside it.

Functions import what is heavy, because the controller's process names them without calling them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from arl.api.errors import ConfigError
from arl.api.events import KeptTokens, Placed, PlacedPart, TokenFrame
from arl.api.settings.engines import LocalEngineConfig, TrainConfig
from arl.api.settings.objective import CriticConfig, RewardModelConfig
from arl.api.settings.run import Config
from arl.api.train_engine import Head, TrainEngine
from arl.cluster.placement import check, planned_trainer, shared_gpus
from arl.engine.model_files import check_same_tokens
from arl.runtime.processes.rpc import SentObject
from arl.training.learner_process import LearnerHost

if TYPE_CHECKING:
    from arl.cluster.node_checks import NodeReport
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
        if not settings.is_over_ray:
            from arl.engine.fsdp.train_engine import FSDPTrainEngine

            return FSDPTrainEngine(str(model), settings, seed, head)
        from arl.engine.fsdp.ray_engine import RayTrainEngine

        return RayTrainEngine(str(model), settings, seed, head)
    finally:
        sys.excepthook = hook  # torch's would begin every later traceback of this process with [rank0]


def host_learner(config: Config, *, looks_at_nodes: bool = False, own: SentObject | None = None) -> LearnerHost:
    """The learner of a run, as a RemoteLearner calls it. Raises ConfigError, ModelError, TrainingError.

    looks_at_nodes: look for mistakes on the nodes of a cluster before anything is loaded there. Where there is no room
    for all ranks, and train.min_ranks allows it, the learner has fewer. own: the user's own TrainEngineLoader.
    """
    report = _checked_nodes(config) if looks_at_nodes else None
    with ExitStack() as stack:
        config, has_room = _with_room(stack, config)
        learner = load_learner(config) if own is None else load_learner(config, own.received())
    try:
        shared, findings = (report.shared, report.findings) if report else ([], [])
        placed = Placed(parts=_ranks(config, learner), shared=shared, findings=findings)
        return LearnerHost(
            learner,
            _packed,
            placed,
            config.train.num_ranks,
            has_room,
            is_recorded=config.record,
            is_exact=config.train.dtype == "float32",
        )
    except BaseException:
        learner.close()
        raise


def _packed(blocks: Sequence[KeptTokens]) -> Iterator[TokenFrame]:
    from arl.observe.events.batches import frames_of  # loads pyarrow, which a run without an event log does not need

    return frames_of(blocks)


def _with_room(stack: ExitStack, config: Config) -> tuple[Config, Callable[[], bool]]:
    """The settings with as many ranks as there is room for; and whether there is room for the others, too, by now."""
    train, counts = config.train, config.train.rank_counts(config.rollout.batch_size)
    if len(counts) == 1:
        return config, lambda: False
    from arl.engine.fsdp.ray_engine import RankRoom

    room = RankRoom(train, num_engines=len(config.algorithm.trained_models))
    stack.callback(room.close)
    count = room.wait(counts)
    fewer = train.model_copy(update={"num_ranks": count})
    return config.model_copy(update={"train": fewer}), partial(room.has, train.num_ranks - count)


def _checked_nodes(config: Config) -> NodeReport | None:
    if config.train.ray_address is None or not config.train.is_over_ray:
        return None
    if config.engine_on_ray:  # its servers find their places meanwhile; a dry run looks at these
        config = config.model_copy(update={"engine": LocalEngineConfig()})
    report = asked_cluster(config)
    check(report.findings)
    return report


def asked_cluster(config: Config) -> NodeReport:
    """What the nodes of the cluster at train.ray_address say. Raises ConfigError if there is none."""
    from arl.cluster.node_checks import check_nodes
    from arl.cluster.ray_nodes import probes, ray_nodes
    from arl.engine.fsdp.ray_cluster import RayLease
    from arl.run.servers import with_named_servers

    config = with_named_servers(config)
    with ExitStack() as stack:
        lease = RayLease(config.train.ray_address, num_cpus=0, num_gpus=0)
        stack.callback(lease.release)
        nodes = ray_nodes()
        return check_nodes(config, nodes, stack.enter_context(probes(nodes)))


def _ranks(config: Config, learner: Learner) -> list[PlacedPart]:
    """Where the engines are. Raises ConfigError if two ranks have one GPU."""
    if not config.train.is_over_ray:
        return [replace(part, pid=os.getpid()) for part in planned_trainer(config)]
    engines: dict[str, Any] = learner.engines
    places = [
        (replace(part, name=f"{role} rank {rank}"), gpu)
        for role, engine in engines.items()
        for rank, (part, gpu) in enumerate(engine.places())
    ]
    ranks = [part for part, _ in places]
    check(shared_gpus(ranks, [gpu for _, gpu in places]))
    return ranks


def load_learner(config: Config, load: Callable[..., TrainEngine] | None = None) -> Learner:
    """The policy's engine; and beside it a critic's or a reward model's, if any. A failure closes what was built.

    load: loads each engine instead of load_train_engine, from the same arguments. What it takes for models is not
    looked at.
    """
    from arl.training.learner import Learner

    if load is None:
        _check_models_beside(config)
    if config.train.is_over_ray:
        from arl.engine.fsdp.ray_engine import check_gpus

        check_gpus(config.train, config.algorithm.trained_models)
    with ExitStack() as stack:
        engines: dict[str, TrainEngine] = {}
        for role in config.algorithm.trained_models:
            model, train, head = config.model, config.train, "value" if role == "critic" else "policy"
            if role != "policy":
                section: CriticConfig | RewardModelConfig = getattr(config.algorithm, role)
                optimizer = train.optimizer.model_copy(update={"lr": section.lr})
                model, train = section.model or model, train.model_copy(update={"optimizer": optimizer})
            engine: Any = (load or load_train_engine)(model, train, seed=config.seed, head=head)
            stack.callback(engine.close)
            if train.is_over_ray:
                engine.check_shares(config.run_dir)
            engines[role] = engine
        learner = Learner(
            engines["policy"],
            config.algorithm,
            critic=engines.get("critic"),
            reward_model=engines.get("reward_model"),
            max_staleness=config.rollout.max_staleness,
            seed=config.seed,
            events=config.log.events,
        )
        stack.pop_all()
    return learner


def _check_models_beside(config: Config) -> None:
    """Raise ConfigError for a critic or reward model that cannot read what the policy does.

    Its tokens must be the policy's; it may know more. It must see if the policy does.
    """
    from arl.data.image_processor import sees_images

    for role in config.algorithm.trained_models[1:]:
        model = getattr(config.algorithm, role).model
        if model is None:
            continue
        check_same_tokens(f"algorithm.{role}.model", model, config.model, role.replace("_", " "))
        if sees_images(config.model) and not sees_images(model):
            remedy = "use an advantage estimator without a critic" if role == "critic" else "name one that sees"
            raise ConfigError(
                f"{config.model} sees images, and algorithm.{role}.model {model} does not; {remedy}, or train a model "
                "of texts"
            )
