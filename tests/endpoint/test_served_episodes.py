"""Programs that open episodes over HTTP: what they get, what they post, what is refused, and what becomes of it all."""

import asyncio
import json
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from programs import saying
from workflow.scripted_answers import TOKENIZER

from arl.api.errors import ArlError, ConfigError
from arl.api.fakes import ScriptedEngine
from arl.api.settings.endpoint import EndpointConfig
from arl.api.types import Example, SamplingParams
from arl.endpoint import served_workflow
from arl.endpoint.proxy import OpenAIProxy
from arl.endpoint.served_workflow import ServedWorkflow
from arl.rewards import InlineReward
from arl.rollout.controller import run_examples
from arl.rollout.episode import Episode, EpisodeRunner
from arl.rollout.workers.pool import EpisodeWorkers
from arl.training.watchdog import waits

KEY = "an-operators-key-of-32-characters"
CHAT = {"messages": [{"role": "user", "content": "Why?"}]}
QUESTION: Example = {"question": "Why?", "answer": "Yes."}


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run waits at its end for programs that a test left playing."""
    monkeypatch.setattr(served_workflow, "_FAREWELL_S", 0.0)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: Any
    headers: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A workflow that is served, what runs its episodes, and a client of it."""

    workflow: ServedWorkflow
    runner: EpisodeRunner
    engine: ScriptedEngine
    client: aiohttp.ClientSession
    url: str
    port: int

    def run(self, data: Example = QUESTION) -> asyncio.Task[Episode]:
        return asyncio.ensure_future(self.runner.run(self.engine, data, name="the episode"))

    async def ask(self, method: str, path: str, body: Any = None, key: str = KEY) -> Answer:
        url = path if "://" in path else f"{self.url}{path}"
        headers = {"Authorization": f"Bearer {key}"}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        async with self.client.request(method, url, data=data, headers=headers) as response:
            text = await response.text()
            return Answer(response.status, json.loads(text) if text else None, response.headers)

    async def open(self, **asked: Any) -> dict[str, Any]:
        answer = await self.ask("POST", "/episodes", asked)
        assert answer.status == 201, answer
        return answer.body

    async def call(self, episode: dict[str, Any]) -> int:
        answer = await self.ask("POST", f"{episode['base_url']}/chat/completions", CHAT, episode["api_key"])
        return answer.status

    async def end(self, episode: dict[str, Any], **body: Any) -> Answer:
        return await self.ask("POST", f"/episodes/{episode['id']}/end", body)

    async def shows(self, **counts: int) -> None:
        """Wait until GET /episodes has these."""
        while not counts.items() <= (await self.ask("GET", "/episodes")).body.items():
            pass


@pytest.fixture(autouse=True)
def operators_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARL_ENDPOINT_KEY", KEY)


@asynccontextmanager
async def served(
    engine: ScriptedEngine | None = None,
    reward: Any = None,
    *,
    retries: int = 0,
    **endpoint: Any,
) -> AsyncIterator[Served]:
    settings = EndpointConfig.model_validate(endpoint)
    urls: list[str] = []
    proxy = OpenAIProxy(TOKENIZER, sampling=SamplingParams(max_new_tokens=32), endpoint=settings)
    workflow = ServedWorkflow(proxy=proxy, reward=reward, on_open=urls.append)
    runner = EpisodeRunner(workflow=workflow, timeout_s=60.0, retries=retries)
    async with workflow, aiohttp.ClientSession() as client:
        url, port = urls[0].removesuffix("/episodes"), workflow._proxy.port
        yield Served(
            workflow=workflow, runner=runner, engine=engine or saying("Yes."), client=client, url=url, port=port
        )


@asynccontextmanager
async def playing(**options: Any) -> AsyncIterator[tuple[Served, asyncio.Task[Episode], dict[str, Any]]]:
    """An episode that runs, and that a program has opened."""
    async with served(**options) as arl:
        running = arl.run()
        yield arl, running, await arl.open()
        running.cancel()


async def test_a_program_opens_an_episode_calls_the_model_and_posts_its_reward() -> None:
    async with served() as arl:
        running = arl.run({"question": "Why?", "number": 7, "bad": float("nan"), "set": {1}})
        episode = await arl.open()
        assert (episode["base_url"], episode["evaluation"]) == (f"{episode['url']}/v1", False)
        assert episode["example"] == {"question": "Why?", "number": 7, "bad": None, "set": "{1}"}
        assert 0 < episode["deadline_s"] <= 60
        assert [await arl.call(episode) for _ in range(2)] == [200, 200]
        state = await arl.ask("GET", f"/episodes/{episode['id']}")
        assert (state.body["state"], state.body["metrics"]["calls"]) == ("running", 2)
        ended = await arl.end(episode, reward=0.5, rewards={"right": 0.5}, metrics={"files": 3})
        assert ended.body == {"id": episode["id"], "state": "finished", "reward": 0.5, "num_turns": 2}
        trajectories = (await running).trajectories
        assert await arl.call(episode) == 401, "the key ends with the episode"
    assert [t.reward for t in trajectories] == [0.5, 0.5]
    assert dict(trajectories[0].rewards) == {"right": 0.5}
    assert {"files": 3, "calls": 2}.items() <= trajectories[0].metrics.items()
    assert arl.engine.requests[0].sampling.max_new_tokens == 32


