"""The settings of each policy's part of a run of several."""

from __future__ import annotations

from typing import Any

from arl.api.settings.engines import (
    AdapterWeightsConfig,
    LocalEngineConfig,
    RunningServersConfig,
    ServerProcessesConfig,
)
from arl.api.settings.run import Config


def shares_servers(config: Config) -> bool:
    """Whether all policies are adapters on the same servers; else each has servers of its own."""
    return isinstance(config.weights, AdapterWeightsConfig)


def of_policy(config: Config, name: str) -> Config:
    """The settings of one policy's trainer and servers, with files of their own beneath run_dir."""
    policy = config.policies[name]
    train, engine = config.train, config.engine
    optimizer = train.optimizer.model_copy(update={"lr": policy.lr or train.optimizer.lr})
    train = train.model_copy(update={"optimizer": optimizer, "device": policy.device or train.device})
    if not shares_servers(config):
        engine = engine.model_copy(update=_of_servers(config, name))
    return config.model_copy(
        update={
            "model": policy.model or config.model,
            "run_dir": config.run_dir / "policies" / name,
            "train": train,
            "engine": engine,
            "policies": {},
        }
    )


def _of_servers(config: Config, name: str) -> dict[str, Any]:
    """What sets the policy's own servers apart."""
    policy, engine = config.policies[name], config.engine
    if isinstance(engine, LocalEngineConfig):
        return {"device": policy.device or engine.device}
    if isinstance(engine, RunningServersConfig):
        return {"addresses": policy.addresses or engine.addresses}
    assert isinstance(engine, ServerProcessesConfig)
    place = [*config.policies].index(name)
    return {"first_gpu": engine.first_gpu + place * engine.num_servers * engine.gpus_per_server}
