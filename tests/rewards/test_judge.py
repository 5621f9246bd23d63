"""A model as judge, over HTTP: its requests, its answers, its cache, its failures."""

import asyncio
import json
import logging
import threading
from base64 import b64encode
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from virtual_time import run_in_virtual_time
from workflow.served import BREAK, Served

from arl.api.errors import ConfigError, RewardError, RewardTimeoutError
from arl.rewards import ChatServer, JudgeReward, Score, WeightedReward
from arl.rewards.judge import AnswerCache
from arl.runtime.http import client as web_client

PATH = "/v1/chat/completions"
EXAMPLE = {"question": "2 + 2 = ?", "answer": "4"}
KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_client, "_FIRST_WAIT_S", 0.001)


def says(*texts: Any) -> Served:
    """A judge that says one after the other, and the last for ever."""
    left = list(texts)

    def answer(body: Any) -> Any:
        said = left.pop(0) if len(left) > 1 else left[0]
        return {"choices": [{"message": {"role": "assistant", "content": said}}]} if isinstance(said, str) else said

    return Served({PATH: answer})


def server_at(served: Served, **settings: Any) -> ChatServer:
    return ChatServer(served.url + "v1", "judge-1", **settings)


def files_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


async def test_the_judge_is_asked_with_the_examples_columns_and_scores_from_0_to_1() -> None:
    async with says('Right. ```json\n{"score": 7.5}\n```') as served:
        judge = JudgeReward(server_at(served, api_key=KEY), parameters={"temperature": 0.2})
        async with WeightedReward({"judge": (2.0, judge)}) as reward:
            assert await reward("It is {four}.", EXAMPLE) == Score(1.5, {"judge": 0.75})
        ((path, body),) = served.asked
    prompt = body.pop("messages")[0]["content"]
    assert (path, body) == (PATH, {"model": "judge-1", "temperature": 0.2})
    assert all(part in prompt for part in ("2 + 2 = ?", "\n4\n", "It is {four}.", '{"score": N}'))
    assert served.keys == [f"Bearer {KEY}"]


async def test_the_last_score_counts_in_the_form_and_scale_that_were_asked_for() -> None:
    form: dict[str, Any] = {"prompt": "Grade {response}", "pattern": r"Grade: (\d)", "scale": (1, 5)}
    async with says("Style: 5. Grade: 2, no: Grade: 3") as served, JudgeReward(server_at(served), **form) as judge:
        assert await judge("x", {}) == Score(0.5)
    assert served.asked[0][1]["messages"] == [{"role": "user", "content": "Grade x"}]


async def test_a_judge_that_gives_no_score_is_reminded_once() -> None:
    async with says("Hard to say.", '{"score": 10}', '{"score": 11}', '{"score": -1}') as served:
        judge = JudgeReward(server_at(served))
        async with judge:
            assert await judge("4", EXAMPLE) == Score(1.0)
            first, second = (body["messages"] for _, body in served.asked)
            assert second[:2] == [*first, {"role": "assistant", "content": "Hard to say."}]
            assert "no score from 0 to 10" in second[2]["content"]
            with pytest.raises(RewardError, match=r"judge-1 gave no score from 0 to 10 .*it said '{\"score\": -1}'"):
                await judge("4", EXAMPLE)
    assert len(served.asked) == 4


async def test_a_busy_judge_is_asked_again_after_its_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def sleep_a_little(delay: float) -> None:
        waits.append(delay)
        await sleep(0)

    served = says((429, {"error": {"message": "slow down"}}), BREAK, (503, {}), '{"score": 1}')
    served.headers = {"Retry-After": "17"}
    async with served, JudgeReward(server_at(served)) as judge:
        with monkeypatch.context() as patch:
            patch.setattr(web_client.asyncio, "sleep", sleep_a_little)
            assert await judge("4", EXAMPLE) == Score(0.1)
    assert (waits[0], waits[1] < 1, waits[2]) == (17.0, True, 17.0)


