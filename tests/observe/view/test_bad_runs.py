"""Runs that are old, cut short, damaged, or too much: each costs a sentence, never an answer."""

import errno
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from made_run import PROMPT, T0, Browser, began, episode, life, looking_at, trajectory, write_run

from arl.__main__ import main
from arl.api.events import (
    BatchTrained,
    EpisodeEnded,
    GroupAdmitted,
    KeptTokens,
    ServerJoined,
    ServerLoaded,
    TrainedSummary,
    TrajectorySummary,
    TurnEnded,
)
from arl.observe.events.batches import SCHEMAS, packed, unpacked

PATHS = ("steps", "staleness", "episodes", "episodes?text=x", "health")


async def ask_all(browser: Browser) -> list[str]:
    """Every address of run 0 answers; returns the run's problems."""
    for path in PATHS:
        await browser.get(f"/api/runs/0/{path}")
    (run,) = await browser.get("/api/runs")
    return run["problems"]


async def test_a_run_without_an_event_log_shows_its_steps_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"version": 1, "reward": 0.5}) + "\n{torn")
    async with looking_at(tmp_path) as browser:
        (problem,) = await ask_all(browser)
        assert "no event log" in problem
        assert (await browser.get("/api/runs/0/steps"))["columns"]["reward"] == [0.5]


async def test_a_damaged_batch_costs_its_records(tmp_path: Path) -> None:
    for number in range(3):
        life(tmp_path, [began(), *episode(f"e{number}.0", T0, [trajectory(PROMPT, "x")])])
    file = tmp_path / "events" / "events-0002-0001.arrows"
    file.write_bytes(file.read_bytes()[:-60] + bytes(60))
    async with looking_at(tmp_path) as browser:
        (problem,) = await ask_all(browser)
        assert "events-0002-0001.arrows is damaged at byte" in problem
        assert await browser.names("descending=0") == ["1/e0.0", "3/e2.0"]


@pytest.mark.parametrize("how", ["deleted", "damaged"])
async def test_tokens_that_are_gone_leave_the_episode_and_a_sentence(tmp_path: Path, how: str) -> None:
    write_run(tmp_path)
    for file in (tmp_path / "events").glob("tokens-*"):
        if how == "deleted":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:60] + bytes(file.stat().st_size - 60))
    async with looking_at(tmp_path) as browser:
        await ask_all(browser)
        told = await browser.get("/api/runs/0/episodes/1/0.0")
        assert how in told["problem"]
        assert (told["trajectories"], len(told["calls"]), told["parts"][0]["reward"]) == ([], 3, 1.0)
        group = await browser.get("/api/runs/0/groups/1/0")
        assert [one["answer"] for one in group["episodes"]] == ["", ""]
        assert (await browser.get("/api/runs/0/episodes?text=question"))["searched"] == {"done": 12, "total": 12}


async def test_two_hundred_servers_have_a_row_each(tmp_path: Path) -> None:
    servers = [f"http://10.0.0.{i}:1" for i in range(200)]
    loads = [ServerLoaded(server=server, version=1, seconds=1.0, t=T0 + 1) for server in servers]
    life(tmp_path, [began(), *(ServerJoined(server=server, t=T0) for server in servers), *loads])
    async with looking_at(tmp_path) as browser:
        assert len((await browser.get("/api/runs/0/health"))["servers"]) == 200


