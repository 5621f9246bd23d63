"""`arl try`, `arl eval` and `arl serve` with a script of several tasks."""

import re

import pytest
from script_commands import Commands, commands

script = pytest.fixture(commands)

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
