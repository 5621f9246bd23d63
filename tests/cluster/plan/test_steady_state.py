"""The analytic model: laws that it keeps, and how far it is from the real controller, buffer and ledger."""

import asyncio
import json
import math
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from made_costs import made_costs, made_workload
from records import trajectory
from virtual_time import run_in_virtual_time

from arl.api.errors import ConfigError
from arl.api.settings.run import RolloutConfig
from arl.api.types import Example, Trajectory
from arl.api.workflow import RolloutWorkflow
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
    guessed,
)
from arl.cluster.plan.prediction import Errors, Prediction, errors_of, limit_of, predict, search
from arl.cluster.plan.steady_state import Steady
from arl.rollout.buffer import ReplayBuffer
from arl.rollout.controller import RolloutController
from arl.rollout.episode import EpisodeRunner

STORED = json.loads((Path(__file__).parent / "stored_settings.json").read_text())
"""`settings`: the real controller, buffer, ledger and delivery in virtual time, with servers simulated iteration by
iteration, with `costs` that were fitted to a run of benchmarks/plan.py; `guessed_settings`: with those of `guess`."""
RELATIVE = {"episodes_per_s": "throughput", "step_s": "throughput", "request_s": "request_s", "running_episodes": ""}
DIFFERENT = {"trainer_idle": "", "servers_idle": "", "controller": "", "mean_staleness": "staleness"}


@cache
def stored() -> list[tuple[dict[str, Any], Prediction]]:
    costs, guess = msgspec.convert(STORED["costs"], Costs), dict(STORED["guess"])
    found = [(one, predict(costs, costs.deployment.changed(**one["changes"]))) for one in STORED["settings"]]
    base = Deployment(**guess.pop("deployment"))
    costs = guessed(deployment=base, **guess)
    return found + [(one, predict(costs, base.changed(**one["changes"]))) for one in STORED["guessed_settings"]]


@pytest.mark.parametrize(("number", "error"), [*RELATIVE.items(), *DIFFERENT.items()])
def test_nine_of_ten_stored_settings_are_within_the_errors_that_are_printed(number: str, error: str) -> None:
    allowed = getattr(Errors(), error or number)
    off = sorted(
        abs(getattr(said, number) / was[number] - 1 if number in RELATIVE else getattr(said, number) - was[number])
        for was, said in stored()
    )
    assert len(off) > 40
    assert off[math.ceil(0.9 * len(off)) - 1] <= allowed


def alike(*, prompt: int = 1, new: int = 10, tool_s: float = 0.0, number: int = 4) -> Workload:
    turn = MeasuredTurn(prompt_tokens=prompt, new_tokens=new, tool_s=tool_s)
    return Workload(episodes=tuple(MeasuredEpisode(group=0, turns=(turn,), tokens=new) for _ in range(number)))


def plain_costs(
    workload: Workload, *, train_s: float = 1.0, publish_s: float = 0.0, iteration_s: float = 1e-3
) -> Costs:
    return Costs(
        decode=DecodeCosts(points=((1, iteration_s),), max_running_requests=10_000),
        prefill=PrefillCosts(per_token_s=0.0),
        trainer=TrainerCosts(base_s=train_s, per_token_s=0.0),
        publish=PublishCosts(transfer_s=publish_s),
        workload=workload,
    )


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 5])
@pytest.mark.parametrize("tool_s", [0.5, 7.0])
@pytest.mark.parametrize("publish_s", [0.0, 2.0])
def test_without_load_a_step_takes_what_the_bound_on_staleness_says(
    max_staleness: int, tool_s: float, publish_s: float
) -> None:
    costs = plain_costs(alike(tool_s=tool_s), publish_s=publish_s)
    said = predict(costs, Deployment(batch_size=4, group_size=4, max_staleness=max_staleness))
    episode_s = tool_s + 10.5e-3
    assert said.step_s == pytest.approx(max(1.0, (1.0 + publish_s + episode_s) / (max_staleness + 1)), rel=0.01)


