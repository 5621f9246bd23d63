"""The API of `arl view`, over HTTP, on a run that the real event log wrote."""

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest
from made_run import (
    ANSWERS,
    PROMPT,
    SERVER,
    T0,
    Browser,
    Ending,
    began,
    episode,
    is_running,
    life,
    looking_at,
    trajectory,
    write_run,
)

from arl.api.events import (
    GroupAdmitted,
    KeptTokens,
)
from arl.observe.view.view_server import ViewServer
from arl.observe.view.viewed_run import ViewedRun
from arl.runtime.http.server import bind, serving


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "made")


@pytest.fixture
async def browser(run_dir: Path) -> AsyncIterator[Browser]:
    async with looking_at(run_dir) as browser:
        yield browser


async def test_a_run_tells_what_it_is(browser: Browser) -> None:
    (run,) = await browser.get("/api/runs")
    assert (run["run"], run["name"], run["how"], run["is_live"]) == (0, "made", "running", True)
    assert (run["version"], run["steps"], run["has_text"], run["problems"]) == (2, 4, True, [])
    assert (run["num_episodes"], run["num_groups"], run["num_running"]) == (13, 6, 1)
    assert [(one["life"], one["version"], one["workflow"]) for one in run["lives"]] == [
        (1, 0, "Adder"),
        (2, 1, "Adder"),
    ]
    assert run["settings"]["rollout"]["group_size"] == 2


async def test_steps_are_columns_with_null_for_what_is_missing_or_no_number(browser: Browser) -> None:
    steps = await browser.get("/api/runs/0/steps")
    assert steps["columns"] == {
        "version": [1, 2],
        "reward": [0.5, 0.75],
        "loss": [None, None],
        "clip_fraction": [None, 0.6],
    }
    assert steps["names"] == list(steps["columns"])
    assert steps["evaluations"] == [{"version": 1, "reward": 1.0}]
    assert (await browser.get("/api/runs/0/steps?since=1"))["columns"]["version"] == [2]


async def test_trained_tokens_are_counted_by_step_and_staleness_without_undone_ones(browser: Browser) -> None:
    seen = await browser.get("/api/runs/0/staleness")
    assert (seen["steps"], seen["staleness"], seen["bound"]) == ([1, 2], [0], 2)
    rows = await browser.rows("kind=training&undone=0")
    for number, (tokens,) in zip(seen["steps"], seen["tokens"], strict=True):
        assert tokens == sum(row["trained"] for row in rows if row["step"] == number)


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("kind=evaluation", ["1/e0.0"]),
        ("evaluation=0", ["1/e0.0"]),
        ("undone=1&descending=0", ["1/2.0", "1/2.1"]),
        ("step_from=2&step_to=2&descending=0", ["2/2.0", "2/2.1"]),
        ("how=failed,running&descending=0", ["2/5.0", "2/5.1", "2/5.2", "2/6.0"]),
        ("outcome=dropped&error=ValueError&descending=0", ["2/5.0", "2/5.1", "2/5.2"]),
        ("role=judge", ["1/1.1"]),
        ("reward_from=0.5&kind=training&descending=0", ["1/0.0", "1/1.0", "1/2.0", "2/2.0"]),
        ("example=2&life=1&descending=0", ["1/2.0", "1/2.1"]),
        ("group=0&descending=1", ["1/0.1", "1/0.0"]),
        ("workflow=Other", []),
        ("staleness_from=0&life=2&descending=0", ["2/2.0", "2/2.1"]),
        ("tokens_from=1000", []),
    ],
)
async def test_a_filter_keeps_what_it_names(browser: Browser, query: str, names: list[str]) -> None:
    assert await browser.names(query) == names


@pytest.mark.parametrize("column", ["reward", "tokens", "advantage", "seconds", "began", "step"])
async def test_rows_are_sorted_by_a_number_and_those_without_it_come_last(browser: Browser, column: str) -> None:
    for descending in (0, 1):
        values = [row[column] for row in await browser.rows(f"sort={column}&descending={descending}")]
        numbers = [value for value in values if value is not None]
        assert values == numbers + [None] * (len(values) - len(numbers))
        assert numbers == sorted(numbers, reverse=bool(descending))


