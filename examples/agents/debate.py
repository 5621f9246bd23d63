"""A debate: agents answer at the same time, read each other's answers, and answer again. The last answers are rewarded.

    python examples/agents/debate.py

builds a tiny model that often guesses, and trains it on two CPU cores in minutes. All agents have one role, so
each is compared with the debaters of all episodes of its group. With a real model and data:

    python examples/agents/debate.py --model Qwen/Qwen3-0.6B --dataset openai/gsm8k --debaters 3 \\
        --engine.kind sglang --engine.addresses http://127.0.0.1:30000 \\
        --train.device cuda --train.dtype bfloat16 --run_dir runs/gsm8k_debate

Read and score its episodes without training:

    arl try examples/agents/debate.py --n 4
    arl eval examples/agents/debate.py --n 8
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, PositiveInt

from arl import (
    Example,
    Experiment,
    ExperimentConfig,
    Member,
    RolloutWorkflow,
    Sampler,
    SamplingParams,
    Setup,
    Team,
    TeamSettings,
    TinyShape,
    Trajectory,
    finetuning,
    load_splits,
    load_tokenizer,
)
from arl.rewards import NumericMatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYSTEM = "Answer with a number."
OTHER, CONSIDER = PHRASES = "Another agent answered:\n", "\n\nConsider these answers, and give yours again."
NUM_DIGITS = 5
"""The tiny model is asked for the largest of so many digits."""
NUM_CAREFUL, NUM_MIXED = 3000, 500
"""Demonstrations: careful ones first, then ones in which most answers are guessed."""


class DebateConfig(ExperimentConfig):
    """The debate's settings, in addition to the settings of every run."""

    tiny_settings: ClassVar[Mapping[str, Any]] = {
        "run_dir": "runs/debate",
        "steps": 40,
        "rollout": {"batch_size": 16, "group_size": 8, "max_staleness": 2},
        "train": {"optimizer": {"lr": 1e-3}},
        "evaluation": {"every": 20},
        "max_new_tokens": 8,
    }

    dataset: str = "digits"
    """Columns `question` and `answer`: a dataset on the hub, a file or a directory; `digits` makes its own."""
    num_held_out: PositiveInt = 100
    """The number of held-out questions."""
    debaters: Annotated[int, Field(ge=2)] = 2
    """The number of agents."""
    rounds: PositiveInt = 2
    """How often each of them answers."""
    max_new_tokens: PositiveInt = 1024
    """Tokens of an answer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Debate(RolloutWorkflow):
    """Rewards each debater for its last answer. Metrics: turns; agreed, 1 if all last answers are equal."""

    tokenizer: PreTrainedTokenizerBase
    score: Callable[[str, Example], Awaitable[float]]
    sampling: SamplingParams
    debaters: int = 2
    rounds: int = 2

    declared_roles = frozenset({"debater"})

    async def arun_episode(self, engine: Sampler, data: Example) -> Sequence[Trajectory]:
        names = [f"debater {number + 1}" for number in range(self.debaters)]
        members = [Member(name=name, role="debater", system=SYSTEM) for name in names]
        team = Team(engine, members, TeamSettings(tokenizer=self.tokenizer, sampling=self.sampling))
        said = dict.fromkeys(names, data["question"])
        answers = dict.fromkeys(names, "")
        for _ in range(self.rounds):
            new = await team.ask_all(said)
            answers |= {name: answer for name, answer in new.items() if answer is not None}  # None: its context is full
            said = {name: others_said([answers[other] for other in names if other != name]) for name in names}
        rewards = {name: await self.score(answer, data) for name, answer in answers.items()}
        return team.trajectories(rewards, {"agreed": float(len(set(answers.values())) == 1)})


def others_said(answers: Sequence[str]) -> str:
    """What a debater is told between two rounds."""
    said = "\n\n".join(f"{OTHER}{answer}" for answer in answers)
    return f"{said}{CONSIDER}"


def questions(config: DebateConfig) -> tuple[Sequence[Example], Sequence[Example]]:
    """Training and held-out questions. No question is in both."""
    if config.dataset != "digits":
        columns = ("question", "answer")
        return load_splits(config.dataset, num_held_out=config.num_held_out, columns=columns)
    rng, made = random.Random(0), dict[str, Example]()
    while len(made) < 2000 + config.num_held_out:
        digits = rng.choices("0123456789", k=NUM_DIGITS)
        question = f"Which digit is the largest? {' '.join(digits)}"
        made[question] = {"question": question, "answer": max(digits)}
    rows = list(made.values())
    return rows[config.num_held_out :], rows[: config.num_held_out]


def lessons(rows: Sequence[Example], seed: int) -> list[list[Example]]:
    """The tiny model's demonstrations: debates about these questions, right ones and then mostly guessed ones."""
    rng = random.Random(seed)
    shares = ((NUM_CAREFUL, 0.0), (NUM_MIXED, 0.7))
    return [[debate(rng.choice(rows), rng, share) for _ in range(number)] for number, share in shares]


def debate(row: Example, rng: random.Random, share: float) -> Example:
    """A demonstration. share: of the debater's answers that are guessed; the other agent guesses half of its own."""
    first, others, last = (
        rng.choice("0123456789") if rng.random() < guessed else row["answer"] for guessed in (share, 0.5, share)
    )
    said = (SYSTEM, row["question"], first, others_said([others]), last)
    roles = ("system", "user", "assistant", "user", "assistant")
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]}


def prepare(config: DebateConfig) -> Setup:
    training, held_out = questions(config)
    model = config.model
    if config.is_tiny:
        directory, rows = config.run_dir / "model", questions(config.model_copy(update={"dataset": "digits"}))[0]
        demonstrations, shape = partial(lessons, rows, config.seed), TinyShape(hidden_size=64, num_layers=2)
        model = str(
            finetuning.warm_start(
                directory, demonstrations, seed=config.seed, shape=shape, phrases=PHRASES, lr=3e-3, num_threads=1
            )
        )
    agents = Debate(
        tokenizer=load_tokenizer(model),
        score=NumericMatch(),
        sampling=SamplingParams(max_new_tokens=config.max_new_tokens),
        debaters=config.debaters,
        rounds=config.rounds,
    )
    return Setup(model=model, workflow=agents, dataset=training, eval_dataset=held_out)


experiment = Experiment(config=DebateConfig, prepare=prepare)

if __name__ == "__main__":
    experiment.main()
