"""What the health page says about runs that learn, and about runs that do not; and of what servers answered lately."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from made_run import PROMPT, T0, began, episode, life, looking_at, trajectory

import arl.observe.health.rules
import arl.observe.view.health
from arl.api.events import Event, GroupAdmitted, GroupEnded, ServerFenced, ServerJoined, TurnEnded
from arl.api.settings.run import Config
from arl.observe.events.run_record import read_run
from arl.observe.health.digest import Digest
from arl.observe.health.rules import remarks
from arl.observe.view.health import findings, health
from arl.observe.view.viewed_run import Ending

FINE = {"reward_min": 0.0, "reward_max": 1.0, "entropy": 0.5, "truncated": 0.0, "effective_sample_size": 1.0}
FINE |= {"staleness/mean": 1.0, "behavior_kl_proximal": 1e-3, "event_loop_lag_s": 0.01}
STEPS = 60
RISING = [0.2 + 0.5 * k / STEPS for k in range(STEPS)]


def told(
    place: Path, columns: Mapping[str, Sequence[float]], held_out: Sequence[float] = (), num_held_out: int | None = None
) -> list[str]:
    """The severity and the sentence of each finding about a run with these metrics; the others are FINE and RISING."""
    all_columns = {**{name: [value] * STEPS for name, value in FINE.items()}, "reward": RISING, **columns}
    steps = max(map(len, columns.values()), default=STEPS)
    repeated = [list(islice(cycle(column), steps)) for column in all_columns.values()]
    rows = [dict(zip(all_columns, row, strict=True)) for row in zip(*repeated, strict=True)]
    evaluations = [{"reward": reward, "num_episodes": num_held_out} for reward in held_out]
    return told_of(place, rows, evaluations)


def told_of(place: Path, rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """The same of a run with these rows of metrics."""
    for name, written in (("metrics", rows), ("evaluations", evaluations)):
        lines = (json.dumps({"version": number, **row}) + "\n" for number, row in enumerate(written, 1))
        (place / f"{name}.jsonl").write_text("".join(lines))
    if not (place / "events").exists():
        life(place, [began()])
    return [f"{one['severity']}: {one['text']}" for one in findings(read_run(place), [], {})]


def falling(first: float, last: float) -> list[float]:
    return [first + (last - first) * k / (STEPS - 1) for k in range(STEPS)]


def test_a_run_that_learns_has_no_findings(tmp_path: Path) -> None:
    assert told(tmp_path, {"episode/tool_calls": falling(3.0, 1.0), "reward/right": RISING}, RISING[::10]) == []


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"episode/exact": falling(0.5, 0.0)}, "warning: The reward rose from 0.217 to 0.612, and episode/exact fell"),
        ({"reward/exact": falling(0.9, 0.1)}, "warning: The reward rose from 0.217 to 0.612, and reward/exact fell"),
        ({"reward": falling(0.8, 0.1)}, "warning: The reward fell to 0.153; in steps 1 to 10 it was 0.747."),
        ({"entropy": [0.9] * 30 + [0.08] * 30}, "warning: The entropy fell from 0.9 to 0.08 nats"),
        (
            {"entropy": [0.9] * 20 + [0.02] * 25 + [2.0] * 15},
            "warning: The entropy fell from 0.9 to 0.02 nats",
        ),
        ({"entropy": falling(1.0, 0.1)}, "note: The entropy fell from 0.985 to 0.169 nats"),
        (
            {"truncated": [0.9] * STEPS},
            "warning: A length limit cut 90% of the trajectories in the last steps, and 90% in",
        ),
        ({"truncated": falling(0.0, 1.0)}, "in the first ones: they have grown."),
        ({"effective_sample_size": [0.4] * STEPS}, "warning: The effective sample size was 0.40"),
        ({"behavior_kl_proximal": [0.2] * STEPS, "staleness/mean": [16.0] * STEPS}, "which were 16 versions old."),
        (
            {"staleness_0/behavior_kl_proximal": [0.1] * STEPS},
            "warning: Sampler and trainer disagree about fresh tokens",
        ),
        (
            {"behavior_kl_proximal": [0.1] * STEPS, "staleness/mean": [0.0] * STEPS},
            "warning: Sampler and trainer disagree about fresh tokens",
        ),
        (
            {"staleness_0/behavior_kl_proximal": [0.03] * STEPS},
            "They already disagreed in the first step, before any weights were loaded: the likely causes are another",
        ),
        (
            {"staleness_0/behavior_kl_proximal": [0.001] + [0.03] * (STEPS - 1)},
            "They agreed in the first step, before weights were loaded: the likely causes are a load that leaves out",
        ),
        ({"event_loop_lag_s": [0.5] * STEPS}, "note: The event loop was blocked for up to 0.50 s"),
        ({"event_loop_lag_s": [9.0] * STEPS}, "note: The event loop was blocked for up to 9.00 s"),
        (
            {"reward": [1.0] * STEPS, "reward_min": [1.0] * STEPS, "reward_std": [0.0] * STEPS},
            "error: All episodes of the last 20 steps had the reward 1",
        ),
    ],
)
def test_what_goes_wrong_is_told_by_one_finding(tmp_path: Path, columns: dict[str, list[float]], text: str) -> None:
    (said,) = told(tmp_path, columns)
    assert text in said


@pytest.mark.parametrize(("dtype", "is_told"), [("float32", True), ("bfloat16", False)])
def test_in_float32_a_small_difference_in_the_first_step_is_told(dtype: str, is_told: bool) -> None:
    settings = {"train": {"dtype": "float32"}, "engine": {"kind": "local", "dtype": dtype}}
    steps = [{"version": k, "behavior_kl_proximal": 0.001, "staleness/mean": 0.0} for k in range(1, 6)]
    assert [one.kind for one in remarks(Digest(settings, steps))] == ["distance"] * is_told


def test_a_solved_task_needs_neither_entropy_nor_rising_rewards(tmp_path: Path) -> None:
    solved = [min(1.0, 0.4 + k / 30) for k in range(STEPS)]
    assert told(tmp_path, {"reward": solved, "entropy": falling(1.0, 0.0)}) == []


def test_settings_that_findings_advise_exist() -> None:
    texts = "".join(
        Path(module.__file__ or "").read_text() for module in (arl.observe.health.rules, arl.observe.view.health)
    )
    named = set(re.findall(r"\b(?:train|rollout|algorithm|log)\.[a-z_.]*[a-z]", texts))
    assert {"train.optimizer.lr", "log.events.tokens"} < named
    config = Config(model="any")
    for name in named:
        attrgetter(name)(config)  # raises AttributeError


def test_rewards_that_vary_by_themselves_have_not_fallen(tmp_path: Path) -> None:
    """The batches of a run are small: each step's reward is that of four episodes."""
    draw = Random(0)
    noisy = [sum(draw.random() < 0.5 for _ in range(4)) / 4 for _ in range(2000)]
    assert told(tmp_path, {"reward": noisy}) == []
    (said,) = told(tmp_path, {"reward": noisy + [0.0] * 50})
    assert said.startswith("warning: The reward fell to 0; in steps ")


