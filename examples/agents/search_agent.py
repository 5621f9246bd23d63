"""A search agent: it looks things up over several turns, each search leading to the next, and answers in a few words.

    python examples/agents/search_agent.py

builds a tiny model and an invented encyclopedia, serves the encyclopedia's BM25 index over HTTP, and trains the model
on questions that take two searches, on two CPU cores in minutes. The same agent with a real model and HotpotQA:

    python examples/agents/search_agent.py --model Qwen/Qwen3-0.6B --dataset hotpotqa/hotpot_qa --subset distractor \\
        --eval_split validation --engine.kind sglang --engine.addresses http://127.0.0.1:30000 \\
        --train.device cuda --train.dtype bfloat16 --run_dir runs/hotpotqa

It also takes a file of that format (`--dataset hotpot_train.jsonl`). The agent searches the paragraphs that come with
the questions, or the corpus of a running server: `--search_url http://127.0.0.1:8000` (search_server.py has the
protocol). Read and score its episodes without training:

    arl try examples/agents/search_agent.py --n 4
    arl eval examples/agents/search_agent.py --n 8
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import search_tasks
from pydantic import PositiveFloat, PositiveInt
from search_server import Document, Index, SearchEngine

from arl import (
    DatasetError,
    Example,
    Experiment,
    ExperimentConfig,
    SamplingParams,
    Setup,
    Tool,
    ToolAgentWorkflow,
    finetuning,
    load_splits,
    load_tokenizer,
)
from arl.rewards import InlineReward, Score

SYSTEM = (
    "Answer the question. Look up what you do not know: search once for each thing, by its name. "
    "End with the answer alone, a name or a few words."
)
GENERATED = "generated"


class SearchAgentConfig(ExperimentConfig):
    """The search agent's settings, in addition to the settings of every run."""

    tiny_settings: ClassVar[Mapping[str, Any]] = {
        "run_dir": "runs/search",
        "steps": 50,
        "rollout": {"batch_size": 32, "group_size": 8, "max_staleness": 2},
        "train": {"optimizer": {"lr": 1e-4, "schedule": "linear", "total_steps": 50, "min_lr_ratio": 0.1}},
        "evaluation": {"every": 25},
        "max_new_tokens": 16,
        "max_turns": 4,
        "topk": 2,
    }

    dataset: str = GENERATED
    """Questions in HotpotQA's form (question, answer, context, supporting_facts): a dataset on the hub, a file or a
    directory; `generated` invents an encyclopedia and asks about it."""
    subset: str | None = None
    """Which configuration of a dataset on the hub."""
    eval_dataset: str | None = None
    """The dataset of held-out questions. Unset: `dataset`'s eval_split, or the last num_held_out rows if `dataset` is a
    single file."""
    eval_split: str = "test"
    """The split of held-out questions."""
    num_held_out: PositiveInt = 192
    """How many held-out questions to evaluate on, at most."""
    search_url: str | None = None
    """The URL of a running search server. Unset: the agent serves an index of all documents that come with the
    questions."""
    topk: PositiveInt = 3
    """How many documents each search returns."""
    max_turns: PositiveInt = 6
    """How many turns the agent may take in an episode."""
    max_new_tokens: PositiveInt = 1024
    """Tokens that each turn may have."""
    temperature: PositiveFloat = 1.0
    """The temperature that turns are sampled at."""


@dataclass(kw_only=True, eq=False, repr=False)
class SearchAgent(ToolAgentWorkflow):
    """Searches until it answers without calling the tool."""

    def answer(self, turn) -> str:
        """The turn's text without the model's thinking."""
        return turn.text.rpartition("</think>")[2].strip()

    async def ascore_episode(self, episode) -> Score:
        score = await super().ascore_episode(episode)
        read = "".join(result.content for result in episode.results)
        return replace(score, metrics={**score.metrics, **found(episode.data, read)})


class SearchTool(AbstractAsyncContextManager["list[Tool]"]):
    """The search engine as a tool, open as long as the agent."""

    def __init__(self, engine: SearchEngine, topk: int) -> None:
        self._engine, self._topk = engine, topk
        self.tool = Tool.from_function(self.search, parallel=True)

    async def search(self, query: str) -> str:
        """Search the encyclopedia; returns the entries that match best."""
        return shown(await self._engine.search(query, self._topk))

    async def __aenter__(self) -> list[Tool]:
        await self._engine.__aenter__()
        return [self.tool]

    async def __aexit__(self, *exc: object) -> None:
        await self._engine.__aexit__(*exc)