async def test_rows_are_sorted_by_text(browser: Browser) -> None:
    values = [row["how"] for row in await browser.rows("sort=how&descending=0")]
    assert values == sorted(values)
    assert len(set(values)) == 3


async def test_pages_of_the_table_follow_each_other(browser: Browser) -> None:
    whole = await browser.names("sort=reward")
    pages = [await browser.names(f"sort=reward&offset={offset}&limit=5") for offset in (0, 5, 10)]
    assert [name for page in pages for name in page] == whole


async def test_a_row_has_what_training_computed(browser: Browser) -> None:
    (row,) = await browser.rows("group=0&reward_to=0")
    assert (row["advantage"], row["weight"], row["clipped"], row["entropy"]) == (-0.5, 1.5, 0.1, 0.7)
    assert (row["outcome"], row["step"], row["staleness"], row["rewards"]) == ("kept", 1, 0, {"correct": 0.0})
    assert row["has_tokens"]


@pytest.mark.parametrize("path", ["episodes/1/e0.0", "episodes/1/0.1", "groups/1/0"])
async def test_an_example_is_told_of_with_its_expected_answer(browser: Browser, path: str) -> None:
    told = await browser.get(f"/api/runs/0/{path}")
    assert told["example"]["question"] == PROMPT
    assert told["expected"] == ("answer" if "e0" in path else None)


async def found(browser: Browser, text: str) -> list[str]:
    """The names of the episodes that hold the text, once the search is done."""
    while True:
        page = await browser.get(f"/api/runs/0/episodes?text={text}&descending=0")
        if page["searched"]["done"] == page["searched"]["total"]:
            return [f"{row['life']}/{row['episode']}" for row in page["rows"]]


async def test_a_search_finds_text_in_tokens_examples_and_errors_in_any_case(browser: Browser) -> None:
    assert await found(browser, "日本語") == ["1/1.0"]
    assert await found(browser, "SECOND+TRY") == ["2/2.0"]
    assert await found(browser, "FAILS") == ["2/5.0", "2/5.1", "2/5.2"]
    assert await found(browser, "nowhere to be found") == []


async def test_a_search_sees_what_comes_later(tmp_path: Path) -> None:
    life(tmp_path, [began()])
    async with looking_at(tmp_path) as browser:
        assert await found(browser, "llama") == []
        part = trajectory(PROMPT, "a Llama")
        life(
            tmp_path,
            [GroupAdmitted(group=0, epoch=0, row=0, stamp=0, example={"of": "llamas"}), *episode("0.0", T0, [part])],
        )
        while not await browser.rows():
            pass
        assert await found(browser, "llama") == ["2/0.0"]


async def test_a_group_shows_its_episodes_side_by_side_with_their_answers(browser: Browser) -> None:
    group = await browser.get("/api/runs/0/groups/1/0")
    assert [one["answer"] for one in group["episodes"]] == list(ANSWERS[:2])
    assert [one["reward"] for one in group["episodes"]] == [1.0, 0.0]
    assert (group["example"], group["outcome"], group["step"]) == ({"question": PROMPT, "number": 0}, "kept", 1)


@pytest.mark.parametrize(("name", "answer"), [("0.0", ANSWERS[0]), ("0.1", ANSWERS[1]), ("1.0", ANSWERS[2])])
async def test_pieces_of_an_episode_join_to_its_text(browser: Browser, name: str, answer: str) -> None:
    (tokens,) = (await browser.get(f"/api/runs/0/episodes/1/{name}"))["trajectories"]
    assert "".join(tokens["pieces"]) == PROMPT + answer
    assert len(tokens["pieces"]) == len(tokens["token_ids"]) == tokens["num_tokens"]


