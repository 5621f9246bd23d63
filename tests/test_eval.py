"""`arl eval`: scores of a model, in a table and episode by episode, also of a run that was stopped."""

import asyncio
import json
import math
import os
import re
import signal
from itertools import combinations
from typing import Any

import pytest
from script_commands import TOKENIZER, Commands, commands

from arl.api.types import ModelRequest, Trajectory
from arl.commands.episodes import Run, Work
from arl.commands.scoring import Estimate, Scores, pass_at_k
from arl.rollout.episode import Episode
from arl.training.metrics import mean_rewards

script = pytest.fixture(commands)


# The command --------------------------------------------------------------------------------------------------------


def row(out: str, name: str) -> list[str]:
    """The cells of the table's line of this name."""
    return next(line.split()[len(name.split()) :] for line in out.splitlines() if line.split()[:-1] and name in line)


def right_every_second_time() -> Any:
    asked: dict[str, int] = {}

    def answer(request: ModelRequest) -> str:
        found = re.search(r"Add: (\d+) \+", str(TOKENIZER.decode(list(request.input_ids))))
        assert found is not None
        asked[found[1]] = asked.get(found[1], 0) + 1
        return f"{int(found[1]) + asked[found[1]] % 2}<|im_end|>"

    return answer


def test_every_held_out_example_is_run_n_times_and_scored(script: Commands) -> None:
    code, out, err = script.run("eval", "--n", "4", "--k", "1,2,4", answers=right_every_second_time())
    assert code == 0
    assert row(out, "reward") == ["0.500", "0.000", "3"]
    assert [row(out, f"pass@{k}")[0] for k in (1, 2, 4)] == ["0.500", f"{1 - 1 / 6:.3f}", "1.000"]
    assert row(out, "reward/short") == ["0.500"]
    assert row(out, "turns") == ["1.000"]
    assert "12 episodes; 0 failed and 0 rejected, which count as reward 0; an episode passes with 1" in out
    assert "12 of 12 episodes" in err
    assert "of 12" not in out
    assert len(script.requests) == 12


def test_by_default_there_are_8_episodes_of_each_and_every_k_that_doubles(script: Commands) -> None:
    _, out, _ = script.run("eval", "--limit", "2")
    assert len(script.requests) == 16
    assert re.findall(r"pass@(\d+)", out) == ["1", "2", "4", "8"]
    _, out, _ = script.run("eval", "--greedy")
    assert len(script.requests) == 16 + 3
    assert re.findall(r"pass@(\d+)", out) == ["1"]


def test_the_limit_and_the_split_choose_the_examples(script: Commands) -> None:
    _, out, _ = script.run("eval", "--n", "1", "--limit", "2", answers=("51",))
    assert row(out, "reward") == ["0.000", "0.000", "2"]
    _, out, _ = script.run("eval", "--n", "1", "--split", "train", answers=("51",))
    assert row(out, "reward") == ["1.000", "0.000", "9"]


def test_every_episode_is_a_line_of_the_file(script: Commands) -> None:
    out = script.directory / "new" / "episodes.jsonl"
    script.run("eval", "--n", "1", "--out", str(out), answers=("1<|im_end|>", "reject", "raise"))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    by_example = {row["example"]: row for row in rows}
    assert sorted(by_example) == [0, 1, 2]
    assert [by_example[i]["reward"] for i in range(3)] == [1.0, 0.0, 0.0]
    assert [by_example[i]["passed"] for i in range(3)] == [True, False, False]
    assert [by_example[i]["rejected"] for i in range(3)] == [False, True, False]
    assert [by_example[i]["error"] for i in range(3)] == [None, None, "RuntimeError: the tool broke"]
    assert by_example[0]["metrics"] == {"turns": 1, "context_full": 0}
    (trajectory,) = by_example[0]["trajectories"]
    assert trajectory["rewards"] == {"right": 1.0, "short": 0.5}
    assert trajectory["text"].endswith("Add: 0 + 1 = ?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>")
    assert by_example[1]["trajectories"] == []