async def test_the_urls_are_those_at_which_the_program_asked_or_the_public_ones() -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Host": "arl.example:99"}
    for public, begins in (
        (None, "http://arl.example:99/e/"),
        ("https://public.example/a", "https://public.example/a/e/"),
    ):
        async with served(public_url=public) as arl:
            running = arl.run()
            async with arl.client.post(f"http://127.0.0.1:{arl.port}/episodes", headers=headers) as answer:
                assert (await answer.json())["base_url"].startswith(begins)
            running.cancel()


async def test_an_answer_is_scored_by_the_workflows_reward() -> None:
    def right(answer: str, data: Example) -> float:
        return float(answer == data["answer"])

    async with served(reward=InlineReward(right)) as arl:
        running = arl.run()
        episode = await arl.open()
        await arl.call(episode)
        ended = await arl.end(episode, answer="Yes.", metrics={"files": 3})
        assert (ended.status, ended.body["reward"]) == (200, 1.0)
        (made,) = (await running).trajectories
    assert (made.reward, made.metrics["files"]) == (1.0, 3)


async def test_each_agent_has_its_reward() -> None:
    async with playing() as (arl, running, episode):
        for role in ("writer", "critic"):
            url = f"{episode['url']}/{role}/v1/chat/completions"
            assert (await arl.ask("POST", url, CHAT, episode["api_key"])).status == 200
        assert (await arl.end(episode, reward={"writer": 1, "critic": 0})).status == 200
        made = (await running).trajectories
    assert [(one.role, one.reward) for one in made] == [("writer", 1.0), ("critic", 0.0)]


@pytest.mark.parametrize(
    ("end", "state", "outcome"),
    [
        ({"error": "the tool broke"}, {"state": "failed"}, "said that it failed: the tool broke"),
        ({"rejected": True}, {"state": "rejected"}, ""),
    ],
)
async def test_a_program_says_that_its_episode_failed_or_is_to_be_rejected(
    end: dict[str, Any], state: dict[str, str], outcome: str
) -> None:
    async with playing() as (arl, running, episode):
        await arl.call(episode)
        ended = await arl.end(episode, **end)
        assert ended.status == 200
        assert state.items() <= ended.body.items()
        done = await running
    assert (done.is_finished, done.is_rejected) == (False, not outcome)
    assert outcome in str(done.error or "")


async def test_an_episode_that_failed_is_offered_again_to_the_next_program() -> None:
    async with served(retries=1) as arl:
        running = arl.run()
        first = await arl.open()
        await arl.end(first, error="out of memory")
        second = await arl.open()
        assert second["id"] != first["id"]
        assert second["api_key"] != first["api_key"]
        assert await arl.call(second) == 200
        assert (await arl.end(second, reward=1)).status == 200
        assert (await running).attempts == 2


async def test_an_end_that_is_posted_again_is_answered_as_the_first_time_and_another_is_refused() -> None:
    async with playing() as (arl, running, episode):
        await arl.call(episode)
        first = await arl.end(episode, reward=1)
        again, other = await arl.end(episode, reward=1), await arl.end(episode, reward=0)
        assert (first.status, again.status, again.body == first.body) == (200, 200, True)
        assert (other.status, other.body["error"][-9:]) == (409, " finished")
        assert (await running).reward == 1.0


async def test_a_program_without_a_call_has_ended_its_episode_and_is_told_why_that_failed() -> None:
    async with playing() as (arl, running, episode):
        ended = await arl.end(episode, reward=1)
        assert ended.status == 409
        assert "the program made no call that reached" in ended.body["error"]
        assert "made no call" in str((await running).error)