async def test_an_episode_has_a_column_for_each_number_of_its_tokens(browser: Browser) -> None:
    episode = await browser.get("/api/runs/0/episodes/1/0.0")
    (tokens,) = episode["trajectories"]
    (start, stop, reward), advantages = tokens["turns"][0], tokens["columns"]["advantages"]
    assert (stop, reward) == (tokens["num_tokens"], 0.0)
    assert tokens["loss_mask"] == [0] * start + [1] * (stop - start)
    assert advantages[: start + 1] == [None] * (start + 1), "the prompt is not trained; the first value was nan"
    assert all(a < b for a, b in pairwise(advantages[start + 1 :]))
    assert set(tokens["behavior_logprobs"][start:]) == {-0.25}
    assert (tokens["temperature"], tokens["role"], tokens["number"]) == (1.0, "agent", 0)
    assert set(tokens["columns"]) == {"advantages", "entropy"}


async def test_an_episode_has_its_calls_with_their_times(browser: Browser) -> None:
    calls = (await browser.get("/api/runs/0/episodes/1/0.0"))["calls"]
    assert [call["event"] for call in calls] == ["TurnEnded", "ToolEnded", "RewardEnded"]
    assert [(call["began"] - T0, call["t"] - T0) for call in calls] == [
        (1.0, 2.0),
        (2.5, 3.0),
        (pytest.approx(3.9), 4.0),
    ]
    assert (calls[0]["server"], calls[0]["sends"], calls[1]["failure"], calls[2]["value"]) == (
        SERVER,
        1,
        "malformed",
        1.0,
    )


async def test_a_window_cuts_all_columns_alike(browser: Browser) -> None:
    path = "/api/runs/0/episodes/1/1.0"
    (whole,) = (await browser.get(path))["trajectories"]
    (part,) = (await browser.get(f"{path}?start=25&stop=30"))["trajectories"]
    assert (part["start"], part["stop"], part["num_tokens"]) == (25, 30, whole["num_tokens"])
    for name in ("pieces", "token_ids", "loss_mask", "versions", "behavior_logprobs"):
        assert part[name] == whole[name][25:30]
    assert part["columns"]["entropy"] == whole["columns"]["entropy"][25:30]
    (beyond,) = (await browser.get(f"{path}?start=9999"))["trajectories"]
    assert (beyond["pieces"], beyond["start"], beyond["stop"]) == ([], whole["num_tokens"], whole["num_tokens"])


async def test_a_long_episode_is_sent_in_windows(tmp_path: Path) -> None:
    part = trajectory(PROMPT, "x" * 30_000)
    life(tmp_path, [began(), *episode("e0.0", T0, [part]), KeptTokens(rows=[("e0.0", 0, part)])])
    async with looking_at(tmp_path) as browser:
        for query, sent in (("", 4000), ("?start=1000", 4000), ("?stop=10000", 10_000), ("?stop=30000", 20_000)):
            (tokens,) = (await browser.get(f"/api/runs/0/episodes/1/e0.0{query}"))["trajectories"]
            assert (len(tokens["token_ids"]), tokens["num_tokens"]) == (sent, len(part.token_ids))


async def test_trajectories_of_one_role_say_where_they_part(browser: Browser) -> None:
    episode = await browser.get("/api/runs/0/episodes/1/1.1")
    assert [one["role"] for one in episode["trajectories"]] == ["agent", "agent", "judge"]
    (branch,) = episode["branches"]
    same = len((PROMPT + ANSWERS[3]).encode())
    assert branch == {"role": "agent", "first": 0, "second": 1, "differs_at": same}
    assert (episode["branches"][0]["differs_at"], episode["roles"]) == (same, ["agent", "judge"])
    (only,) = [
        one for one in (await browser.get("/api/runs/0/episodes/1/1.1?trajectory=2"))["trajectories"] if one["pieces"]
    ]
    assert only["role"] == "judge"