def prompt(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def shown(documents: Iterable[Document]) -> str:
    return "\n".join(f"{document.title}: {document.text}" for document in documents) or "nothing was found"


def answer_score(answer: str, data: Example) -> Score:
    """The reward is F1. Whether the answer matches exactly is logged too."""
    is_exact = words(answer) == words(data["answer"])
    return Score(f1(answer, data["answer"]), metrics={"exact_match": float(is_exact)})


def words(text: str) -> list[str]:
    """The words that SQuAD's and HotpotQA's scores compare: lower case, without punctuation and articles."""
    bare = "".join(char for char in text.lower() if char not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def f1(answer: str, reference: str) -> float:
    """The agreement of the words of both, 0 to 1, as HotpotQA scores it: yes and no are right or wrong."""
    given, expected = words(answer), words(reference)
    common = sum((Counter(given) & Counter(expected)).values())
    is_all_or_nothing = any(side in (["yes"], ["no"], ["noanswer"]) for side in (given, expected))
    if not common or (is_all_or_nothing and given != expected):
        return float(given == expected)
    return 2 * common / (len(given) + len(expected))


def found(data: Example, read: str) -> dict[str, float]:
    """The share of the supporting entries among the search results, if the question names them."""
    facts = data.get("supporting_facts") or []
    titles = set(facts["title"] if isinstance(facts, Mapping) else (title for title, _ in facts))
    return {"supporting_found": sum(f"{title}: " in read for title in titles) / len(titles)} if titles else {}


def questions(config: SearchAgentConfig) -> tuple[Sequence[Example], Sequence[Example]]:
    """Training and held-out questions. Generated ones are about different things."""
    if config.dataset == GENERATED:
        return search_tasks.questions("training"), search_tasks.questions("held_out")[: config.num_held_out]
    columns = ("question", "answer") if config.search_url else ("question", "answer", "context")
    return load_splits(
        config.dataset,
        config.eval_dataset,
        num_held_out=config.num_held_out,
        split=config.eval_split,
        subset=config.subset,
        columns=columns,
    )


def documents(rows: Iterable[Example]) -> list[Document]:
    """The paragraphs that come with HotpotQA's questions, each once."""
    return list(dict.fromkeys(document for row in rows for document in paragraphs(row["context"])))


def paragraphs(context: Any) -> list[Document]:
    """HotpotQA's own files have [title, sentences] pairs; its dataset on the hub has a list of titles and a list of
    sentences, as for facts."""
    try:
        pairs = zip(context["title"], context["sentences"], strict=True) if isinstance(context, Mapping) else context
        return [Document(title, "".join(sentences).strip()) for title, sentences in pairs]
    except (KeyError, TypeError, ValueError) as error:
        what = str(context)[:200]
        raise DatasetError(f"a context must be a list of [title, [sentence, ...]], and is {what}") from error


def prepare(config: SearchAgentConfig) -> Setup:
    training, held_out = questions(config)
    is_generated = config.dataset == GENERATED
    index = None
    if config.search_url is None:
        index = Index(search_tasks.documents() if is_generated else documents([*training, *held_out]))
    search = SearchTool(SearchEngine(url=config.search_url, index=index), config.topk)
    model = tiny_model(config, search.tool) if config.is_tiny else config.model
    agent = SearchAgent(
        load_tokenizer(model),
        InlineReward(answer_score),
        prompt=lambda row: prompt(row["question"]),
        tools=[search],
        sampling=SamplingParams(max_new_tokens=config.max_new_tokens, temperature=config.temperature),
        max_turns=config.max_turns,
    )
    return Setup(model=str(model), workflow=agent, dataset=training, eval_dataset=held_out)


def tiny_model(config: SearchAgentConfig, tool: Tool) -> Path:
    """A tiny model, warm-started on good and bad searches in a part of the encyclopedia that no question is about."""

    def lessons() -> list[list[Example]]:
        index = Index(search_tasks.documents())
        search = cache(lambda query: shown(index.best(query, config.topk)))
        return search_tasks.lessons(prompt, tool, search, config.seed)

    return finetuning.warm_start(config.run_dir / "model", lessons, phrases=search_tasks.phrases(), seed=config.seed)


experiment = Experiment(config=SearchAgentConfig, prepare=prepare)

if __name__ == "__main__":
    experiment.main()