WRONG_ENDS = [
    (b"{", "is not JSON"),
    ({}, "one of reward, answer, error and rejected; this has none of them"),
    ({"reward": 1, "error": "no"}, "this has reward and error"),
    ({"reward": "1.0"}, 'reward is "1.0"; it must be a finite number, or a JSON object'),
    ({"reward": True}, "reward is true; it must be a finite number"),
    ({"reward": {"agent": "good"}}, "it must be a finite number, or a JSON object with one for each role"),
    (b'{"reward": NaN}', "NaN is not a JSON number"),
    (b'{"reward": 1e999}', "reward is Infinity; it must be a finite number"),
    ({"reward": 10**400}, "it must be a finite number"),
    ({"reward": 1, "metrics": {"n": 10**400}}, "metrics.n is 1000"),
    ({"reward": 1, "rewards": {"right": "yes"}}, 'rewards.right is "yes"; it must be a number'),
    (b'{"reward": 1, "metrics": {"n": -1e999}}', "metrics.n is -Infinity; it must be a finite number"),
    ({"reward": 1, "metrics": {str(i): i for i in range(257)}}, "metrics is"),
    ({"reward": 1, "score": 2}, "score (here 2): it is not known here"),
    ({"answer": "Yes."}, "this run's workflow has no reward"),
    ({"rejected": True, "metrics": {"n": 1}}, "metrics belong to an episode that finished"),
    ({"error": "no", "rewards": {"right": 1}}, "rewards are parts of a reward"),
    ({"rejected": "yes"}, 'rejected is "yes"; it must be true or false'),
]


async def test_an_end_that_is_wrong_is_refused_by_name_and_the_episode_goes_on() -> None:
    async with playing() as (arl, running, episode):
        await arl.call(episode)
        for body, said in WRONG_ENDS:
            answer = await arl.ask("POST", f"/episodes/{episode['id']}/end", body)
            assert (answer.status, said in answer.body["error"]) == (400, True), answer
        assert (await arl.end(episode, reward=0)).status == 200
        assert (await running).is_finished


async def test_without_a_free_episode_a_program_is_asked_to_come_again() -> None:
    async with served() as arl:
        answer = await arl.ask("POST", "/episodes", {"wait_s": 0.01})
        counts = await arl.ask("GET", "/episodes")
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    assert "no episode is free now" in answer.body["error"]
    assert counts.body == {"waiting": 0, "running": 0, "asking": 0, "over": False}


async def test_programs_that_wait_get_episodes_in_the_order_in_which_they_asked_and_oldest_episodes_first() -> None:
    async with served() as arl:
        runs = [arl.run({"number": i}) for i in range(3)]
        first, second = await arl.open(), await arl.open()
        await arl.shows(waiting=1, running=2)
        third = await arl.open()
        waiting = [asyncio.ensure_future(arl.open(wait_s=60))]
        await arl.shows(asking=1)
        fourth = arl.run({"number": 3})
        assert [e["example"]["number"] for e in (first, second, third, await waiting[0])] == [0, 1, 2, 3]
        for run in (*runs, fourth):
            run.cancel()


async def test_an_episode_that_runs_again_is_older_than_those_that_came_after_it() -> None:
    async with served(retries=1) as arl:
        runs = [arl.run({"number": i}) for i in range(3)]
        await arl.end(await arl.open(), error="out of memory")
        assert [(await arl.open())["example"]["number"] for _ in range(3)] == [0, 1, 2]
        for run in runs:
            run.cancel()


async def test_a_program_that_goes_away_while_it_waits_loses_no_episode() -> None:
    async with served() as arl:
        gone = asyncio.ensure_future(arl.open(wait_s=60))
        await arl.shows(asking=1)
        gone.cancel()
        await arl.shows(asking=0)
        running = arl.run()
        episode = await arl.open(wait_s=60)
        assert episode["example"]["question"] == "Why?"
        running.cancel()


async def test_an_episode_that_the_run_needs_no_more_is_gone_for_its_program() -> None:
    async with playing() as (arl, running, episode):
        running.cancel()
        await asyncio.wait([running])
        assert await arl.call(episode) == 401
        ended = await arl.end(episode, reward=1)
        assert (ended.status, "the run does not need it any more" in ended.body["error"]) == (410, True)


async def test_programs_that_wait_when_the_run_ends_learn_that_it_is_over() -> None:
    async with served() as arl:
        asking = asyncio.ensure_future(arl.ask("POST", "/episodes", {"wait_s": 60}))
        await arl.shows(asking=1)
        await arl.workflow._episodes.close()
        waited, late = await asking, await arl.ask("POST", "/episodes")
    for answer in (waited, late):
        assert (answer.status, answer.body["error"]) == (410, "the run is over: there are no more episodes")


async def test_the_end_of_the_run_waits_for_a_program_that_plays_to_learn_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served_workflow, "_FAREWELL_S", 60.0)
    async with playing() as (arl, running, episode):
        running.cancel()
        await asyncio.wait([running])
        closing = asyncio.ensure_future(arl.workflow._episodes.close())
        ended = await arl.end(episode, reward=1)
        await closing
    assert (ended.status, "or the run ends" in ended.body["error"]) == (410, True)