def test_a_fall_is_told_by_the_versions_of_its_steps(tmp_path: Path) -> None:
    rows = [
        FINE | {"version": 101 + k, "reward": reward} for k, reward in enumerate([0.2] * 20 + [0.9] * 10 + [0.3] * 10)
    ]
    assert told_of(tmp_path, rows) == ["warning: The reward fell to 0.3; in steps 121 to 130 it was 0.9."]


@pytest.mark.parametrize(
    "name",
    ["exact/killed", "tool_calls", "malformed_calls", "solver/turns", "Errors", "length_penalty", "context_full"],
)
def test_mishaps_and_counts_may_fall_while_the_reward_rises(name: str, tmp_path: Path) -> None:
    assert told(tmp_path, {f"episode/{name}": falling(0.5, 0.0)}) == []


def test_a_watched_share_that_begins_later_is_watched(tmp_path: Path) -> None:
    rows = [FINE | {"reward": reward, "episode/exact": 0.7 - reward} for reward in RISING[:50]]
    del rows[0]["episode/exact"]
    (said,) = told_of(tmp_path, rows)
    assert "and episode/exact fell from" in said


def test_a_watched_share_may_fall_with_the_reward_and_a_full_context_at_any_time(tmp_path: Path) -> None:
    assert told(tmp_path, {"reward": [0.5] * STEPS, "episode/exact": falling(0.5, 0.0)}) == []
    assert told(tmp_path, {"episode/context_full": falling(0.5, 0.0)}) == []


