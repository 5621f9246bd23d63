"""`arl eval`: scores of a model, in a table and episode by episode, also of a run that was stopped, and of tasks."""

import asyncio
import json
import math
import os
import re
import signal
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from records import trajectory
from script_commands import TOKENIZER, Commands, commands

from arl.api.types import ModelRequest
from arl.cli.episodes import Run, Work
from arl.cli.scoring import Estimate, Scores, pass_at_k
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


def test_on_a_console_of_json_the_scores_are_one_object(script: Commands) -> None:
    flags = ("--n", "4", "--k", "1,2", "--log.format", "json")
    code, out, err = script.run("eval", *flags, answers=right_every_second_time())
    told = [json.loads(line) for line in (*out.splitlines(), *err.splitlines()) if line.startswith("{")]
    (result,) = [one for one in told if one["kind"] == "result"]
    assert code == 0
    assert result["estimates"]["reward"] == {"mean": 0.5, "standard_error": 0.0, "num_examples": 3}
    assert result["estimates"].keys() == {"reward", "pass@1", "pass@2"}
    assert result["means"]["turns"] == 1.0
    assert [result[f"num_{name}"] for name in ("episodes", "failed", "rejected")] == [12, 0, 0]


@pytest.mark.parametrize("command", ["eval", "try"])
def test_a_text_model_is_not_asked_about_images(script: Commands, command: str) -> None:
    script.script.write_text((Path(__file__).parents[1] / "sighted_script.py").read_text())
    code, out, err = script.run(command)
    assert code == 1
    assert "the first example: a message of role 'user' has an image, and the chat template" in err
    assert not script.requests
    assert not out


def test_by_default_there_are_8_episodes_of_each_or_a_greedy_one_and_every_k_that_doubles(script: Commands) -> None:
    _, out, _ = script.run("eval", "--limit", "2")
    assert len(script.requests) == 16
    assert re.findall(r"pass@(\d+)", out) == ["1", "2", "4", "8"]
    code, out, _ = script.run("eval", "--greedy", answers=("raise",))
    assert code == 1, "every episode failed"
    assert "3 failed" in out
    assert len(script.requests) == 16 + 3
    assert re.findall(r"pass@(\d+)", out) == ["1"]


def test_the_limit_and_the_split_choose_the_examples(script: Commands) -> None:
    _, out, _ = script.run("eval", "--n", "1", "--limit", "2", answers=("51",))
    assert row(out, "reward") == ["0.000", "0.000", "2"]
    _, out, _ = script.run("eval", "--n", "1", "--split", "train", answers=("51",))
    assert row(out, "reward") == ["1.000", "0.000", "9"]


def test_a_file_is_not_overwritten_nor_left_behind_by_a_start_that_fails(script: Commands) -> None:
    out = script.directory / "episodes.jsonl"
    code, _, err = script.run("eval", "--out", str(out), "--model", "no/such/directory")
    assert (code, out.exists()) == (1, False)
    out.write_text("an hour's work\n")
    code, _, err = script.run("eval", "--out", str(out))
    assert code == 1
    assert f"--out {out} is there already" in err
    assert out.read_text() == "an hour's work\n"
    assert script.requests == []


def test_every_episode_is_a_line_of_the_file_and_failures_are_counted_and_the_first_is_shown(script: Commands) -> None:
    file = script.directory / "new" / "episodes.jsonl"
    code, out, _ = script.run("eval", "--n", "1", "--out", str(file), answers=("1<|im_end|>", "reject", "raise"))
    assert code == 0
    assert "1 episode failed, episode 0 of example 2 first:" in out
    assert 'raise RuntimeError("the tool broke")' in out
    assert "1 failed and 1 rejected" in out
    assert row(out, "reward")[0] == "0.333"
    assert row(out, "reward/short") == ["0.500"]
    rows = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: row["example"])
    assert [row["example"] for row in rows] == [0, 1, 2]
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.0]
    assert [row["passed"] for row in rows] == [True, False, False]
    assert [row["rejected"] for row in rows] == [False, True, False]
    assert [row["error"] for row in rows] == [None, None, "RuntimeError: the tool broke"]
    assert rows[0]["metrics"] == {"turns": 1, "context_full": 0}
    (trajectory,) = rows[0]["trajectories"]
    assert trajectory["rewards"] == {"right": 1.0, "short": 0.5}
    assert trajectory["text"].endswith("Add: 0 + 1 = ?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>")
    assert rows[1]["trajectories"] == []


