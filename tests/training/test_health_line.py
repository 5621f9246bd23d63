"""The remark at the end of a step's line: none in runs that learn, the right one in those that do not, and seldom."""

import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from arl.api.settings.run import LogConfig
from arl.observe.health.rules import HealthLine
from arl.training.metrics_log import RunLog

FINE = {"reward": 0.5, "reward_min": 0.0, "reward_max": 1.0, "reward_std": 0.5, "entropy": 0.5, "truncated": 0.0}
FINE |= {"equal_groups": 0.1, "effective_sample_size": 1.0, "staleness/mean": 1.0, "behavior_kl_proximal": 1e-3}
COMPARING = {"algorithm": {"advantage": {"kind": "returns"}, "aggregation": "token_mean"}}
LONG_LOSSES = {"length/winning_tokens": 10.0, "length/losing_tokens": 25.0}

RECORDED = """
quickstart
    reward 0.68 0.96 0.98 0.98 0.98 0.98
    entropy 0.21 0.022 0.016 0.013 0.013 0.012
    equal_groups 0.28 0.78 0.88 0.88 0.87 0.9
healthy
    reward 0.52 0.66 0.73 0.74 0.8 0.82 0.83 0.82 0.84 0.89
    entropy 1 0.79 0.7 0.61 0.5 0.46 0.39 0.35 0.32 0.25
    equal_groups 0.025 0.081 0.15 0.24 0.31 0.34 0.42 0.46 0.55 0.67
hacking
    reward 0.59 0.76 0.86 0.9 0.95 0.95 0.97 0.97 0.98 0.98
    entropy 1.6 3.1 1.9 1.3 1.2 1.2 1.2 1.2 1.4 1.4
    equal_groups 0.05 0.26 0.44 0.65 0.8 0.85 0.89 0.84 0.89 0.93
    truncated 0.016 0.18 0.18 0.61 0.81 0.88 0.9 0.92 0.92 0.94
    episode/exact 0.44 0.14 0.021 0.0023 0.0039 0.00078 0.0023 0.00078 0.0023 0
collapse
    reward 0.67 0.86 0.62 0.58 0.56 0.62 0.6 0.52 0.67 0.62
    entropy 0.57 0.22 0.22 0.55 2.9 1.6 0.098 0.064 0.098 0.086
    equal_groups 0.29 0.71 0.71 0.79 0.84 0.89 0.81 0.89 0.9 0.86
    truncated 0.0023 0 0.0086 0.0094 0.29 0.17 0.077 0.35 0.013 0
    effective_sample_size 0.85 0.85 0.7 0.84 0.73 0.84 0.78 0.8 0.86 0.82
    behavior_kl_proximal 0.23 0.46 0.74 0.34 1 0.46 0.95 1.4 0.48 0.56
    clip_fraction 0.11 0.037 0.071 0.043 0.053 0.02 0.035 0.018 0.0072 0.018
stale
    reward 0.62 0.84 0.91 0.89 0.67 0.54 0.77 0.54 0.66 0.11
    entropy 0.88 0.41 0.097 0.17 0.048 0.09 0.088 0.05 0.063 0.12
    equal_groups 0.12 0.5 0.74 0.89 0.76 0.83 0.87 0.88 0.8 0.82
    truncated 0.0031 0.021 0.00078 0 0.17 0.28 0 0 0 0
    effective_sample_size 0.83 0.9 0.93 0.7 0.47 0.4 0.58 0.51 0.5 0.44
    behavior_kl_proximal 0.18 0.27 0.073 1.2 4 5.3 2.2 3.7 3.6 4.6
    clip_fraction 0.11 0.05 0.011 0.019 0.017 0.003 0.013 0.015 0.026 0.025
starved
    reward 0.038 0.041 0.063 0.048 0.096 0.053 0.082 0.08 0.063 0.054
    entropy 1.1 1.7 1.6 1.1 0.85 1 0.67 0.65 0.63 0.56
    equal_groups 0.92 0.92 0.89 0.92 0.9 0.93 0.89 0.89 0.92 0.94
    truncated 0 0.028 0.034 0.013 0.0031 0.0094 0 0 0 0
template
    reward 0 0 0 0 0 0 0 0 0 0
    entropy 0.81 0.8 0.8 0.8 0.8 0.8 0.81 0.8 0.8 0.8
    equal_groups 1 1 1 1 1 1 1 1 1 1
    truncated 1 1 1 1 1 1 1 1 1 1
"""
"""Means of ten steps each of the quickstart, and of the runs of docs/healthy.md. A metric that is left out was fine."""