def test_a_file_that_is_there_is_not_overwritten(script: Commands) -> None:
    out = script.directory / "episodes.jsonl"
    out.write_text("an hour's work\n")
    code, _, err = script.run("eval", "--out", str(out))
    assert code == 1
    assert f"--out {out} is there already" in err
    assert out.read_text() == "an hour's work\n"
    assert script.requests == []


def test_a_start_that_fails_leaves_no_file_in_the_way(script: Commands) -> None:
    out = script.directory / "episodes.jsonl"
    for _ in range(2):
        code, _, err = script.run("eval", "--out", str(out), "--model", "no/such/directory")
        assert code == 1
        assert "is there already" not in err
    assert not out.exists()


def test_failures_are_counted_and_the_first_is_shown(script: Commands) -> None:
    code, out, _ = script.run("eval", "--n", "1", answers=("1", "raise", "reject"))
    assert code == 0
    assert "1 episode failed, episode 0 of example 1 first:" in out
    assert 'raise RuntimeError("the tool broke")' in out
    assert "1 failed and 1 rejected" in out
    assert row(out, "reward")[0] == "0.333"
    assert row(out, "reward/short") == ["0.500"]


def test_when_every_episode_failed_the_command_did(script: Commands) -> None:
    code, out, _ = script.run("eval", "--n", "1", answers=("raise",))
    assert code == 1
    assert "3 failed" in out


def test_too_many_failures_end_it_as_they_end_training(script: Commands) -> None:
    flags = ["--evaluation.max_concurrent_episodes", "1"]
    code, out, err = script.run("eval", "--n", "30", *flags, answers=("raise",))
    assert code == 1
    assert 64 <= len(script.requests) <= 66
    assert "64 of the last 64 episodes failed, and rollout.max_failure_rate is 0.5" in err
    assert "64 episodes of 90, stopped before the end" in out


def test_ctrl_c_gives_the_scores_of_what_was_run_until_then(script: Commands) -> None:
    asked = 0

    def answer(request: ModelRequest) -> Any:
        nonlocal asked
        asked += 1
        if asked == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return "1" if asked < 5 else asyncio.Event().wait()

    code, out, err = script.run("eval", "--n", "4", "--evaluation.max_concurrent_episodes", "1", answers=answer)
    assert code == 130
    assert row(out, "reward") == ["1.000", "-", "1"]
    assert "4 episodes of 12, stopped before the end" in out
    assert err.endswith("stopped by SIGINT; the episodes that had ended are scored\n")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--k", "1,9"], "--k 9 needs as many episodes of each example, and --n is 8"),
        (["--k", "0"], "argument --k: '0' is not a whole number above 0"),
        (["--k", "two"], "argument --k: 'two' is not a whole number above 0"),
        (["--pass-reward", "nan"], "'nan' is not a finite number"),
        (["--limit", "-3"], "argument --limit: '-3' is not a whole number above 0"),
    ],
)
def test_a_wrong_option_is_told(script: Commands, flags: list[str], complaint: str) -> None:
    code, _, err = script.run("eval", *flags)
    assert code == 2
    assert complaint in err


# Scores --------------------------------------------------------------------------------------------------------------


def trajectory(reward: float, **changes: Any) -> Trajectory:
    plain = {"token_ids": (1, 2, 3), "loss_mask": (0, 1, 1), "behavior_logprobs": (0.0, -1.0, -1.0)}
    return Trajectory(**{**plain, "versions": (-1, 0, 0), "reward": reward, **changes})


def scores(*rewards_of_examples: list[float], ks: list[int], pass_reward: float = 1.0) -> Scores:
    made = Scores(ks=ks, pass_reward=pass_reward)
    for index, rewards in enumerate(rewards_of_examples):
        for number, reward in enumerate(rewards):
            episode = Episode(trajectories=(trajectory(reward),), elapsed_s=1.0)
            made.add(Run(work=Work(index=index, number=number), episode=episode, calls=()))
    return made


