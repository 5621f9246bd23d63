"""What a notebook shows: HTML that is well formed, harmless and not too long, with the text and the numbers."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_run import ANSWERS, PROMPT, TOKENIZER, began, life, tokens_of, trajectory, write_run

import arl
from arl.api.errors import ConfigError, RunFileError
from arl.api.html import MOST_TOKENS, curve_svg, run_html
from arl.api.settings.run import EventsConfig
from arl.api.types import Group
from arl.observe.events.run_record import read_run
from arl.observe.events.writer import EventLog
from arl.run.experiment import TrainingResult

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b[31m\x00\n& ☃"


class Checked(HTMLParser):
    """Every element is closed, and none can do anything. text: what is read."""

    TAGS = frozenset(
        ["div", "span", "b", "table", "tr", "th", "td", "details", "summary", "svg", "text", "polyline", "circle"],
    )

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.titles: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.TAGS
        for name, value in attrs:
            assert not name.startswith("on")
            assert name not in ("href", "src")
            assert name == "xmlns" or "://" not in (value or "")
            if name == "title":
                self.titles.append(value or "")
        self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("polyline", "circle")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def group_of(number: int, length: int = 1) -> Group:
    parts = tuple(trajectory(PROMPT, f"{i} " * length, reward=float(i)) for i in range(number))
    return Group(group_id=3, example_id=(1, 7), stamp=2, trajectories=parts, episode_indices=tuple(range(number)))


def test_a_trajectory_alone_shows_ids_and_which_are_trained() -> None:
    shown = Checked(trajectory("ab", "cd", version=5)._repr_html_())
    assert " ".join(map(str, tokens_of("abcd"))) in shown.text
    assert "tokens 4, 2 trained" in shown.text
    ids = tokens_of("abcd")
    assert shown.titles[1] == f"token 1, id {ids[1]}, not trained"
    assert shown.titles[2] == f"token 2, id {ids[2]}, version 5, logprob -0.25, trained"


@pytest.mark.parametrize("answer", [*ANSWERS, EVIL])
def test_a_tokenizer_gives_the_text_escaped(answer: str) -> None:
    shown = Checked(arl.show(trajectory(PROMPT, answer), TOKENIZER)._repr_html_())
    visible = answer.replace("\x00", "\\x00").replace("\x1b", "\\x1b").replace("\n", "↵\n")
    assert PROMPT + visible in shown.text


def test_a_tokenizer_of_transformers_is_as_good() -> None:
    class Fast:
        backend_tokenizer = TOKENIZER

    assert "What is" in Checked(arl.show(trajectory(PROMPT, "4"), Fast())._repr_html_()).text


def test_what_is_no_tokenizer_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"show got a str as tokenizer; give one of arl\.load_tokenizer"):
        arl.show(trajectory(PROMPT, "4"), "a name")


def test_names_of_a_trajectory_are_escaped_too() -> None:
    shown = Checked(trajectory("a", "b", role=EVIL)._repr_html_())
    assert "<script>alert(1)</script>" in shown.text


def test_a_long_trajectory_is_cut_with_a_note() -> None:
    one = trajectory(PROMPT, "x" * 5000)
    for shown in (one._repr_html_(), arl.show(one, TOKENIZER)._repr_html_()):
        checked = Checked(shown)
        assert len(checked.titles) == MOST_TOKENS
        assert f"and {len(one.token_ids) - MOST_TOKENS} more tokens" in checked.text
        assert len(shown) < 400_000


def test_a_group_shows_its_first_trajectories() -> None:
    shown = Checked(group_of(20, 400)._repr_html_())
    assert "Group 3 example 7 of epoch 1, episodes 20, admitted at version 2" in shown.text
    assert "7: reward 7, " in shown.text
    assert "8: reward" not in shown.text
    assert "and 12 more trajectories" in shown.text


def test_groups_and_what_an_episode_returns_have_text_with_a_tokenizer() -> None:
    group = group_of(2)
    for record in (group, group.trajectories, list(group.trajectories)):
        assert Checked(arl.show(record, TOKENIZER)._repr_html_()).text.count(PROMPT) == 2
        assert PROMPT not in Checked(arl.show(record)._repr_html_()).text


def test_a_run_shows_its_numbers_and_curves(tmp_path: Path) -> None:
    html = read_run(write_run(tmp_path))._repr_html_()
    shown = Checked(html)
    assert "workflowAdder" in shown.text
    assert "episodes13" in shown.text
    assert "failed episodes3" in shown.text
    assert "reward (dots: held out)" in shown.text
    assert html.count("<circle") == 1


def test_a_life_that_still_trains_has_not_ended_as_the_one_before_it(tmp_path: Path) -> None:
    life(tmp_path, [began()])
    assert "endedfinished" in Checked(read_run(tmp_path)._repr_html_()).text
    with EventLog(tmp_path, EventsConfig()).open() as log:
        log.emit(began(version=1))
        assert log.flush()
        assert "ended" not in Checked(read_run(tmp_path)._repr_html_()).text


def test_an_episode_of_a_run_has_text_and_what_training_computed(tmp_path: Path) -> None:
    shown = Checked(arl.show(read_run(write_run(tmp_path)), episode="0.1")._repr_html_())
    assert "Episode 0.1 how finished, reward 0.0, step 1, life 1" in shown.text
    assert PROMPT + ANSWERS[1].replace("\x00", "\\x00").replace("\x1b", "\\x1b") in shown.text
    assert re.search(r"version 0, logprob -0.25, advantages 1, entropy 0.5, trained", shown.titles[-1])


def test_an_episode_that_failed_says_why_and_one_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path))
    shown = Checked(arl.show(run, episode="5.0")._repr_html_())
    assert "error ValueError: x" in shown.text
    assert "its tokens were not kept" in shown.text
    with pytest.raises(RunFileError, match=r"has no episode 9\.9"):
        arl.show(run, episode="9.9")


def test_a_result_of_training_shows_its_summary(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"version": 1, "reward": 0.5}) + "\n")
    result = TrainingResult(run_dir=tmp_path, summary={"eval_reward_after": 0.98, "steps": 1})
    shown = Checked(result._repr_html_())
    assert "eval_reward_after0.98" in shown.text
    assert "reward" in shown.text


def test_a_run_without_anything_is_shown(tmp_path: Path) -> None:
    life(tmp_path, [began()])
    assert "steps0" in Checked(read_run(tmp_path)._repr_html_()).text


def test_strange_numbers_cost_no_curve() -> None:
    values: list[Any] = [float("nan"), "x", None, 1e308, -1e308, float("inf"), 1.0, 2.0]
    rows = [{"version": i, "reward": value} for i, value in enumerate(values)]
    html = run_html("Run", {EVIL: EVIL}, rows, [{"version": "x"}])
    Checked(html)
    (line,) = re.findall(r'points="([^"]*)"', html.split("staleness")[0])
    assert len(line.split()) == 2


def test_a_curve_lies_within_its_picture_and_has_no_more_points_than_pixels() -> None:
    html = curve_svg("c", [[(float(i), float(i % 7)) for i in range(10_000)]], [(5.0, -3.0)])
    Checked(html)
    (width, height), (path,) = (
        re.search(r'viewBox="0 0 (\d+) (\d+)"', html).groups(),  # pyright: ignore[reportOptionalMemberAccess]
        re.findall(r'points="([^"]*)"', html),
    )
    points = [tuple(map(float, point.split(","))) for point in path.split()]
    assert len(points) == 300
    assert all(0 <= x <= int(width) and 0 <= y <= int(height) for x, y in points)
    assert curve_svg("none", [[]]) == ""