def test_a_retry_may_be_asked_for_by_date() -> None:
    assert web_client._seconds("2.5") == 2.5
    assert web_client._seconds("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert web_client._seconds("Wed, 21 Oct 2065 07:28:00 GMT") > 1e8
    assert web_client._seconds("Wed, 21 Oct 2065 07:28:00 GMT", "soon") > 1e8
    assert [web_client._seconds(asked) for asked in (None, "soon", f"Mon, 01 Jan {10**14} 00:00:00 GMT")] == [0.0] * 3


def test_a_date_goes_by_the_clock_of_the_server_that_names_it() -> None:
    for year in (2015, 2065):
        asked, sent = (f"Wed, 21 Oct {year} 07:28:{seconds} GMT" for seconds in (30, 13))
        assert web_client._seconds(asked, sent) == 17.0
        assert web_client._seconds(sent, asked) == 0.0


def test_requests_begin_no_faster_than_the_rate() -> None:
    begun: list[float] = []

    class Instant(ChatServer):
        async def _ask_once(self, path: str, payload: Any) -> Any:
            await self._turn(kept)
            begun.append(asyncio.get_running_loop().time())
            return {"choices": [{"message": {"content": '{"score": 1}'}}]}

    kept: Any = web_client._InLoop(connections=None, places=None)  # type: ignore[arg-type]

    async def ask_many() -> None:
        server = Instant("http://judge/v1", "judge-1", requests_per_minute=30)
        await asyncio.gather(*(server.complete([], {}) for _ in range(4)))
        await asyncio.sleep(60)
        await server.complete([], {})

    run_in_virtual_time(ask_many())
    assert begun == pytest.approx([0.0, 2.0, 4.0, 6.0, 66.0])


async def test_no_more_requests_are_under_way_than_allowed() -> None:
    both, waiting = asyncio.Event(), 0

    async def slow(body: Any) -> Any:
        nonlocal waiting
        waiting += 1
        if waiting == 2:
            both.set()
        await both.wait()
        return {"choices": [{"message": {"content": '{"score": 1}'}}]}

    async with Served({PATH: slow}) as served, JudgeReward(server_at(served, max_concurrent=2)) as judge:
        await asyncio.gather(*(judge(str(k), EXAMPLE) for k in range(6)))
    assert served.most_running == 2


def test_a_judge_may_be_used_in_one_event_loop_after_another() -> None:
    class Ones(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"message": {"content": '{"score": 1}'}}]}).encode())

        def log_message(self, *_: Any) -> None: ...

    async def ask_thrice() -> list[Score]:
        async with judge:
            return await asyncio.gather(*(judge(str(k), EXAMPLE) for k in range(3)))

    with ThreadingHTTPServer(("127.0.0.1", 0), Ones) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        judge = JudgeReward(ChatServer(f"http://127.0.0.1:{server.server_port}/v1", "judge-1", max_concurrent=1))
        assert [asyncio.run(ask_thrice()) for _ in range(2)] == [[Score(0.1)] * 3] * 2
        server.shutdown()


async def test_the_key_is_never_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    refusal = (401, {"error": {"message": f"Incorrect API key provided: {KEY}."}})
    with caplog.at_level(logging.DEBUG):
        async with says('{"score": 1}', refusal) as served:
            server = server_at(served, api_key_env="JUDGE_KEY")
            async with JudgeReward(server, cache=tmp_path) as judge:
                await judge("4", EXAMPLE)
                with pytest.raises(RewardError, match="HTTP 401: Incorrect API key provided") as raised:
                    await judge("5", EXAMPLE)
    assert served.keys == [f"Bearer {KEY}"] * 2
    kept = "".join(entry.read_text() for entry in files_in(tmp_path))
    assert kept
    assert KEY not in f"{raised.value!r} {raised.value.__cause__!r} {caplog.text} {kept} {server!r} {judge!r}"


async def test_a_password_in_the_url_is_sent_and_never_told() -> None:
    async with says((400, {"error": {"message": "no such model"}})) as served:
        server = ChatServer(served.url.replace("//", "//me:hush@") + "v1", "judge-1")
        async with JudgeReward(server) as judge:
            with pytest.raises(RewardError, match="no such model") as raised:
                await judge("4", EXAMPLE)
    assert served.keys == ["Basic " + b64encode(b"me:hush").decode()]
    assert "hush" not in f"{raised.value!r} {raised.value.__cause__!r} {server!r}"