async def test_an_episode_names_its_siblings_its_example_and_others_on_it(browser: Browser) -> None:
    episode = await browser.get("/api/runs/0/episodes/2/2.0")
    assert [one["episode"] for one in episode["siblings"]] == ["2.0", "2.1"]
    assert episode["example"]["number"] == 2
    others = [(one["life"], one["episode"]) for one in episode["same_example"]]
    assert others == [(1, "2.0"), (1, "2.1"), (2, "5.0"), (2, "5.1"), (2, "5.2")]


async def test_a_failed_episode_tells_its_attempts(browser: Browser) -> None:
    episode = await browser.get("/api/runs/0/episodes/2/5.1")
    (attempt,) = episode["failed_attempts"]
    assert (attempt["error"], attempt["message"], attempt["attempt"]) == ("ValueError", "bad call 1 at 0x7f10", 1)
    assert episode["trajectories"] == []
    assert "returned no trajectory" in episode["problem"]


async def test_an_episode_whose_tokens_were_not_kept_says_so(tmp_path: Path) -> None:
    life(tmp_path, [began(), *episode("e0.0", T0, [trajectory(PROMPT, "x")])])
    async with looking_at(tmp_path) as browser:
        told = await browser.get("/api/runs/0/episodes/1/e0.0")
    assert "were not kept: see the settings log.events" in told["problem"]


async def test_health_groups_failures_by_cause_with_an_example(browser: Browser) -> None:
    health = await browser.get("/api/runs/0/health")
    (cause,) = health["failures"]
    assert (cause["error"], cause["message"], cause["count"]) == ("ValueError", "bad call N at ID", 3)
    assert (cause["first"], cause["last"], cause["example"]) == (T0 + 113, T0 + 115, {"life": 2, "episode": "5.0"})
    (dropped,) = health["rejected"]
    assert (dropped["outcome"], dropped["reason"], dropped["count"]) == ("dropped", "failures", 1)
    (warning,) = health["warnings"]
    assert (warning["count"], warning["text"]) == (2, "disk 8 is slow")
    (server,) = health["servers"]
    assert (server["state"], server["reason"], server["version"]) == ("fenced", "does not answer", 2)
    assert health["lost"] == {"events": 3, "episodes": 1}
    assert set(health["disk"]) == {"events", "files"}


async def test_health_says_what_looks_wrong(browser: Browser) -> None:
    told = [one["text"] for one in (await browser.get("/api/runs/0/health"))["findings"]]
    assert told[0] == "No inference server serves."
    assert any("3 of the last" in text and "failed" in text for text in told)
    assert any("clipped" in text for text in told)


async def test_a_stream_tells_when_something_has_come(tmp_path: Path) -> None:
    life(tmp_path, [began()])
    async with looking_at(tmp_path) as browser, browser.session.get("/api/runs/0/stream") as stream:
        first = await tick(stream)
        assert (first["num_episodes"], first["is_live"]) == (0, True)
        life(tmp_path, [*episode("e0.0", T0, [trajectory(PROMPT, "x")])])
        while (later := await tick(stream))["num_episodes"] == 0:
            pass
        assert later["num_episodes"] == 1


async def tick(stream: aiohttp.ClientResponse) -> dict[str, int]:
    while not (line := await stream.content.readline()).startswith(b"data: "):
        assert line
    return json.loads(line[6:])


async def test_open_streams_end_with_the_server(run_dir: Path) -> None:
    async with aiohttp.ClientSession() as session:
        app = ViewServer([ViewedRun(run_dir, is_running)]).app
        async with serving(app, bind("127.0.0.1", 0)) as port:
            stream = await session.get(f"http://127.0.0.1:{port}/api/runs/0/stream")
            await tick(stream)
        await stream.content.read()  # raises if the stream was cut off


async def test_a_run_that_has_ended_says_how(run_dir: Path) -> None:
    def ended(_: Path) -> Ending:
        return Ending("failed", "no memory", "use less")

    async with looking_at(run_dir, ending_of=ended) as browser:
        (run,) = await browser.get("/api/runs")
    assert (run["how"], run["why"], run["next"]) == ("failed", "no memory", "use less")
    assert (run["is_live"], run["num_running"]) == (False, 0)