def test_too_many_failures_end_it_as_they_end_training(script: Commands) -> None:
    flags = ["--rollout.max_concurrent_episodes", "1"]
    code, out, err = script.run("eval", "--n", "30", *flags, answers=("raise",))
    assert code == 1
    assert 14 <= len(script.requests) <= 16
    assert "all of the first 14 episodes failed" in err
    assert "14 episodes of 90, stopped before the end" in out


def test_ctrl_c_gives_the_scores_of_what_was_run_until_then(script: Commands) -> None:
    asked = 0

    def answer(request: ModelRequest) -> Any:
        nonlocal asked
        asked += 1
        if asked == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return "1" if asked < 5 else asyncio.Event().wait()

    code, out, err = script.run("eval", "--n", "4", "--rollout.max_concurrent_episodes", "1", answers=answer)
    assert code == 130
    assert row(out, "reward") == ["1.000", "-", "1"]
    assert "4 episodes of 12, stopped before the end" in out
    assert err.endswith("stopped by SIGINT; the episodes that had ended are scored\n")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--k", "1,9"], "--k 9 needs as many episodes of each example, and --n is 8"),
        (["--k", "0"], "argument --k: '0' is not a whole number above 0"),
        (["--pass-reward", "nan"], "'nan' is not a finite number"),
    ],
)
def test_a_wrong_option_is_told(script: Commands, flags: list[str], complaint: str) -> None:
    code, _, err = script.run("eval", *flags)
    assert code == 2
    assert complaint in err


# A script of several tasks -----------------------------------------------------------------------------------------

TASKS = """
    from arl import Task
    few = {"workflow": Adder(config), "dataset": [{"a": 50}] * 9}
    low = Task(name="low", eval_dataset=[{"a": a} for a in range(3)], **few)
    high = Task(name="high", eval_dataset={"one": [{"a": 7}], "two": [{"a": 8}, {"a": 9}]}, **few)
    return Setup(model=config.model, tasks=[low, high])
"""


@pytest.fixture
def tasks(script: Commands) -> Commands:
    head, _, tail = script.script.read_text().partition("    return Setup(")
    script.script.write_text(head + TASKS.lstrip("\n") + "\n" + tail.partition("\n")[2])
    return script


def test_arl_eval_scores_every_task_or_one(tasks: Commands) -> None:
    code, out, _ = tasks.run("eval", "--n", "1", answers=["1<|im_end|>"])
    assert code == 0
    found = re.findall(r"(reward(?:, [\w/]+)?) +([\d.]+) +\S+ +(\d)", out)
    assert found == [
        ("reward", "0.167", "6"),
        ("reward, low", "0.333", "3"),
        ("reward, high/one", "0.000", "1"),
        ("reward, high/two", "0.000", "2"),
    ]
    _, out, _ = tasks.run("eval", "--n", "1", "--task", "high", "--limit", "2")
    assert len(re.findall(r"reward, (high/\w+)", out)) == 2
    assert "2 episodes" in out


def test_arl_try_runs_the_first_examples_of_each_task_or_of_one(tasks: Commands) -> None:
    _, out, _ = tasks.run("try", "--n", "2")
    assert re.findall(r"episode (\d) of 4: held-out example (\d) of task (\w+)", out) == [
        ("1", "0", "low"),
        ("2", "1", "low"),
        ("3", "3", "high"),
        ("4", "4", "high"),
    ]
    _, out, _ = tasks.run("try", "--n", "1", "--task", "low", "--split", "train")
    assert "episode 1 of 1: train example 0 of task low" in out
    assert "50 + 1" in out


