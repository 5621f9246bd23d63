"""An agent whose task does not fit into its context: it reads a book page by page, and says what is in it.

    python examples/agents/long_agent.py

builds a tiny model with a context of 124 tokens, and trains it on books of 300, on two CPU cores in minutes. Before its
context is full, the model summarises it, and reads on in a fresh one. Summaries are trained like everything else that
it says; `--no-train_summaries` leaves them as they are, for comparison. The same agent with a real model:

    python examples/agents/long_agent.py --model Qwen/Qwen3-0.6B --num_pages 40 --context_length 4096 \\
        --engine.kind sglang --engine.addresses http://127.0.0.1:30000 \\
        --train.device cuda --train.dtype bfloat16 --run_dir runs/books

Read and score its episodes without training:

    arl try examples/agents/long_agent.py --n 4
    arl eval examples/agents/long_agent.py --n 8
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import long_tasks
from pydantic import PositiveFloat, PositiveInt

from arl import (
    Compaction,
    Example,
    Experiment,
    ExperimentConfig,
    SamplingParams,
    Setup,
    Tool,
    ToolAgentWorkflow,
    finetuning,
    load_tokenizer,
)
from arl.rewards import InlineReward, Score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYSTEM = "Read the book to its end, page by page. Then answer with the treasures in it: gems, metals and the like."
INSTRUCTION = "Note the treasures so far, or nothing."
HANDOVER = "Noted on earlier pages: {summary}"


class LongAgentConfig(ExperimentConfig):
    """The long agent's settings, in addition to the settings of every run."""

    tiny_settings: ClassVar[Mapping[str, Any]] = {
        "run_dir": "runs/long",
        "steps": 40,
        "rollout": {"batch_size": 8, "group_size": 8, "max_staleness": 2},
        "train": {"optimizer": {"lr": 1e-3, "schedule": "linear", "total_steps": 40, "min_lr_ratio": 0.1}},
        "evaluation": {"every": 40},
        "max_new_tokens": 8,
        "summary_tokens": 8,
        "context_length": 124,
        "num_pages": 10,
        "words": 7,
    }

    num_pages: PositiveInt = 40
    """Pages of a book."""
    words: PositiveInt = 200
    """Words of a page."""
    num_books: PositiveInt = 4000
    """How many books to train on."""
    num_held_out: PositiveInt = 192
    """How many held-out books to evaluate on."""
    context_length: PositiveInt = 4096
    """Tokens that a prompt and its answer may have together. A tiny model is made with this context."""
    summary_tokens: PositiveInt = 512
    """Tokens that a summary may have."""
    train_summaries: bool = True
    """Whether the summaries are trained."""
    max_new_tokens: PositiveInt = 1024
    """Tokens that each turn may have."""
    temperature: PositiveFloat = 1.0
    """The temperature that turns are sampled at."""


@dataclass(kw_only=True, eq=False, repr=False)
class LongAgent(ToolAgentWorkflow):
    """Reads to the end of the book, however often its context is full."""

    def answer(self, turn) -> str:
        """The turn's text without the model's thinking."""
        return turn.text.rpartition("</think>")[2]

    async def ascore_episode(self, episode) -> Score:
        score = await super().ascore_episode(episode)
        read = long_tasks.treasures_in([result.content for result in episode.results])
        return replace(score, metrics={"read": len(read) / len(episode.data["answer"])})


@asynccontextmanager
async def opened(data: Example) -> AsyncIterator[list[Tool]]:
    """The book of one episode."""
    yield [Tool.from_function(long_tasks.Book(data["pages"]).next_page)]


def f1(answer: str, data: Example) -> float:
    """The agreement of the treasures named with those in the book, 0 to 1."""
    named, expected = set(long_tasks.treasures_in([answer])), set(data["answer"])
    return 2 * len(named & expected) / (len(named) + len(expected))


def agent(config: LongAgentConfig, tokenizer: PreTrainedTokenizerBase) -> LongAgent:
    return LongAgent(
        tokenizer,
        InlineReward(f1),
        system=SYSTEM,
        open_tools=opened,
        sampling=SamplingParams(max_new_tokens=config.max_new_tokens, temperature=config.temperature),
        max_turns=config.num_pages + 4,
        compaction=compaction(config),
    )


def compaction(config: LongAgentConfig) -> Compaction:
    return Compaction(
        context_length=config.context_length,
        summary_tokens=config.summary_tokens,
        instruction=INSTRUCTION,
        handover=HANDOVER,
        train_summaries=config.train_summaries,
    )


def prepare(config: LongAgentConfig) -> Setup:
    size = config.num_pages, config.words
    training = long_tasks.books(1, config.num_books, *size)
    held_out = long_tasks.books(2, config.num_held_out, *size)
    model = config.model
    if config.is_tiny:
        teacher = long_tasks.Teacher(SYSTEM, compaction(config), *size, seed=100 + config.seed)
        model = str(
            finetuning.warm_start(
                config.run_dir / "model",
                teacher.lessons,
                shape=long_tasks.shape(config.context_length),
                phrases=[*long_tasks.phrases(), HANDOVER.removesuffix("{summary}")],
                seed=config.seed,
                batch_size=8,
                lr=3e-3,
                num_threads=1,
            )
        )
    return Setup(model=model, workflow=agent(config, load_tokenizer(model)), dataset=training, eval_dataset=held_out)


experiment = Experiment(config=LongAgentConfig, prepare=prepare)

if __name__ == "__main__":
    experiment.main()