async def test_a_failing_server_is_a_reward_error_that_says_what_to_do() -> None:
    for answer, what in [
        ((400, {"error": {"message": "no such model"}}), "the judge judge-1: .*HTTP 400: no such model"),
        ((404, {"detail": "Not Found"}), r"does base_url end in /v1\?"),
        ({"choices": []}, "answered without a message: {'choices': "),
        ((500, {}), r"HTTP 500: .*asked 2 times"),
    ]:
        async with says(answer) as served, JudgeReward(server_at(served, retries=1)) as judge:
            with pytest.raises(RewardError, match=what):
                await judge("4", EXAMPLE)
    async with says(asyncio.sleep(100)) as served, JudgeReward(server_at(served, timeout_s=0.05)) as judge:
        with pytest.raises(RewardTimeoutError, match=r"took longer than timeout_s=0\.05"):
            await judge("4", EXAMPLE)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda s: JudgeReward(s, prompt="Grade this"), "no {response}"),
        (lambda s: JudgeReward(s, prompt="{response} {"), "malformed: .*braces are doubled"),
        (lambda s: JudgeReward(s, prompt='{response} {"score": 1}'), "braces hold a column's name"),
        (lambda s: JudgeReward(s, prompt="{response} {answer.x}"), "braces hold a column's name"),
        (lambda s: JudgeReward(s, pattern="("), "not a regular expression"),
        (lambda s: JudgeReward(s, pattern="score"), "has no group"),
        (lambda s: JudgeReward(s, scale=(1, 1)), "scale is"),
        (lambda s: ChatServer("judge", "m"), "must begin with http"),
        (lambda s: ChatServer("http://judge", "m", api_key="a", api_key_env="B"), "give one of them"),
        (lambda s: ChatServer("http://judge", "m", api_key_env="NO_SUCH_KEY"), "NO_SUCH_KEY is not set"),
        (lambda s: ChatServer("http://judge", "m", requests_per_minute=0), "requests_per_minute is 0"),
    ],
)
def test_malformed_settings_are_refused(make: Callable[[ChatServer], Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        make(ChatServer("http://judge/v1", "m"))


async def test_an_example_must_have_the_columns_that_the_prompt_names() -> None:
    with pytest.raises(RewardError, match=r"names answer, question, .*only the columns 'text'"):
        await JudgeReward(ChatServer("http://judge/v1", "m"))("4", {"text": "2 + 2"})


async def test_equal_questions_are_asked_once_and_kept_for_other_processes(tmp_path: Path) -> None:
    async with says('{"score": 3}') as served:
        for _ in range(2):  # the second time as another process would
            async with JudgeReward(server_at(served), cache=tmp_path) as judge:
                scores = await asyncio.gather(*(judge("half a character: \ud83d", EXAMPLE) for _ in range(20)))
                assert scores == [Score(0.3)] * 20
        assert len(served.asked) == 1
        for other in (
            JudgeReward(server_at(served), cache=tmp_path, parameters={"temperature": 1.0}),
            JudgeReward(ChatServer(served.url + "v1", "judge-2"), cache=tmp_path),
            JudgeReward(server_at(served), cache=tmp_path, scale=(0, 30)),
        ):
            async with other:
                await other("half a character: \ud83d", EXAMPLE)
        assert len(served.asked) == 4


async def test_nonsense_and_failures_are_not_kept(tmp_path: Path) -> None:
    async with says("Hm.", "Hm.", (400, {}), '{"score": 3}') as served:
        judge = JudgeReward(server_at(served), cache=tmp_path)
        async with judge:
            for _ in range(2):
                with pytest.raises(RewardError):
                    await judge("4", EXAMPLE)
            assert await judge("4", EXAMPLE) == Score(0.3)


async def test_a_damaged_or_foreign_entry_is_asked_for_again(tmp_path: Path) -> None:
    cache, asked = AnswerCache(tmp_path), 0

    async def ask() -> str:
        nonlocal asked
        asked += 1
        return f"answer {asked}"

    assert await cache.answer({"a": "ü"}, ask) == "answer 1"
    (entry,) = files_in(tmp_path)
    whole = entry.read_text()
    foreign = ('{"request": {"a": "ü"}, "answer": 3}', whole.replace("\\u00fc", "u"))
    for damaged in (whole[:-5], "", "[]", "null", *foreign):
        entry.write_text(damaged)
        before = asked
        assert await AnswerCache(tmp_path).answer({"a": "ü"}, ask) == f"answer {before + 1}"
        assert json.loads(entry.read_text())["answer"] == f"answer {before + 1}"
    assert files_in(tmp_path) == [entry]


async def test_a_cancelled_question_is_asked_by_the_next_waiter_and_an_error_is_shared(tmp_path: Path) -> None:
    cache, began, go, asked = AnswerCache(tmp_path), asyncio.Event(), asyncio.Event(), 0

    async def ask() -> str:
        nonlocal asked
        asked += 1
        began.set()
        await go.wait()
        raise OSError("down")

    calls = [asyncio.create_task(cache.answer({}, ask)) for _ in range(4)]
    await began.wait()
    assert asked == 1
    began.clear()
    calls[0].cancel()
    await began.wait()
    go.set()
    cancelled, *errors = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert (asked, [str(error) for error in errors]) == (2, ["down"] * 3)


async def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    async def ask() -> str:
        return "yes"

    with pytest.raises(RewardError, match=r"the cache .*file cannot be written"):
        await AnswerCache(tmp_path / "file").answer({}, ask)
