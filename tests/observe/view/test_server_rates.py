"""What each server answered lately, in `arl view`'s health and `arl top`."""

import time
from pathlib import Path
from typing import Any

from made_run import T0, began, life, looking_at

from arl.api.events import ServerFenced, ServerJoined, TurnEnded
from arl.observe.events.run_record import read_run
from arl.observe.view import health
from arl.observe.view.viewed_run import Ending


def answered(server: str, t: float) -> TurnEnded:
    return TurnEnded(episode="0.0", rid="r", server=server, seconds=1.0, prompt=9, output=30, stop="stop", t=t)


def rates(run_dir: Path, now: float) -> dict[str, tuple[float, float]]:
    servers = health.health(read_run(run_dir), now)["servers"]
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
    first, *others = health.health(read_run(tmp_path), T0 + 6)["servers"]
    assert (first["server"], first["state"], len(others)) == ("http://10.0.0.99:1", "fenced", 199)