def recorded(name: str) -> list[dict[str, Any]]:
    _, _, rest = RECORDED.partition(f"\n{name}\n")
    lines = takewhile(lambda line: line.startswith(" "), rest.splitlines())
    columns = {metric: [float(value) for value in values] for metric, *values in map(str.split, lines)}
    is_flat = not any(columns["reward"])
    bounds = {"reward_std": 0.0, "reward_max": 0.0} if is_flat else {}
    means = [FINE | bounds | dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [mean for mean in means for _ in range(10)]


def said(rows: list[dict[str, Any]], line: HealthLine | None = None, first: int = 1) -> dict[int, str]:
    """Version -> remark."""
    line = line or HealthLine(COMPARING)
    remarks = {version: line.remark(row | {"version": version}) for version, row in enumerate(rows, first)}
    return {version: remark for version, remark in remarks.items() if remark}


@pytest.mark.parametrize("name", ["quickstart", "healthy"])
def test_a_run_that_learns_gets_no_remark(name: str) -> None:
    assert said(recorded(name)) == {}


@pytest.mark.parametrize(
    ("name", "among"),
    [
        ("hacking", ["the reward rose, and episode/exact fell from", "of the trajectories are cut by a length limit"]),
        ("collapse", ["of the groups have equal rewards", "the entropy fell from", "the reward fell from"]),
        ("stale", ["nats away from the sampler", "effective sample size", "the reward fell from"]),
        ("starved", ["of the groups have equal rewards"]),
        ("template", ["100% of the trajectories are cut by a length limit", "all rewards are 0"]),
    ],
)
def test_a_run_that_is_sick_gets_the_right_remarks(name: str, among: list[str]) -> None:
    told = said(recorded(name)).values()
    assert [part for part in among if not any(part in remark for remark in told)] == []


@pytest.mark.parametrize(
    ("metrics", "remark"),
    [
        ({}, None),
        ({"equal_groups": 0.97}, "97% of the groups have equal rewards"),
        ({"equal_groups": 0.97, "reward": 0.9}, None),
        ({"truncated": 0.42}, "42% of the trajectories are cut by a length limit"),
        ({"clip_fraction": 0.6}, "60% of the tokens are clipped"),
        ({"effective_sample_size": 0.2}, "importance weights: the effective sample size is 0.20"),
        ({"behavior_weight_zero": 0.35}, "35% of the tokens have weight 0"),
        ({"behavior_kl_proximal": 0.3}, "the policy is 0.3 nats away from the sampler of its tokens"),
        (
            {"staleness_0/behavior_kl_proximal": 0.2},
            "sampler and trainer disagree about fresh tokens: KL 0.2 (arl doctor names the cause)",
        ),
        ({"nonfinite_grads": 1.0}, "gradients are not finite"),
        ({"servers/fenced": 2.0}, "2.0 servers are fenced"),
        ({"time/wait_s": 8.0, "time/train_s": 1.0}, "the trainer waits for episodes 89% of the time"),
        ({"episodes_failed": 40, "episodes_trained": 120}, "25% of the episodes failed"),
        ({"event_loop_lag_s": 9.0}, None),
        (LONG_LOSSES, "losing episodes are 2.5 times as long as winning ones (docs/presets.md)"),
        (LONG_LOSSES | {"length/losing_tokens": 14.0}, None),
    ],
)
def test_a_remark_is_a_few_words_about_the_last_steps(metrics: dict[str, float], remark: str | None) -> None:
    assert said([FINE | metrics] * 3) == ({} if remark is None else {3: remark})


def test_long_losses_are_told_where_tokens_weigh_equally() -> None:
    def told(aggregation: str) -> bool:
        return bool(said([FINE | LONG_LOSSES] * 3, HealthLine({"algorithm": {"aggregation": aggregation}})))

    names = ("token_mean", "sequence_sum", "sequence_mean", "group_mean")
    assert [name for name in names if told(name)] == ["token_mean", "sequence_sum"]


def test_a_remark_comes_again_after_50_steps_and_others_in_between_the_more_important_first() -> None:
    both = FINE | {"equal_groups": 0.8, "time/wait_s": 8.0, "time/train_s": 1.0}
    equal, waits = "80% of the groups have equal rewards", "the trainer waits for episodes 89% of the time"
    assert said([both] * 120) == {3: equal, 4: waits, 53: equal, 54: waits, 103: equal, 104: waits}


def test_a_continued_run_knows_how_it_began_and_counts_no_step_twice() -> None:
    before = [FINE | {"version": version, "entropy": 0.25} for version in range(1, 31)]
    line = HealthLine(COMPARING)
    line.resume(before, [])
    again = [FINE | {"entropy": 0.75}] * 20
    assert said(again, line, first=21) == {40: "the entropy rose from 0.25 to 0.75"}


def test_a_long_run_that_continues_reads_its_first_and_its_last_steps(tmp_path: Path) -> None:
    path, number = tmp_path / "metrics.jsonl", 4000
    rows = [FINE | {"version": version, "entropy": 0.25, "more": "x" * 400} for version in range(1, number + 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = RunLog(tmp_path, LogConfig(console=False))
    log.resume(number)
    told = said([FINE | {"entropy": 0.75}] * 20, log.health, first=number + 1)
    assert list(told.values()) == ["the entropy rose from 0.25 to 0.75"]


def test_held_out_rewards_that_fall_are_told() -> None:
    line = HealthLine(COMPARING)
    for reward in (0.3, 0.8, 0.4):
        line.evaluated({"reward": reward, "num_episodes": 200})
    assert said([FINE] * 3, line) == {3: "the held-out reward fell from 0.80 to 0.40"}