async def test_episodes_of_an_evaluation_say_so() -> None:
    async with served() as arl, asyncio.TaskGroup() as group:
        evaluating = group.create_task(run_examples(arl.engine, arl.runner, [QUESTION], max_concurrent=1))
        episode = await arl.open()
        assert episode["evaluation"]
        await arl.call(episode)
        await arl.end(episode, reward=0.25)
        assert [one.reward for one in await evaluating] == [0.25]


@pytest.mark.parametrize("key", ["", "wrong", KEY + "x", "clé"])
async def test_only_the_operators_key_opens_episodes_or_ends_them(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_workflow, "_WRONG_KEY_S", 0.0)
    async with playing() as (arl, running, episode):
        paths = ("/episodes", f"/episodes/{episode['id']}", f"/episodes/{episode['id']}/end", "/episodes/x/y")
        for path in paths:
            for wrong in (key, episode["api_key"]):
                answer = await arl.ask("POST", path, {"reward": 1}, key=wrong)
                assert (answer.status, "send the operator's key" in answer.body["error"]) == (401, True)
        assert await arl.call({**episode, "api_key": KEY}) == 401, "it does not call the model"
        assert not running.done()


async def test_wrong_keys_are_answered_late_few_at_a_time_and_right_ones_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served_workflow, "_WRONG_KEY_S", 3600.0)
    monkeypatch.setattr(served_workflow, "_MOST_WRONG_KEYS", 2)
    async with served() as arl:
        guesses = [asyncio.ensure_future(arl.ask("GET", "/episodes", key=f"guess {i}")) for i in range(3)]
        (refused,), waiting = await asyncio.wait(guesses, return_when=asyncio.FIRST_COMPLETED)
        assert refused.result().status == 429
        assert (await arl.ask("GET", "/episodes")).status == 200
        for guess in waiting:
            guess.cancel()
        await asyncio.wait(waiting)


async def test_a_path_or_an_episode_that_is_not_there_is_404() -> None:
    async with served() as arl:
        for path in ("", "none", "../e/x", "%2e%2e/%2e%2e/etc/passwd", "a%00b/end/x"):
            answer = await arl.ask("GET", f"/episodes/{path}")
            assert answer.status in (401, 404), "401: the client took the dots out of the path"
            assert answer.body["error"]
        answer = await arl.end({"id": "0123456789abcdef"}, reward=1)
    assert (answer.status, "there is no episode '0123456789abcdef'" in answer.body["error"]) == (404, True)


async def test_a_body_above_its_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_workflow, "_MAX_BODY_BYTES", 1000)
    async with served() as arl:
        answer = await arl.ask("POST", "/episodes", b" " * 2000)
    assert answer.status == 413


@pytest.mark.parametrize(
    ("key", "said"), [("", "ARL_ENDPOINT_KEY is not set"), ("short", "ARL_ENDPOINT_KEY has 5 characters")]
)
async def test_episodes_are_not_served_without_a_key_that_is_hard_to_guess(
    key: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARL_ENDPOINT_KEY", key)
    with pytest.raises(ConfigError, match=said):
        async with ServedWorkflow(TOKENIZER):
            pass


async def test_it_does_not_travel_to_worker_processes_and_says_what_it_needs(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"its programs need one endpoint.*rollout.num_workers=0"):
        EpisodeWorkers(ServedWorkflow(TOKENIZER), 1, tmp_path)
    with pytest.raises(ConfigError, match="either a tokenizer"):
        ServedWorkflow()
    with pytest.raises(ArlError, match="use it within `async with`"):
        await ServedWorkflow(TOKENIZER).arun_episode(saying("a"), QUESTION)


async def test_the_watchdog_says_that_episodes_wait_for_programs_and_for_their_ends() -> None:
    async with served() as arl:
        running = arl.run()
        await arl.shows(waiting=1)
        (line,) = waits([running])
        assert "1 x a program that plays an episode; is one running, with this URL and key?" in line
        await arl.open()
        (line,) = waits([running])
        assert "1 x the end of an episode that a program plays; woken by its POST /episodes/ID/end" in line
        running.cancel()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_the_guides_lines_for_curl_play_an_episode() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (lines,) = re.findall(r"^```bash\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)
    async with served() as arl:
        running = arl.run({"id": "7", **QUESTION})
        environment = {**os.environ, "ARL_URL": arl.url, "ARL_ENDPOINT_KEY": KEY}
        shell = await asyncio.create_subprocess_exec("bash", "-euc", lines, env=environment, stdout=subprocess.PIPE)
        said, _ = await shell.communicate()
        (made,) = (await running).trajectories
    assert shell.returncode == 0
    assert b'"content":"Yes."' in said
    assert said.endswith(b'"state":"finished","reward":1.0,"num_turns":1}')
    assert made.reward == 1.0