def test_held_out_rewards_that_fall_behind_those_of_training_are_told(tmp_path: Path) -> None:
    (said,) = told(tmp_path, {}, held_out=[0.3, 0.6, 0.5, 0.3])
    assert said == "warning: The held-out reward fell from 0.6 to 0.3, and that of training did not."
    assert told(tmp_path, {}, held_out=[0.3, 0.6, 0.5]) == []


def test_few_held_out_examples_tell_little(tmp_path: Path) -> None:
    assert told(tmp_path, {}, held_out=[0.3, 0.6, 0.5, 0.3], num_held_out=10) == []
    assert len(told(tmp_path, {}, held_out=[0.3, 0.6, 0.5, 0.3], num_held_out=100)) == 1


def groups(rewards: Sequence[Sequence[float]], outcome: str = "kept") -> list[Event]:
    """A record of each group's beginning and end, and of its episodes with these rewards."""
    made: list[Event] = []
    for group, own in enumerate(rewards):
        made.append(GroupAdmitted(t=T0, group=group, epoch=0, row=group, stamp=0, example={}))
        for member, reward in enumerate(own):
            made += episode(f"{group}.{member}", T0, [trajectory(PROMPT, "x", reward=reward)])
        made.append(GroupEnded(t=T0 + 1, group=group, outcome=outcome))
    return made


@pytest.mark.parametrize(
    ("rewards", "text"),
    [
        (
            [(0.0, 0.0)] * 9 + [(0.0, 1.0)] * 3,
            "warning: 75% of the last 12 groups had equal rewards, and taught nothing",
        ),
        ([(0.0, 0.0)] * 8 + [(1.0, 1.0)] * 2, "80% of these the lowest, 20% the highest."),
        ([(0.0, 0.0)] * 10, "and taught nothing: all 0."),
        ([(1.0, 1.0)] * 5 + [(0.0, 1.0)] * 5, "note: 50% of the last 10 groups had equal rewards, and taught nothing"),
        ([(1.0, 1.0)] * 9 + [(0.0, 1.0)], "note: 90% of the last 10 groups had equal rewards, and taught nothing"),
        ([(0.5, 0.5)] * 9 + [(0.0, 0.5)], "warning: 90% of the last 10 groups had equal rewards, and taught nothing"),
    ],
)
def test_groups_of_equal_rewards_are_told(tmp_path: Path, rewards: list[tuple[float, float]], text: str) -> None:
    life(tmp_path, [began(), *groups(rewards)])
    (said,) = told(tmp_path, {})
    assert text in said


@pytest.mark.parametrize(
    ("right", "advice"),
    [(10, "Use harder"), (6, "If entropy is low, too, the policy"), (2, "Read some: the reward may")],
)
def test_what_to_do_about_equal_groups_depends_on_how_many_are_right(right: int, advice: str, tmp_path: Path) -> None:
    own = [(1.0, 1.0)] * right + [(0.0, 0.0)] * (10 - right) + [(0.0, 1.0)]
    life(tmp_path, [began(), *groups(own)])
    told(tmp_path, {})
    (found,) = findings(read_run(tmp_path), [], {})
    assert found["advice"].startswith(advice)


