"""Conversation: the transcript of one agent, exact to the token; and the trajectories made of transcripts.

Each path from the root to a leaf of a Dialogue is a trajectory, and each turn is trained in one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from arl.api.errors import PromptTooLongError, TrajectoryError
from arl.api.types import AGENT, ModelRequest, ModelResponse, SamplingParams, Trajectory, TurnSpan, new_id
from arl.workflow.chat_template import template_of
from arl.workflow.dialogue import Dialogue, Prompt, Rewriting, Turn, images_of, unanswered
from arl.workflow.messages import Message, with_read_images

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from arl.api.engine import Sampler
    from arl.workflow.tools import Tool
    from arl.workflow.turn_columns import Columns, Part

T = TypeVar("T")

MAX_EPISODE_TOKENS = 4_000_000
"""Most tokens of an episode's trajectories together; shared beginnings count in each."""
_MOST_UNANSWERED = 100
"""Consecutive calls without room for an answer, after which an error ends a loop that ignores is_full."""


class Conversation:
    """The transcript of one episode. Build it, `agenerate`, `add` what the environment says, `agenerate` again."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        template_options: Mapping[str, Any] | None = None,
        rewriting: Rewriting = "branch",
        session_id: str | None = None,
        role: str = AGENT,
    ) -> None:
        """Start from `messages`, whose images are read now. The template shows `tools` and gets `template_options`.

        rewriting: what to do when the template rewrites an earlier turn: "branch" into a new trajectory, "keep" the
        sampled tokens in view, or raise an "error". session_id: keeps all turns on one server; a new id if unset.
        role: of the agent that speaks, whose policy answers. Raises ModelError if the tokenizer has no chat template,
        and ImageError for an image that cannot be read.
        """
        self._dialogue = Dialogue(template_of(tokenizer, template_options), rewriting=rewriting)
        self._tools = tuple(tool.spec for tool in tools)
        self.session_id = session_id or new_id()
        self.role = role
        self._messages: list[Message] = [with_read_images(message) for message in messages]
        self.summaries: list[Turn] = []
        """The turns in which the model wrote a summary, if the conversation compacts itself."""
        self._last: Turn | None = None
        self._num_unanswered = 0

    @property
    def messages(self) -> tuple[Message, ...]:
        """Everything said so far, as messages."""
        return tuple(self._messages)

    @property
    def num_turns(self) -> int:
        """The number of turns, summaries apart."""
        return len(self._dialogue.turns) - len(self.summaries)

    @property
    def metrics(self) -> dict[str, float]:
        """Added to those of the trajectories."""
        return {"context_full": float(self.is_full)}

    @property
    def is_full(self) -> bool:
        """Whether the last prompt did not fit into the model's context. If so, end the episode as it is."""
        return self._num_unanswered > 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that the model has seen and sampled, in its present view, without messages added since."""
        return self._last.token_ids if self._last else self._prompt().input_ids

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """1 where the model spoke, for each of `token_ids`."""
        if self._last is None:
            return (0,) * len(self.token_ids)
        return tuple(
            bit for turn in self._last.path for bit in (0,) * len(turn.given_ids) + (1,) * len(turn.output_ids)
        )

    def add(self, *messages: Message) -> None:
        """Append messages of the environment: tool results, user turns. The model reads them before its next turn.

        Raises ImageError for an image that cannot be read.
        """
        if any(message["role"] == "assistant" for message in messages):
            raise ValueError(
                "an assistant's message cannot be added; sample it (agenerate), or demonstrate it (demonstrate)"
            )
        self._messages += [with_read_images(message) for message in messages]

    async def agenerate(self, engine: Sampler, sampling: SamplingParams) -> Turn:
        """Let the model speak. Raises the errors of `engine.agenerate`, and those of `Dialogue.prompt`.

        If a later prompt does not fit into the model's context, the turn has no tokens and an empty text, is_full is
        set, and the trajectories are truncated. If the first prompt does not fit, raises PromptTooLongError.
        """
        return await self._answered(await self._aprompt(), engine, sampling)

    async def _answered(self, prompt: Prompt, engine: Sampler, sampling: SamplingParams) -> Turn:
        try:
            response = await self._sampled(prompt, engine, sampling)
        except PromptTooLongError:
            if all(turn.response is None for turn in self._dialogue.turns) or self._num_unanswered == _MOST_UNANSWERED:
                raise
            self._num_unanswered += 1
            return unanswered(prompt)
        self._num_unanswered = 0
        return self._said(self._dialogue.record(prompt, response))

    async def _sampled(self, prompt: Prompt, engine: Sampler, sampling: SamplingParams) -> ModelResponse:
        input_ids: Any = self._dialogue.input_array(prompt)
        request = ModelRequest(
            input_ids=input_ids,
            sampling=sampling,
            session_id=self.session_id,
            routes_from=prompt.num_routed,
            role=self.role,
            images=prompt.all_images,
        )
        return await engine.agenerate(request)

    def demonstrate(self, text: str) -> None:
        """Append a turn to imitate, ended as the template ends turns: for supervised training, it has no logprobs."""
        self._said(self._dialogue.demonstrate(self._prompt(), text))

    def trajectories(
        self,
        reward: float,
        metrics: Mapping[str, float] | None = None,
        role: str | None = None,
        *,
        rewards: Mapping[str, float] | None = None,
        turn_rewards: Sequence[float] | None = None,
        states: Sequence[str | None] | None = None,
    ) -> tuple[Trajectory, ...]:
        """One trajectory, or one for each branch, to return from arun_episode. Each sampled token is trained once.

        metrics: added to `context_full`, which is 1 if there was no room for another turn. rewards: named parts of the
        reward. turn_rewards, states: one for each sampled turn (see TurnSpan), else raises TrajectoryError. role:
        instead of the conversation's.
        """
        check_entries(self.num_turns, turn_rewards=turn_rewards, states=states)
        turns = self._trained_turns()
        return trajectories(
            turns,
            reward,
            metrics={**(metrics or {}), **self.metrics},
            role=role or self.role,
            rewards=rewards,
            turn_rewards=self._spread(turns, turn_rewards, 0.0),
            states=self._spread(turns, states, None),
            cut_after=turns[-1] if turns and self.is_full else None,
        )

    def _trained_turns(self) -> tuple[Turn, ...]:
        return self._dialogue.turns

    def _spread(self, turns: Sequence[Turn], given: Sequence[T] | None, of_summary: T) -> list[T] | None:
        """One entry for each of the turns: those given, and `of_summary` for summaries."""
        left = iter(given or ())
        return None if given is None else [of_summary if turn in self.summaries else next(left) for turn in turns]

    def _prompt(self) -> Prompt:
        return self._dialogue.prompt(self._messages, self._tools, after=self._last)

    async def _aprompt(self, *more: Message) -> Prompt:
        """As `_prompt`, with these messages after all others."""
        return await self._dialogue.aprompt((*self._messages, *more), self._tools, after=self._last)

    def _said(self, turn: Turn) -> Turn:
        self._last = turn
        self._messages.append(turn.message)
        return turn


def trajectories(
    turns: Sequence[Turn],
    reward: float,
    *,
    metrics: Mapping[str, float] | None = None,
    role: str = AGENT,
    rewards: Mapping[str, float] | None = None,
    turn_rewards: Sequence[float] | None = None,
    states: Sequence[str | None] | None = None,
    cut_after: Turn | None = None,
) -> tuple[Trajectory, ...]:
    """One trajectory for each path. All have the outcome `reward`, which advantages count once for an episode.

    A turn on several paths is trained in the first of them, and has loss_mask 0 in the others. If the turns of a path
    were sampled at different temperatures, each temperature gets a trajectory. Only the first trajectory has the
    metrics, so that they are averaged over episodes. cut_after: the turn that left no room for another.
    Raises TrajectoryError unless turn_rewards and states have one entry for each turn, and if nothing was sampled.
    """
    from arl.workflow.turn_columns import joined, kept_ids, routes

    if not turns or any(turn.response is None for turn in turns):
        raise TrajectoryError("nothing was sampled, or a turn was demonstrated: there is no trajectory to train on")
    check_entries(len(turns), turn_rewards=turn_rewards, states=states)
    spans = {
        id(turn): (r, state)
        for turn, r, state in zip(turns, turn_rewards or [0.0] * len(turns), states or [None] * len(turns), strict=True)
    }
    paths = list(paths_of(turns))
    num_tokens = sum(len(turn.given_ids) + len(turn.output_ids) for path, _ in paths for turn in path)
    if num_tokens > MAX_EPISODE_TOKENS:
        raise TrajectoryError(
            f"the episode is {len(paths)} trajectories of {num_tokens} tokens together, and at most "
            f"{MAX_EPISODE_TOKENS} can be trained: each turn that later prompts do not show as it was said is a "
            "trajectory with everything before it; end episodes sooner, let the template keep earlier turns (thinking, "
            "for instance), or keep the sampled tokens in view (rewriting='keep')"
        )
    made: list[Trajectory] = []
    columns: dict[tuple[int, int], Columns] = {}  # of turns that several paths share, made once
    for path, trained in paths:
        is_trained = set(trained)
        owned: list[TurnSpan] = []
        parts: list[Part] = []
        start = 0
        for turn in path:
            assert turn.response is not None
            parts.append((turn.given_ids, turn.response, turn in is_trained))
            stop = start + len(turn.given_ids) + len(turn.output_ids)
            if turn in is_trained:
                turn_reward, state = spans[id(turn)]
                owned.append(TurnSpan(start=stop - len(turn.output_ids), stop=stop, reward=turn_reward, state=state))
            start = stop
        token_ids, loss_mask, logprobs, versions = joined(parts, columns)
        made.append(
            Trajectory(
                token_ids=token_ids,
                loss_mask=loss_mask,
                behavior_logprobs=logprobs,
                versions=versions,
                reward=reward,
                rewards=rewards or {},
                turns=tuple(owned),
                is_truncated=path[-1].is_truncated or path[-1] is cut_after,
                metrics=metrics or {} if not made else {},
                role=role,
                temperature=_temperature(trained[0]),
                kept_ids=kept_ids(parts),
                routes=routes(parts),
                images=images_of(path),
            )
        )
    return tuple(made)


def check_entries(num_turns: int, *, turn_rewards: Sequence[float] | None, states: Sequence[str | None] | None) -> None:
    """Raise TrajectoryError unless both have one entry for each turn, if they are given."""
    for name, given in (("turn_rewards", turn_rewards), ("states", states)):
        if given is not None and len(given) != num_turns:
            raise TrajectoryError(f"{name} has {len(given)} entries for {num_turns} sampled turns; give one for each")


def paths_of(turns: Sequence[Turn]) -> Iterator[tuple[list[Turn], list[Turn]]]:
    """Trajectories in the making, in the order of their leaves: the turns from the root to a leaf, and those of them
    that are trained there, all of one temperature.

    Forgotten turns (not in `turns`) are seen by later ones, not trained.
    """
    untaken = set(map(id, turns))
    parents = set[int]()
    for turn in turns:
        parent = turn.parent
        while parent is not None and id(parent) not in untaken:
            parent = parent.parent
        parents.add(id(parent))
    for leaf in (turn for turn in turns if id(turn) not in parents):
        path = leaf.path
        new = [turn for turn in path if id(turn) in untaken]
        untaken.difference_update(map(id, new))
        for temperature in dict.fromkeys(_temperature(turn) for turn in new):
            owned = [turn for turn in new if _temperature(turn) == temperature]
            yield path[: path.index(owned[-1]) + 1], owned


def _temperature(turn: Turn) -> float:
    return turn.response.temperature if turn.response else 1.0
