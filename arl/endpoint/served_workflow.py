"""ServedWorkflow: trains programs that arl does not start. They open episodes over HTTP, and post their rewards.

controller --> arun_episode --offer--> PlayedEpisodes --POST /episodes--> program, anywhere
                    |                        |                               | its calls: the episode's URL and key
                    +<------ its end --------+<----POST /episodes/ID/end-----+
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NoReturn

from arl.api.errors import ArlError, ConfigError, ProgramError
from arl.api.types import Example, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow, Shared
from arl.endpoint.episodes_api import PATH, EpisodesAPI
from arl.endpoint.played_episodes import PlayedEnd, PlayedEpisode, PlayedEpisodes
from arl.endpoint.proxy import OpenAIProxy, proxy_of
from arl.rewards.adapt import RewardLike, as_reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from arl.api.engine import Sampler


class ServedWorkflow(Shared, RolloutWorkflow):
    """Offers its episodes to programs elsewhere, and trains on the calls that they make. docs/serving.md has the HTTP.

        workflow = ServedWorkflow(tokenizer, sampling=SamplingParams(max_new_tokens=1024))

    reward: scores the text that a program posts as its `answer`; see as_reward. Without one, programs post a reward.
    proxy: instead of tokenizer and sampling, for further settings. on_open: called with the URL of /episodes.

    Programs need the key in $ARL_ENDPOINT_KEY. An episode waits for a program without a time limit;
    rollout.episode_timeout_s begins when a program takes it. One whose program says that it failed, or is silent for
    endpoint.lease_s, fails, and runs again as others do. It runs in one process (rollout.num_workers=0). Metrics:
    context_full, the proxy's metrics, and program_wait_s: how long the episode waited for a program.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reward: RewardLike | None = None,
        *,
        sampling: SamplingParams | None = None,
        proxy: OpenAIProxy | None = None,
        on_open: Callable[[str], object] = lambda url: None,
    ) -> None:
        super().__init__()
        self._proxy = proxy_of(tokenizer, sampling, proxy)
        self._score = None if reward is None else as_reward(reward)
        self._on_open = on_open
        self._episodes: PlayedEpisodes

    def __reduce__(self) -> NoReturn:
        raise ConfigError("its programs need one endpoint, and each process would have its own")

    async def _open(self, opened: AsyncExitStack) -> None:
        if self._score is not None:
            await opened.enter_async_context(self._score)
        await opened.enter_async_context(self._proxy)
        endpoint = self._proxy.endpoint
        self._lease_s = endpoint.lease_s
        self._episodes = PlayedEpisodes()
        api = EpisodesAPI(
            self._episodes,
            endpoint.operator_key,
            endpoint.lease_s,
            public_url=endpoint.public_url,
            has_reward=self._score is not None,
        )
        opened.enter_context(self._proxy.answering(PATH, api.answer))
        opened.push_async_callback(self._episodes.close)
        self._on_open(f"{self._proxy.url}/{PATH}")

    async def arun_episode(self, engine: Sampler, data: Example) -> Sequence[Trajectory] | None:
        if not self.is_open:
            raise ArlError("this ServedWorkflow is not open; use it within `async with`")
        with self._episodes.following(data) as episode:
            began = time.monotonic()
            async with self._proxy.episode(engine) as episode.session:
                await self._episodes.offer(episode)
                waited_s = time.monotonic() - began
                end = await episode.end_within(self._lease_s)
            episode.returned = await self._trajectories(episode, end, {"program_wait_s": waited_s})
            return episode.returned

    async def _trajectories(
        self, episode: PlayedEpisode, end: PlayedEnd, metrics: Mapping[str, float]
    ) -> Sequence[Trajectory] | None:
        """What the end makes of the session's calls. Raises ProgramError if the program failed, and TrajectoryError."""
        session = episode.session
        if end.error is not None:
            raise ProgramError(f"the program of the episode said that it failed: {end.error}")
        if end.rejected:
            return None
        metrics = {**end.metrics, **metrics, "context_full": float(session.is_truncated)}
        episode.reward, parts = end.reward, end.rewards
        if end.answer is not None and self._score is not None:
            score = await self._score(end.answer, episode.data)
            episode.reward, parts, metrics = score.value, score.parts, {**score.metrics, **metrics}
        assert episode.reward is not None
        return session.trajectories(episode.reward, metrics, rewards=parts)