def test_a_policy_that_explores_little_and_agrees_on_wrong_answers_is_sick(tmp_path: Path) -> None:
    life(tmp_path, [began(), *groups([(0.0, 0.0), (1.0, 1.0)] * 10)])
    said = told(tmp_path, {"entropy": falling(1.0, 0.1)})
    assert [one.split(" fell")[0] for one in said if "entropy" in one] == ["warning: The entropy"]


def test_equal_groups_of_a_solved_task_are_a_note_and_rejected_ones_none(tmp_path: Path) -> None:
    for name, outcome in (("solved", "kept"), ("replaced", "rejected")):
        life(tmp_path / name, [began(), *groups([(1.0, 1.0)] * 20, outcome)])
    (said,) = told(tmp_path / "solved", {"reward": [0.95] * STEPS})
    assert said == "note: 100% of the last 20 groups had equal rewards, 100% of these the highest."
    assert told(tmp_path / "replaced", {}) == []


@pytest.mark.parametrize(
    "advantage",
    [{"kind": "gae"}, {"kind": "rejection"}, {"kind": "returns", "baseline": "none"}, {"kind": "distillation"}],
)
def test_equal_groups_are_nothing_to_an_algorithm_that_does_not_compare(
    advantage: dict[str, str], tmp_path: Path
) -> None:
    life(tmp_path, [began(algorithm={"advantage": advantage}), *groups([(0.0, 0.0)] * 20)])
    assert told(tmp_path, {}) == []


def test_equal_rewards_of_a_student_whose_teacher_rewards_tokens_are_no_error(tmp_path: Path) -> None:
    life(tmp_path, [began(), *groups([(0.0, 0.0)] * 20)])
    same = {"reward": [0.0] * STEPS, "reward_max": [0.0] * STEPS, "reward_std": [0.0] * STEPS}
    assert told(tmp_path, {**same, "episode/teacher_kl": falling(0.5, 0.1)}) == []
    assert [said.split(":")[0] for said in told(tmp_path, same)] == ["error", "warning"]


def test_a_game_whose_players_share_out_a_reward_is_not_one_of_equal_rewards(tmp_path: Path) -> None:
    game: list[Event] = [began()]
    for group in range(20):
        game.append(GroupAdmitted(t=T0, group=group, epoch=0, row=group, stamp=0, example={}))
        for member, winner in enumerate((1.0, -1.0)):
            players = [
                trajectory(PROMPT, "x", reward=winner, role="white"),
                trajectory(PROMPT, "x", reward=-winner, role="black"),
            ]
            game += episode(f"{group}.{member}", T0, players)
        game.append(GroupEnded(t=T0 + 1, group=group, outcome="kept"))
    life(tmp_path, game)
    same = {
        "reward": [0.0] * STEPS,
        "reward_min": [0.0] * STEPS,
        "reward_max": [0.0] * STEPS,
        "reward_std": [0.0] * STEPS,
    }
    assert told(tmp_path, {**same, "equal_groups": [0.0] * STEPS}) == []


STRANGE = (None, "high", [0.5], {"mean": 1}, True, float("nan"), float("-inf"), 10**400, 1e308, -1e308)


@pytest.mark.parametrize("steps", [0, 1, 2, 19, 20, 60])
def test_no_metrics_are_so_strange_that_nothing_is_said(steps: int, tmp_path: Path) -> None:
    life(tmp_path, [began(rollout=None, algorithm=[{"advantage": 1}]), *groups([(0.0, 0.0)] * 20)])
    names = [*FINE, "reward", "reward_std", "episode/exact", "equal_groups", "time/wait_s", "nonfinite_grads"]
    for seed in range(20):
        draw = Random(seed)
        rows = [
            {name: draw.choice((*STRANGE, 0.0, 0.5, 1.0)) for name in names if draw.random() < 0.8}
            for _ in range(steps)
        ]
        evaluations = [{name: draw.choice((*STRANGE, 0.5, 0)) for name in ("reward", "num_episodes")} for _ in range(4)]
        assert any("equal rewards" in said for said in told_of(tmp_path, rows, evaluations))