def test_a_task_that_is_not_there_is_named_with_those_that_are(tasks: Commands) -> None:
    code, _, err = tasks.run("eval", "--task", "middle")
    assert code == 1
    assert "--task is 'middle', and the tasks are: 'low', 'high'" in err


def test_arl_serve_says_that_it_plays_one_workflow(tasks: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARL_ENDPOINT_KEY", "a-key-of-a-test-of-tasks")
    code, _, err = tasks.run("serve")
    assert code == 1
    assert "arl serve puts programs elsewhere in the place of one workflow, and this script has several tasks" in err


# Scores --------------------------------------------------------------------------------------------------------------


def scored(*examples: list[Episode], ks: list[int], pass_reward: float = 1.0) -> Scores:
    made = Scores(ks=ks, pass_reward=pass_reward)
    for index, episodes in enumerate(examples):
        for number, episode in enumerate(episodes):
            made.add(Run(work=Work(index=index, number=number), episode=episode, calls=()))
    return made


def rewarded(*rewards: float) -> list[Episode]:
    return [Episode(trajectories=(trajectory(reward=reward),), elapsed_s=1.0) for reward in rewards]


@pytest.mark.parametrize(("n", "right"), [(1, 0), (1, 1), (5, 0), (5, 2), (6, 5), (7, 7)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n: int, right: int) -> None:
    for k in range(1, n + 1):
        subsets = list(combinations([i < right for i in range(n)], k))
        assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_the_standard_error_is_over_examples_of_which_pass_at_k_leaves_out_those_with_fewer_episodes() -> None:
    """Of two examples whose episodes all agree there are two observations, however many episodes."""
    estimates = scored(rewarded(*[1.0] * 50), rewarded(0.0), ks=[1, 2, 51]).estimates()
    assert estimates["reward"] == Estimate(mean=0.5, standard_error=math.sqrt(0.5) / math.sqrt(2), num_examples=2)
    assert estimates["pass@1"] == estimates["reward"]
    assert (estimates["pass@2"].mean, estimates["pass@2"].num_examples) == (1.0, 1)
    assert "pass@51" not in estimates


def test_an_episode_passes_with_the_threshold_itself_but_never_a_rejected_or_failed_one() -> None:
    estimates = scored(rewarded(0.5, 0.4), ks=[1], pass_reward=0.5).estimates()
    assert (estimates["pass@1"].mean, estimates["reward"].mean) == (0.5, 0.45)
    made = scored([Episode(elapsed_s=1.0), Episode(elapsed_s=1.0, error=ValueError())], ks=[1], pass_reward=0.0)
    assert made.estimates()["pass@1"].mean == 0.0
    assert (made.num_rejected, made.num_failed, made.means()) == (1, 1, {})


def test_roles_parts_and_metrics_have_their_means_in_which_an_episode_that_branched_counts_once() -> None:
    """As it does in training."""
    solver = trajectory(reward=1.0, role="solver", rewards={"right": 1.0}, metrics={"turns": 4.0})
    checker = trajectory(reward=0.5, role="checker", is_truncated=True)
    wrong = trajectory(role="solver", rewards={"right": 0.0})
    branched, plain = (solver, solver, solver, checker), (wrong, checker)
    means = scored(*([Episode(trajectories=each, elapsed_s=2.0)] for each in (branched, plain)), ks=[1]).means()
    assert means["reward/right"] == mean_rewards([branched, plain])["reward/right"]
    assert means == {
        "reward/right": 0.5,
        "reward of solver": 0.5,
        "reward of checker": 0.5,
        "turns": 4.0,
        "trained tokens": 6,
        "cut by a limit": 1,
        "seconds": 2.0,
    }