async def test_a_run_that_is_deleted_meanwhile_still_answers(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    async with looking_at(tmp_path / "run") as browser:
        for file in sorted((tmp_path / "run").rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        await ask_all(browser)
        assert "deleted" in (await browser.get("/api/runs/0/episodes/1/0.0"))["problem"]


async def test_text_without_a_tokenizer_is_token_ids(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "events" / "tokenizer.json").write_text("no tokenizer")
    async with looking_at(tmp_path) as browser:
        (run,) = await browser.get("/api/runs")
        (tokens,) = (await browser.get("/api/runs/0/episodes/1/0.0"))["trajectories"]
    assert not run["has_text"]
    assert tokens["pieces"] == [f"{token} " for token in tokens["token_ids"]]


@pytest.mark.parametrize(
    ("path", "status", "sentence"),
    [
        ("/api/runs/1/steps", 404, "there is no run 1"),
        ("/api/runs/x/steps", 404, "run is x"),
        ("/api/runs/0/episodes/1/9.9", 404, "has no episode 9.9 in its life 1"),
        ("/api/runs/0/episodes/1/%3Cb%3E", 404, "has no episode <b> in its life 1"),
        ("/api/runs/0/groups/1/99", 404, "has no group 99"),
        ("/api/runs/0/groups/-1/0", 404, "life is -1"),
        ("/api/runs/0/episodes?sort=size", 400, "sort is size; it must be one of"),
        ("/api/runs/0/episodes?step_from=x", 400, "step_from is x; it must be a number"),
        ("/api/runs/0/episodes?limit=-1", 400, "limit is -1"),
        ("/api/runs/0/episodes/1/0.0?start=²", 400, "start is ²"),
        ("/api/none", 404, "Not Found"),
    ],
)
async def test_a_wrong_request_is_answered_with_a_sentence(
    tmp_path: Path, path: str, status: int, sentence: str
) -> None:
    write_run(tmp_path)
    async with looking_at(tmp_path) as browser:
        assert sentence in (await browser.get(path, status))["error"]


@pytest.mark.parametrize("query", ["episodes?step_from=nan", "steps?since=inf"])
async def test_numbers_that_are_none_are_no_error(tmp_path: Path, query: str) -> None:
    write_run(tmp_path)
    async with looking_at(tmp_path) as browser:
        await browser.get(f"/api/runs/0/{query}")


@pytest.mark.parametrize(
    ("name", "sentence"), [("none", "does not exist"), ("empty", "holds no run"), ("file", "is not a directory")]
)
def test_what_holds_no_run_is_a_sentence(
    tmp_path: Path, name: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as end:
        main(["view", str(tmp_path / name)])
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err


@contextmanager
def unreadable(directory: Path) -> Iterator[None]:
    """Within the block, nobody may list what is in it: root, too."""
    iterdir = Path.iterdir

    def guarded(path: Path) -> Iterator[Path]:
        if path == directory:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return iterdir(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "iterdir", guarded)
        yield


def test_a_directory_without_permission_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    with unreadable(tmp_path), pytest.raises(SystemExit) as end:
        main(["view", str(tmp_path)])
    assert end.value.code == 2
    assert f"{tmp_path} cannot be read: Permission denied" in capsys.readouterr().err


async def test_an_event_log_that_cannot_be_read_for_a_while_is_named_until_it_can(tmp_path: Path) -> None:
    write_run(tmp_path)
    async with looking_at(tmp_path) as browser:
        with unreadable(tmp_path / "events"):
            while not (problems := (await browser.get("/api/runs"))[0]["problems"]):
                pass
            assert (await browser.get("/api/runs/0/health"))["failures"]
            answer = await browser.get("/api/runs/0/episodes/1/0.0", 503)
        assert "Permission denied" in problems[0]
        assert "Permission denied" in answer["error"]
        while await ask_all(browser):
            pass


async def test_a_run_that_is_deleted_while_it_is_looked_at_shows_what_was_read_and_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    async with looking_at(tmp_path / "run") as browser:
        names = await browser.names()
        shutil.rmtree(tmp_path / "run")
        problems = await ask_all(browser)
        assert await browser.names() == names
    assert problems[0].startswith(f"{tmp_path / 'run' / 'events'} is gone: what was read of it before is shown")


async def test_numbers_and_text_that_json_cannot_hold_are_answered_without(tmp_path: Path) -> None:
    row = '{"version": 1, "huge": 1' + "0" * 400 + ', "inf": Infinity, "name": "\\ud800"}\n'
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        (tmp_path / name).write_text(row)
    async with looking_at(tmp_path) as browser:
        told = await browser.get("/api/runs/0/steps")
    assert told["columns"] == {"version": [1], "huge": [None], "inf": [None], "name": [None]}
    assert told["evaluations"] == [{"version": 1, "huge": None, "inf": None, "name": "?"}]


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("token_ids", pa.array([[5.5, 6.5]])),
        ("loss_mask", pa.array([[False]])),
        ("versions", pa.array([None], pa.list_(pa.int32()))),
        ("advantages", pa.array([[0.5]], pa.list_(pa.float32()))),
        ("turns", pa.array([None], SCHEMAS["tokens"].field("turns").type)),
    ],
    ids=["ids that are no integers", "short", "a column missing", "too few trained", "no turns"],
)
async def test_columns_that_contradict_each_other_are_a_sentence(tmp_path: Path, name: str, column: pa.Array) -> None:
    part = trajectory(PROMPT, "x")
    life(tmp_path, [began(), *episode("e0.0", T0, [part]), KeptTokens(rows=[("e0.0", 0, part)])])
    file = tmp_path / "events" / "tokens-0001-0001.arrows"
    batch = unpacked(file.read_bytes())
    file.write_bytes(packed(batch.set_column(batch.schema.get_field_index(name), name, column)))
    async with looking_at(tmp_path) as browser:
        await ask_all(browser)
        assert "damaged" in (await browser.get("/api/runs/0/episodes/1/e0.0"))["problem"]


async def test_the_largest_numbers_are_answered(tmp_path: Path) -> None:
    trained = TrainedSummary("0.0", 0, 1e308, 0.0, 0.0, 0.0)
    huge = TrajectorySummary(reward=1e308, rewards={"a": 1e308}, tokens=2**62, trained=2**62, oldest=-(2**62))
    life(
        tmp_path,
        [
            began(rollout={"max_staleness": "many"}, model="\x00"),
            GroupAdmitted(group=0, epoch=0, row=-1, stamp=0, t=-1e308),
            EpisodeEnded(episode="0.0", how="finished", began=-1e308, reward=1e308, trajectories=[huge, huge], t=1e308),
            BatchTrained(version=2**62, groups=[0], seconds=1e308, trajectories=[trained] * 2),
            TurnEnded(episode="0.0", rid="", server="s", seconds=1e308, prompt=0, output=0, t=5.0),
        ],
    )
    async with looking_at(tmp_path) as browser:
        await ask_all(browser)
        assert (await browser.rows())[0]["rewards"] == {"a": None}
        await browser.get("/api/runs/0/episodes/1/0.0")
