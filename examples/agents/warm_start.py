"""The examples' tiny model: made from a config, then fine-tuned on demonstrations until it is a mediocre agent.

An example demonstrates whole conversations. The model learns the assistant's words, and only reads the rest:

    def lessons() -> list[list[Demonstration]]:
        shown = [{"role": "user", "content": "2 + 2 = ?"}, {"role": "assistant", "content": "4"}]
        return [[Demonstration(messages=shown), ...]]

    model = warm_start(config.run_dir / "model", lessons, seed=config.seed)
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from arl import (
    Conversation,
    OptimizerConfig,
    TinyShape,
    Tool,
    TrainConfig,
    finetuning,
    load_train_engine,
    progress,
    tiny_tokenizer,
    write_tiny_model,
)

SHAPE = TinyShape(hidden_size=128, intermediate_size=256, num_layers=4, num_heads=4, num_kv_heads=4)
_SEPARATOR = re.compile(r"(<\|\w+\|>|</?\w+>|\d| [-+*/=] |\b[a-z]\b|[-+*/=().])")
"""Tags, digits, operators and single letters stay out of phrases, so that the model copies them one by one."""
NUM_LOOKED_AT = 1000
"""The tokenizer's phrases come from this many demonstrations of each lesson."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A conversation to learn from. messages: as chat templates take them. The model imitates the `content` of the
    assistant's messages word for word, with tool calls as text (`tool_call`). tools: the tools that the model sees."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()


def warm_start(
    directory: Path,
    lessons: Callable[[], Sequence[Sequence[Demonstration]]],
    *,
    seed: int,
    shape: TinyShape = SHAPE,
    phrases: Iterable[str] = (),
    batch_size: int = 16,
    lr: float = 1e-3,
    num_threads: int = 2,
) -> Path:
    """Write the warm-started model to `directory`, and return its path. A model that is already there is reused.

    lessons: makes demonstrations; called only if there is no model yet. The lessons are learned one after another:
    first careful ones, say, which teach the model to copy, then mixed ones, which teach it bad habits. lr: the learning
    rate of the first steps, each of `batch_size` demonstrations; it falls to a tenth by the end of the last lesson.
    phrases: become one token each, as do every opening (system message and tools) and recurring phrases of the
    demonstrations. num_threads: more threads than free cores make it slower, since they wait for each other.
    """
    if directory.exists():
        return directory
    taught = lessons()
    known = [*phrases, *_phrases(taught)]
    blank = directory.with_name(directory.name + ".blank")
    shutil.rmtree(blank, ignore_errors=True)
    write_tiny_model(blank, known, shape, seed)
    num_steps = sum(-(-len(lesson) // batch_size) for lesson in taught)
    optimizer = OptimizerConfig(
        lr=lr, schedule="cosine", warmup_steps=30, total_steps=num_steps, min_lr_ratio=0.1, max_grad_norm=1.0
    )
    engine = load_train_engine(blank, TrainConfig(optimizer=optimizer, num_threads=num_threads), seed=seed)
    try:
        tokenizer = tiny_tokenizer(known)
        with progress("warm start", num_steps) as advance:

            def report(_: int, metrics: Mapping[str, float]) -> None:
                advance(loss=metrics["loss"])

            for lesson in taught:
                examples = [demonstrated(demonstration, tokenizer) for demonstration in lesson]
                finetuning.finetune(engine, examples, batch_size=batch_size, seed=seed, on_step=report)
        engine.export(directory)
    finally:
        engine.close()
        shutil.rmtree(blank, ignore_errors=True)
    return directory


def tool_call(name: str, **arguments: object) -> str:
    """A call in the format of Qwen and Hermes."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def demonstrated(
    demonstration: Demonstration, tokenizer: PreTrainedTokenizerBase
) -> tuple[Sequence[int], Sequence[int]]:
    """The token ids of a demonstration, and a mask of the tokens to learn."""
    conversation = Conversation(tokenizer, [], tools=demonstration.tools)
    for message in demonstration.messages:
        if message["role"] == "assistant":
            conversation.demonstrate(message["content"])
        else:
            conversation.add(message)
    return conversation.token_ids, conversation.loss_mask


def _phrases(lessons: Sequence[Sequence[Demonstration]]) -> list[str]:
    """The phrases that become one token each: every opening, and frequent phrases of the text after it."""
    looked_at = list(chain.from_iterable(islice(lesson, NUM_LOOKED_AT) for lesson in lessons))
    said = (m["content"] for demonstration in looked_at for m in demonstration.messages if m["role"] != "system")
    return [*dict.fromkeys(opening for opening in map(_opening, looked_at) if opening), *frequent_phrases(said)]


def frequent_phrases(texts: Iterable[str], min_share: float = 0.01) -> tuple[str, ...]:
    """The pieces of two characters or more, without digits, that occur in at least `min_share` of the texts."""
    counts: Counter[str] = Counter()
    num_texts = 0
    for text in texts:
        num_texts += 1
        counts.update({piece for piece in _SEPARATOR.split(text) if len(piece) > 1})
    return tuple(sorted(piece for piece, count in counts.items() if count >= min_share * num_texts))


def _opening(demonstration: Demonstration) -> str:
    """The system's turn, with the tools, without the tokens that begin and end it; empty if there is none."""
    tokenizer = tiny_tokenizer()
    first = Conversation(tokenizer, demonstration.messages[:1], tools=demonstration.tools)
    text = str(tokenizer.decode(list(first.token_ids)))
    opening = text.removeprefix("<|im_start|>").partition("<|im_end|>")[0]
    return opening if opening.startswith("system\n") else ""
