"""A run for the tests of `arl view`, written by the real event log: two lives, and something of everything."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from arl.api.events import (
    AttemptFailed,
    BatchTaken,
    BatchTrained,
    CheckpointWritten,
    EpisodeBegan,
    EpisodeEnded,
    EvaluationEnded,
    Event,
    GroupAdmitted,
    GroupEnded,
    KeptTokens,
    Lost,
    Published,
    RewardEnded,
    RunBegan,
    ServerFenced,
    ServerJoined,
    ServerLoaded,
    ServerPaused,
    ServerResumed,
    SnapshotTaken,
    ToolEnded,
    TrainedSummary,
    TrajectorySummary,
    TurnEnded,
    Warned,
)
from arl.api.settings.run import EventsConfig
from arl.api.types import Trajectory, TurnSpan
from arl.observe.events.writer import EventLog
from arl.observe.view.view_server import ViewServer
from arl.observe.view.viewed_run import Ending, EndingOf, ViewedRun
from arl.runtime.http.server import bind, serving

T0 = 1_700_000_000.0
SERVER = "http://10.0.0.1:30000"
PROMPT = "What is <b>2+2</b>? "
ANSWERS = ("It is 4. ☃", "<script>alert('x')</script>\x00\x1b[31m", "日本語の答え 🦙", "maybe five")
"""Of the episodes of group 0 and 1."""


def byte_tokenizer() -> Tokenizer:
    """A token for each byte; a few special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(content="<|im_end|>", special=True, normalized=False)])
    return tokenizer


TOKENIZER = byte_tokenizer()


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def trajectory(prompt: str, answer: str, version: int = 0, reward: float = 1.0, role: str = "agent") -> Trajectory:
    before, after = tokens_of(prompt), tokens_of(answer)
    mask = [0] * len(before) + [1] * len(after)
    return Trajectory(
        token_ids=before + after,
        loss_mask=mask,
        behavior_logprobs=[-0.25 * on for on in mask],
        versions=[version if on else -1 for on in mask],
        reward=reward,
        rewards={"correct": reward},
        metrics={"turns": 1.0},
        role=role,
        turns=[TurnSpan(start=len(before), stop=len(mask), reward=0.0)],
    )


def summary(one: Trajectory) -> TrajectorySummary:
    return TrajectorySummary(
        role=one.role,
        reward=one.reward,
        rewards=dict(one.rewards),
        tokens=len(one.token_ids),
        trained=one.num_trained_tokens,
        turns=len(one.turns),
        oldest=one.oldest_version,
        newest=one.newest_version,
    )


def life(run_dir: Path, records: Sequence[Event | KeptTokens]) -> None:
    log = EventLog(run_dir, EventsConfig())
    with log.open():
        for record in records:
            if isinstance(record, KeptTokens):
                log.keep(record)
            else:
                log.emit(record)


def began(version: int = 0, t: float = T0, **settings: Any) -> RunBegan:
    return RunBegan(
        version=version, arl="0.1", host="here", pid=7, workflow="Adder", num_examples=4, settings=settings, t=t
    )


def episode(name: str, start: float, parts: Sequence[Trajectory], example: dict[str, Any] | None = None) -> list[Event]:
    """A turn, a tool and a reward, within 4 s. example: of a held-out one."""
    return [
        EpisodeBegan(episode=name, t=start, example=example or {}),
        TurnEnded(episode=name, rid="r", server=SERVER, seconds=1.0, prompt=9, output=9, stop="stop", t=start + 1),
        ToolEnded(episode=name, tool="calculator", seconds=0.5, failure="malformed", t=start + 2),
        RewardEnded(episode=name, reward="correct", seconds=0.1, value=parts[0].reward, t=start + 3),
        EpisodeEnded(
            episode=name,
            how="finished",
            began=start,
            reward=parts[0].reward,
            trajectories=[summary(part) for part in parts],
            t=start + 4,
        ),
    ]


def group(number: int, start: float, answers: Sequence[str], version: int = 0) -> list[Event | KeptTokens]:
    """An episode for each answer: the first is right. The last of group 1 has two roles, and a branch."""
    example = {"question": PROMPT, "number": number}
    records: list[Event | KeptTokens] = [
        GroupAdmitted(group=number, epoch=0, row=number % 3, stamp=version, example=example, t=start)
    ]
    rows: list[tuple[str, int, Trajectory]] = []
    for index, answer in enumerate(answers):
        parts = [trajectory(PROMPT, answer, version, float(index == 0))]
        if number == 1 and index == len(answers) - 1:
            parts += [
                trajectory(PROMPT, answer + " or six", version, 0.0),
                trajectory("Judge: ", "no", version, 0.5, "judge"),
            ]
        records += episode(f"{number}.{index}", start + index, parts)
        rows += [(f"{number}.{index}", place, part) for place, part in enumerate(parts)]
    trained = sum(part.num_trained_tokens for _, _, part in rows)
    values = np.linspace(-1.0, 1.0, trained, dtype=np.float32)
    values[0] = np.nan
    kept = KeptTokens(rows=rows, trained={"advantages": values, "entropy": np.full(trained, 0.5, np.float32)})
    return [*records, GroupEnded(group=number, outcome="kept", t=start + 6), kept]