@pytest.mark.parametrize(("n", "right"), [(1, 0), (1, 1), (5, 0), (5, 2), (6, 5), (7, 7)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n: int, right: int) -> None:
    for k in range(1, n + 1):
        subsets = list(combinations([i < right for i in range(n)], k))
        assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(("n", "right", "k"), [(3, 1, 4), (3, 4, 1), (3, 1, 0), (3, -1, 1)])
def test_pass_at_k_needs_k_episodes(n: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="it needs at least k"):
        pass_at_k(n, right, k)


def test_the_standard_error_is_over_examples_not_episodes() -> None:
    """Of two examples whose episodes all agree there are two observations, however many episodes."""
    estimates = scores([1.0] * 50, [0.0] * 50, ks=[1]).estimates()
    assert estimates["reward"] == Estimate(mean=0.5, standard_error=math.sqrt(0.5) / math.sqrt(2), num_examples=2)
    assert estimates["pass@1"] == estimates["reward"]


def test_an_example_with_fewer_than_k_episodes_is_left_out_of_pass_at_k() -> None:
    estimates = scores([1.0, 0.0], [0.0], ks=[1, 2, 3]).estimates()
    assert (estimates["pass@1"].mean, estimates["pass@1"].num_examples) == (0.25, 2)
    assert (estimates["pass@2"].mean, estimates["pass@2"].num_examples) == (1.0, 1)
    assert "pass@3" not in estimates


def test_an_episode_passes_with_the_threshold_itself() -> None:
    estimates = scores([0.5, 0.4], ks=[1], pass_reward=0.5).estimates()
    assert (estimates["pass@1"].mean, estimates["reward"].mean) == (0.5, 0.45)


def test_no_threshold_makes_a_rejected_episode_pass() -> None:
    made = Scores(ks=[1], pass_reward=0.0)
    made.add(Run(work=Work(index=0, number=0), episode=Episode(elapsed_s=1.0), calls=()))
    made.add(Run(work=Work(index=0, number=1), episode=Episode(elapsed_s=1.0, error=ValueError()), calls=()))
    assert made.estimates()["pass@1"].mean == 0.0
    assert (made.num_rejected, made.num_failed, made.means()) == (1, 1, {})


def test_an_episode_that_branched_counts_once_in_the_means_as_it_does_in_training() -> None:
    made = Scores(ks=[1], pass_reward=1.0)
    branched = (*[trajectory(1.0, role="solver", rewards={"right": 1.0})] * 3, trajectory(0.5, role="checker"))
    plain = (trajectory(0.0, role="solver", rewards={"right": 0.0}), trajectory(0.5, role="checker"))
    for index, trajectories in enumerate((branched, plain)):
        episode = Episode(trajectories=trajectories, elapsed_s=1.0)
        made.add(Run(work=Work(index=index, number=0), episode=episode, calls=()))
    means = made.means()
    assert (means["reward/right"], means["reward of solver"], means["reward of checker"]) == (0.5, 0.5, 0.5)
    assert means["reward/right"] == mean_rewards([branched, plain])["reward/right"]


def test_roles_parts_and_metrics_have_their_means() -> None:
    made = Scores(ks=[1], pass_reward=1.0)
    solver = trajectory(1.0, role="solver", rewards={"right": 1.0}, metrics={"turns": 4.0})
    checker = trajectory(0.0, role="checker", is_truncated=True)
    episode = Episode(trajectories=(solver, checker), elapsed_s=2.0)
    made.add(Run(work=Work(index=0, number=0), episode=episode, calls=()))
    assert made.means() == {
        "reward/right": 1.0,
        "reward of solver": 1.0,
        "reward of checker": 0.0,
        "turns": 4.0,
        "trained tokens": 4,
        "cut by a limit": 1,
        "seconds": 2.0,
    }