class _Engine:
    version = 0


class _Sleeps(RolloutWorkflow):
    """Episodes that take the times of a workload's tools."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine

    async def arun_episode(self, engine: object, data: Example) -> Trajectory | None:
        began = self._engine.version
        await asyncio.sleep(next(data["seconds"]))
        return trajectory((began,))


class _Groups:
    def __init__(self, workload: Workload) -> None:
        self._seconds = [episode.turns[0].tool_s for episode in workload.episodes]
        self._draw = random.Random(1)

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, row: int) -> Example:
        return {"seconds": self._drawn(row)}

    def _drawn(self, row: int) -> Iterator[float]:
        group = self._seconds[row * 4 % len(self._seconds) :][:4]
        while True:
            yield from self._draw.sample(group, len(group))


async def really_step_s(deployment: Deployment, workload: Workload, train_s: float, publish_s: float) -> float:
    """Mean seconds of a step of the real controller and buffer, trained and published by sleeping."""

    engine, buffer = _Engine(), ReplayBuffer(deployment.batch_size, deployment.max_staleness)
    config = RolloutConfig(
        batch_size=deployment.batch_size,
        group_size=deployment.group_size,
        max_staleness=deployment.max_staleness,
        max_concurrent_episodes=deployment.max_concurrent_episodes,
        shuffle=False,
    )
    runner = EpisodeRunner(workflow=_Sleeps(engine), timeout_s=1e9, retries=0, newest_version=lambda: engine.version)
    controller = RolloutController(cast(Any, engine), runner, _Groups(workload), config, buffer)
    clock, ends = asyncio.get_running_loop().time, list[float]()

    async def publish(version: int) -> None:
        await asyncio.sleep(publish_s)
        engine.version = max(version, engine.version)
        await buffer.published(engine.version)

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(controller.run())
        for version in range(120):
            groups = await buffer.take_batch(version)
            await asyncio.sleep(train_s)
            controller.trained(groups)
            tasks.create_task(publish(version + 1))
            ends.append(clock())
        running.cancel()
    return (ends[-1] - ends[19]) / 100


@pytest.mark.parametrize(
    ("changes", "train_s", "publish_s"),
    [
        ({"max_staleness": 0}, 2.0, 0.5),
        ({"max_staleness": 1}, 2.0, 0.5),
        ({"max_staleness": 3}, 2.0, 0.5),
        ({"max_staleness": 2, "batch_size": 2}, 0.3, 3.0),
        ({"max_staleness": 2, "max_concurrent_episodes": 12}, 0.5, 0.5),
        ({"max_staleness": 4}, 9.0, 0.5),
    ],
)
def test_the_model_agrees_with_the_real_controller_and_buffer(
    changes: dict[str, Any], train_s: float, publish_s: float
) -> None:
    draw = random.Random(0)
    turns = [MeasuredTurn(prompt_tokens=1, new_tokens=1, tool_s=draw.lognormvariate(0, 1)) for _ in range(400)]
    episodes = (MeasuredEpisode(group=i // 4, turns=(turn,), tokens=1) for i, turn in enumerate(turns))
    workload = Workload(episodes=tuple(episodes))
    deployment = Deployment(batch_size=8, group_size=4).changed(**changes)
    said = predict(plain_costs(workload, train_s=train_s, publish_s=publish_s, iteration_s=1e-6), deployment)
    real_s = run_in_virtual_time(really_step_s(deployment, workload, train_s, publish_s))
    assert said.step_s == pytest.approx(real_s, rel=0.08)


@pytest.mark.parametrize("shared", [False, True])
def test_more_of_anything_does_not_slow_a_run_down(shared: bool) -> None:
    costs = made_costs(shared=shared)
    before = predict(costs, costs.deployment).episodes_per_s
    more = [{"max_staleness": 4}, {"max_concurrent_episodes": 10_000}, {"tool_factor": 0.5}]
    more += [] if shared else [{"num_servers": 3}, {"num_ranks": 2}]  # on shared cores they take time from others
    for changes in more:
        assert predict(costs, costs.deployment.changed(**changes)).episodes_per_s > 0.98 * before, changes
    for places in (2, 8, 32):
        fewer = predict(costs, costs.deployment.changed(max_concurrent_episodes=places))
        assert fewer.episodes_per_s < 1.02 * before
        assert fewer.running_episodes < 1.02 * places


@pytest.mark.parametrize("seed", range(4))
def test_nothing_gets_lost(seed: int) -> None:
    costs = made_costs(seed)
    said, run = predict(costs, costs.deployment), Steady(costs, costs.deployment)
    assert said.trainer_trains + said.trainer_copies + said.trainer_idle == pytest.approx(1)
    assert said.servers_compute + said.servers_load + said.servers_idle == pytest.approx(1)
    assert sum(said.staleness.values()) == pytest.approx(1)
    assert max(said.staleness) <= costs.deployment.max_staleness
    assert said.episodes_per_s * said.step_s == pytest.approx(16)
    num_turns = sum(len(episode.turns) for episode in costs.workload.episodes) / len(costs.workload.episodes)
    assert said.requests_per_s == pytest.approx(num_turns * said.episodes_per_s, rel=0.02)
    assert said.running_episodes == pytest.approx(said.episodes_per_s * run.mean_s, rel=0.02)  # Little's law


def test_a_server_that_is_full_decodes_as_many_tokens_as_it_can() -> None:
    decode = DecodeCosts(points=((1, 0.01),), max_running_requests=8)
    costs = msgspec.structs.replace(plain_costs(alike(new=100)), decode=decode)
    said = predict(costs, Deployment(batch_size=32, group_size=8, max_staleness=3))
    assert said.tokens_per_s == pytest.approx(8 / 0.01, rel=0.03)


def test_groups_that_are_not_trained_cost_their_share_of_the_servers() -> None:
    equal = msgspec.structs.replace(made_costs(shared=False), trainer=TrainerCosts(per_token_s=1e-9))
    dropping = equal.deployment.changed(drop_equal_rewards=True)
    said, whole = predict(equal, dropping), predict(equal, equal.deployment)
    assert 0.02 < said.untrained < 0.5
    assert said.episodes_per_s < whole.episodes_per_s
    failed = made_costs(workload=made_workload(how="failed"))
    with pytest.raises(ConfigError, match="no measured group can be trained"):
        predict(failed, failed.deployment)


def test_processes_that_always_compute_on_one_core_take_as_many_times_as_long() -> None:
    costs = plain_costs(alike(new=1000), train_s=1.0)
    deployment = Deployment(batch_size=16, group_size=4, max_staleness=8)
    alone, both = (
        predict(msgspec.structs.replace(costs, shared=shared), deployment)
        for shared in (None, SharedCores(cores=1, controller=0))
    )
    assert both.step_s == pytest.approx(2 * alone.step_s, rel=0.1)


def test_an_update_takes_time_from_servers_and_more_if_requests_are_read_again() -> None:
    costs = msgspec.structs.replace(
        plain_costs(alike(prompt=1000, new=400)),
        publish=PublishCosts(load_s=0.2),
        prefill=PrefillCosts(per_token_s=1e-5),
    )
    steps_s = [
        predict(costs, Deployment(batch_size=4, group_size=4, max_staleness=2, pause_mode=mode)).step_s
        for mode in ("in_place", "retract")
    ]
    assert steps_s[0] > predict(plain_costs(alike(new=400)), Deployment(batch_size=4, group_size=4)).step_s
    assert steps_s[1] >= steps_s[0]


def test_the_limit_is_what_helps_most_to_have_more_of() -> None:
    def limit(costs: Costs, **changes: Any) -> str:
        return limit_of(costs, Deployment(batch_size=4, group_size=4).changed(**changes))[0]

    slow_trainer = msgspec.structs.replace(plain_costs(alike()), trainer=TrainerCosts(per_token_s=1.0))
    assert limit(slow_trainer) == "trainer"
    assert limit(plain_costs(alike(tool_s=60.0))) == "staleness"
    assert limit(plain_costs(alike(tool_s=9.0)), max_concurrent_episodes=4) == "episodes"
    busy = msgspec.structs.replace(plain_costs(alike(), train_s=1e-3), controller=ControllerCosts(per_request_s=0.1))
    assert limit(busy) == "controller"
    full = msgspec.structs.replace(
        plain_costs(alike(new=500), train_s=0.1), decode=DecodeCosts(points=((1, 0.01),), max_running_requests=2)
    )
    assert limit(full) == "servers"


def test_memory_is_split_over_ranks_and_grows_with_the_requests_of_a_server() -> None:
    memory = MemoryCosts(server_weights=10**9, kv_per_token=1000, trainer_state=8 * 10**9, per_rank=10**9)
    costs = made_costs(memory=memory)
    one, four = (predict(costs, costs.deployment.changed(num_ranks=ranks)) for ranks in (1, 4))
    assert (one.rank_bytes, four.rank_bytes) == (9e9, 3e9)
    few, many = (predict(costs, costs.deployment.changed(max_concurrent_episodes=places)) for places in (2, 64))
    assert 10**9 < few.server_bytes < many.server_bytes


def test_what_was_not_measured_is_named() -> None:
    measured = Measured(num_servers=(1, 1), num_ranks=(1, 1), running_requests=(1, 1000), step_tokens=(1, 10**6))
    costs = made_costs(measured=measured)
    assert predict(costs, costs.deployment).extrapolated == ()
    assert predict(costs, costs.deployment.changed(num_servers=3)).extrapolated == ("3 servers (1 to 1 measured)",)
    assert predict(made_costs(), costs.deployment).extrapolated == ("nothing of this was measured",)


def test_errors_are_those_of_the_stored_settings_or_larger_ones_on_the_measured_run() -> None:
    assert errors_of(made_costs()) is None
    measured = Measured(num_servers=(1, 1))
    assert errors_of(made_costs(measured=measured)) == Errors()
    own = predict(made_costs(), made_costs().deployment).episodes_per_s / 1.5
    off = errors_of(made_costs(measured=msgspec.structs.replace(measured, episodes_per_s=own)))
    assert off is not None
    assert off.throughput == pytest.approx(0.5)


@pytest.mark.parametrize("budget", [None, 6])
def test_a_search_finds_about_the_best_of_all_splits(budget: int | None) -> None:
    costs = made_costs(shared=False)
    plan = search(costs, costs.deployment, servers=(1, 6), ranks=(1, 4), budget=budget)
    splits = [costs.deployment.changed(num_servers=s, num_ranks=r) for s in range(1, 7) for r in range(1, 5)]
    fastest = max(predict(costs, split).episodes_per_s for split in splits if split.num_gpus <= (budget or 99))
    assert plan.best.episodes_per_s > 0.93 * fastest
    assert all(one.deployment in splits and one.deployment.num_gpus <= (budget or 99) for one in plan.tried)
    assert plan.best.hour_cost == min(p.hour_cost for p in plan.tried if p.episodes_per_s >= plan.best.episodes_per_s)


def test_a_trainer_that_does_not_fit_into_its_memory_is_not_the_best() -> None:
    memory = MemoryCosts(trainer_state=8 * 10**9, rank_total=3 * 10**9)
    costs = made_costs(shared=False, memory=memory)
    plan = search(costs, costs.deployment, servers=(1, 2), ranks=(1, 4))
    assert plan.best.deployment.num_ranks >= 3