def step(version: int, groups: list[int], t: float) -> list[Event]:
    trained = [TrainedSummary(f"{number}.{i}", 0, 0.5 - i, 1.5, 0.1, 0.7) for number in groups for i in range(2)]
    return [
        BatchTaken(version=version - 1, groups=groups, waited_s=3.0, t=t),
        BatchTrained(version=version, groups=groups, seconds=2.0, trajectories=trained, t=t + 2),
        SnapshotTaken(version=version, seconds=0.1, t=t + 2.1),
        ServerPaused(server=SERVER, t=t + 2.2),
        ServerLoaded(server=SERVER, version=version, seconds=0.2, t=t + 2.4),
        ServerResumed(server=SERVER, t=t + 2.5),
        Published(version=version, snapshot_s=0.1, transfer_s=0.5, pause_s=0.3, num_bytes=1000, t=t + 2.6),
    ]


def evaluation(number: int, version: int, start: float) -> list[Event | KeptTokens]:
    part = trajectory(PROMPT, "held-out answer", version)
    return [
        *episode(f"e{number}.0", start, [part], {"question": PROMPT, "answer": "4"}),
        KeptTokens(rows=[(f"e{number}.0", 0, part)]),
        EvaluationEnded(
            number=number, version=version, reward=1.0, num_episodes=1, num_failed=0, seconds=4.0, t=start + 5
        ),
    ]


def failures(t: float) -> list[Event]:
    return [
        GroupAdmitted(group=5, epoch=0, row=2, stamp=1, example={"question": "fails"}, t=t),
        *(
            record
            for index in range(3)
            for record in (
                EpisodeBegan(episode=f"5.{index}", t=t + index),
                AttemptFailed(
                    episode=f"5.{index}",
                    attempt=1,
                    error="ValueError",
                    message=f"bad call {index} at 0x7f{index}0",
                    t=t + index + 1,
                ),
                EpisodeEnded(
                    episode=f"5.{index}",
                    how="failed",
                    began=t + index,
                    error="ValueError",
                    message="x",
                    t=t + index + 1,
                ),
            )
        ),
        GroupEnded(group=5, outcome="dropped", reason="failures", t=t + 5),
        GroupAdmitted(group=6, epoch=0, row=0, stamp=1, t=t + 5),
        EpisodeBegan(episode="6.0", t=t + 5),
    ]


def write_run(run_dir: Path) -> Path:
    """Life 1 trains versions 1 and 2; life 2 goes on from version 1, and trains another version 2."""
    run_dir.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {"steps": 4, "model": "nowhere", "rollout": {"max_staleness": 2, "group_size": 2}}
    life(
        run_dir,
        [
            began(**settings),
            ServerJoined(server=SERVER, t=T0),
            *group(0, T0 + 1, ANSWERS[:2]),
            *group(1, T0 + 2, ANSWERS[2:]),
            *step(1, [0, 1], T0 + 10),
            *group(2, T0 + 11, ("undone one", "undone two")),
            *step(2, [2], T0 + 20),
            CheckpointWritten(version=1, seconds=0.5, t=T0 + 21),
            *evaluation(0, 1, T0 + 15),
            Warned(level="warning", logger="arl.x", text="disk 7 is slow", t=T0 + 21),
            Warned(level="warning", logger="arl.x", text="disk 8 is slow", t=T0 + 22),
            Lost(num_events=3, num_episodes=1, why="full", t=T0 + 22),
        ],
    )
    life(
        run_dir,
        [
            began(1, T0 + 100, **settings),
            *group(2, T0 + 101, ("second try", "third try"), version=1),
            *step(2, [2], T0 + 110),
            *failures(T0 + 112),
            ServerFenced(server=SERVER, reason="does not answer", t=T0 + 119),
        ],
    )
    TOKENIZER.save(str(run_dir / "events" / "tokenizer.json"))
    metrics = [
        {"version": 1, "reward": 0.5, "loss": float("nan")},
        {"version": 2, "reward": 0.75, "clip_fraction": 0.6},
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (run_dir / "evaluations.jsonl").write_text(json.dumps({"version": 1, "reward": 1.0}) + "\n")
    return run_dir


class Browser:
    """Asks the server that shows `runs`."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self.session = session
        self.address = address

    async def get(self, path: str, status: int = 200, **headers: str) -> Any:
        """The JSON of an answer, which must have this status."""
        async with self.session.get(path, headers=headers) as answer:
            content = await answer.json()
            assert answer.status == status, content
            return content

    async def loaded(self, run: int = 0) -> None:
        """Wait until the run is read: every answer reads on."""
        while (loading := (await self.get("/api/runs"))[run]["loading"])["done"] < loading["total"] or not loading[
            "total"
        ]:
            pass

    async def rows(self, query: str = "") -> list[dict[str, Any]]:
        return (await self.get(f"/api/runs/0/episodes?{query}"))["rows"]

    async def names(self, query: str = "") -> list[str]:
        return [f"{row['life']}/{row['episode']}" for row in await self.rows(query)]


def is_running(_: Path) -> Ending:
    return Ending("running", "process 7", "")


@asynccontextmanager
async def looking_at(
    *run_dirs: Path, api_key: str | None = None, ending_of: EndingOf = is_running
) -> AsyncIterator[Browser]:
    runs = [ViewedRun(run_dir, ending_of) for run_dir in run_dirs]
    async with (
        serving(ViewServer(runs, api_key).app, bind("127.0.0.1", 0)) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        browser = Browser(session, f"http://127.0.0.1:{port}")
        if api_key is None and any((run_dirs[0] / "events").glob("*.arrows")):
            await browser.loaded()
        yield browser