def test_a_long_run_is_looked_at_once(tmp_path: Path) -> None:
    """Other metrics than the reward and its bounds are read of the first and the last steps alone."""
    life(tmp_path, [began()])
    record = read_run(tmp_path)
    reads: dict[str, int] = {}

    class Counted(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            reads[name] = reads.get(name, 0) + 1
            return super().get(name, default)

    rows = [Counted(FINE | {"version": k, "reward": k / 5000, "reward/right": 0.5}) for k in range(5000)]
    (tmp_path / "metrics.jsonl").write_text("")
    record.steps.extend(rows)
    assert findings(record, [], {}) == []
    assert {name for name, times in reads.items() if times >= 5000} == {"reward", "reward_min", "reward_max"}
    assert max(reads.values()) < 5500


# Servers


def answered(server: str, t: float) -> TurnEnded:
    return TurnEnded(episode="0.0", rid="r", server=server, seconds=1.0, prompt=9, output=30, stop="stop", t=t)


def rates(run_dir: Path, now: float) -> dict[str, tuple[float, float]]:
    servers = health(read_run(run_dir), now)["servers"]
    return {row["server"]: (row["turns_per_s"], row["tokens_per_s"]) for row in servers}


def test_turns_and_tokens_are_those_of_the_last_minute_by_server(tmp_path: Path) -> None:
    joined = [ServerJoined(server=server, t=T0) for server in ("a", "b", "idle")]
    turns = [*(answered("a", T0 + 100 + k) for k in range(30)), answered("b", T0 + 139), answered("b", T0 + 20)]
    life(tmp_path, [began(), *joined, *turns])
    assert rates(tmp_path, T0 + 140) == {"a": (0.5, 15.0), "b": (1 / 60, 0.5), "idle": (0.0, 0.0)}
    assert rates(tmp_path, T0 + 500) == {"a": (0.0, 0.0), "b": (0.0, 0.0), "idle": (0.0, 0.0)}


def test_turns_of_an_earlier_life_do_not_count(tmp_path: Path) -> None:
    life(tmp_path, [began(), ServerJoined(server="a", t=T0), answered("a", T0 + 1)])
    life(tmp_path, [began(t=T0 + 2), ServerJoined(server="a", t=T0 + 2), answered("a", T0 + 3)])
    assert rates(tmp_path, T0 + 4) == {"a": (1 / 60, 0.5)}


async def test_a_run_that_has_ended_tells_the_rates_of_its_last_minute(tmp_path: Path) -> None:
    """Its record ends when it is written, and a run that goes on is looked at now: both are in this minute."""
    joined = ServerJoined(server="a", t=T0)
    life(tmp_path, [began(), joined, *(answered("a", time.time() - 20) for _ in range(30))])
    for how in ("finished", "running"):
        async with looking_at(tmp_path, ending_of=lambda _, how=how: Ending(how, "", "")) as browser:
            (server,) = (await browser.get("/api/runs/0/health"))["servers"]
        assert (server["server"], server["turns_per_s"], server["tokens_per_s"]) == ("a", 0.5, 15.0)


def test_fenced_servers_come_first_where_there_are_two_hundred(tmp_path: Path) -> None:
    joined: list[Any] = [ServerJoined(server=f"http://10.0.0.{k}:1", t=T0) for k in range(200)]
    life(tmp_path, [began(), *joined, ServerFenced(server="http://10.0.0.99:1", reason="does not answer", t=T0 + 5)])
    first, *others = health(read_run(tmp_path), T0 + 6)["servers"]
    assert (first["server"], first["state"], len(others)) == ("http://10.0.0.99:1", "fenced", 199)
