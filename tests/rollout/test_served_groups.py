"""Programs elsewhere play the episodes of a real controller: groups, the staleness bound, each example's one end."""

import asyncio
import json
import random
from collections import Counter
from itertools import cycle
from typing import Any

import aiohttp
import pytest
from players import controlled, train
from workflow.scripted_answers import TOKENIZER, ended

from arl.api.fakes import ScriptedEngine
from arl.api.settings.endpoint import EndpointConfig
from arl.endpoint.proxy import OpenAIProxy
from arl.endpoint.served_workflow import PlayedEpisodes, ServedWorkflow
from arl.rollout.ledger import GroupOutcome

KEY = "an-operators-key-of-32-characters"
ENDS = {"reward": 12, "error": 2, "rejected": 2, "nothing": 1, "without a call": 1}
"""How programs end their episodes, and how often. nothing: they die."""


class Programs:
    """Several programs, which play what they get until the run is over."""

    def __init__(self, url: str, episodes: PlayedEpisodes, seed: int) -> None:
        self.opened: list[str] = []
        self._episodes = episodes
        self._died = set[str]()
        self.ends: Counter[str] = Counter()
        self.most_open = 0
        self._url = url
        self._random = random.Random(seed)
        self._ends = cycle(self._random.sample(list(ENDS), sum(ENDS.values()), counts=list(ENDS.values())))

    async def run(self, client: aiohttp.ClientSession) -> None:
        while True:
            status, episode = await self._post(client, self._url, {"wait_s": 1}, KEY)
            if status == 410:
                return
            if status == 201:
                await self._play(client, episode)

    async def live(self) -> None:
        """Signs of life of all but those that died, however slowly they play."""
        while not self._episodes.is_over:
            for name in {*self._episodes._running} - self._died:
                self._episodes.running(name)
            await asyncio.sleep(0.02)

    async def _play(self, client: aiohttp.ClientSession, episode: dict[str, Any]) -> None:
        self.opened.append(episode["id"])
        async with client.get(self._url, headers={"Authorization": f"Bearer {KEY}"}) as answer:
            counts = await answer.json()
        self.most_open = max(self.most_open, counts["running"] + counts["waiting"])
        how = next(self._ends)
        if how != "without a call":
            url = f"{episode['base_url']}/chat/completions"
            chat = {"messages": [{"role": "user", "content": str(episode["example"]["number"])}]}
            for _ in range(self._random.randint(1, 2)):
                await self._post(client, url, chat, episode["api_key"])
        if how == "nothing":
            self._died.add(episode["id"])
            return
        end = {"error": {"error": "broken"}, "rejected": {"rejected": True}}.get(how, {"reward": self._random.random()})
        status, _ = await self._post(client, f"{self._url}/{episode['id']}/end", end, KEY)
        self.ends[f"{how} {status}"] += 1

    async def _post(self, client: aiohttp.ClientSession, url: str, body: Any, key: str) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        async with client.post(url, data=json.dumps(body), headers=headers) as answer:
            return answer.status, await answer.json()


@pytest.fixture(autouse=True)
def operators_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARL_ENDPOINT_KEY", KEY)


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_the_bound_holds_and_every_example_ends_once_however_programs_end_their_episodes(
    max_staleness: int,
) -> None:
    settings: dict[str, Any] = {"batch_size": 2, "group_size": 3, "max_staleness": max_staleness}
    rules = {"min_group_size": 2, "episode_retries": 1, "max_failure_rate": 1.0}
    endpoint = EndpointConfig(lease_s=0.1)
    urls: list[str] = []
    workflow = ServedWorkflow(proxy=OpenAIProxy(TOKENIZER, endpoint=endpoint), on_open=urls.append)
    engine = ScriptedEngine(lambda request: ended(str(request.sampling.max_new_tokens)))
    async with aiohttp.ClientSession() as client, asyncio.TaskGroup() as tasks, workflow:
        controller, buffer, _ = controlled(workflow, 60, engine, **settings, **rules)
        programs = Programs(urls[0], workflow._episodes, seed=max_staleness)
        tasks.create_task(programs.live())
        for _ in range(4):
            tasks.create_task(programs.run(client))
        batches = await train(controller, buffer, engine, range(6))
    groups = [group for batch in batches for group in batch]
    for version, batch in enumerate(batches):
        assert all(version - group.oldest_version <= max_staleness for group in batch)
    assert all(2 <= group.num_episodes <= 3 for group in groups)
    assert programs.most_open <= (max_staleness + 1) * 2 * 3
    assert len(set(programs.opened)) == len(programs.opened), "each attempt was one program's alone"
    outcomes = controller.ledger.outcomes(0)
    settled = Counter(row for rows in outcomes.values() for row in rows)
    assert set(settled.values()) == {1}
    trained = [row for epoch, row in (group.example_id for group in groups) if epoch == 0]
    assert sorted(outcomes[GroupOutcome.TRAINED]) == sorted(trained)
    assert programs.ends["reward 200"] >= sum(group.num_episodes for group in groups)
    assert programs.ends["error 200"] > 0
