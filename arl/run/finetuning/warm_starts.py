"""A warm start: a tiny model, made on the spot and fine-tuned on demonstrations until it is a mediocre agent.

It gives an example, a test or a trial of a reward something to improve in minutes on a CPU.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path

from arl.api.settings.engines import OptimizerConfig, TrainConfig
from arl.api.types import Example
from arl.engine.model_files import load_tokenizer
from arl.engine.tiny import TinyShape, TinyVision, tiny_tokenizer, write_tiny_model, write_tiny_vision_model
from arl.run.finetuning.examples import finetune, to_demonstrations, write_model
from arl.run.learner import load_train_engine
from arl.training.display import progress, waiting
from arl.workflow.chat_template import ChatTemplate, template_of
from arl.workflow.messages import texts_of

SHAPE = TinyShape(hidden_size=128, intermediate_size=256, num_layers=4, num_heads=4, num_kv_heads=4)
_SEPARATOR = re.compile(r"(<\|\w+\|>|</?\w+>|\d| [-+*/=] |\b[a-z]\b|[-+*/=().])")
"""Tags, digits, operators and single letters stay out of phrases, so that the model copies them one by one."""
NUM_LOOKED_AT = 1000
"""The tokenizer's phrases come from this many demonstrations of each lesson."""


def warm_start(
    directory: Path,
    lessons: Callable[[], Sequence[Sequence[Example]]],
    *,
    seed: int,
    shape: TinyShape | tuple[TinyShape, TinyVision] = SHAPE,
    phrases: Iterable[str] = (),
    batch_size: int = 16,
    lr: float = 1e-3,
    num_threads: int = 2,
) -> Path:
    """Write the warm-started model to `directory`, and return its path. A model that is already there is reused.

    lessons: makes demonstrations, rows with `messages` and perhaps `tools` as `to_demonstrations` takes them; called
    only if there is no model yet. The lessons are learned one after another: first careful ones, say, which teach the
    model to copy, then mixed ones, which teach it bad habits. shape: with a TinyVision beside it, the model is a
    Qwen2.5-VL, which sees, and demonstrations may have images. phrases: become one token each, as do every opening
    (system message and tools) and recurring phrases of the demonstrations. batch_size: demonstrations of a step. lr:
    the learning rate of the first steps; it falls to a tenth by the end of the last lesson. num_threads: more threads
    than free cores make it slower, since they wait for each other.
    """
    if directory.exists():
        return directory
    blank = directory.with_name(directory.name + ".blank")
    with waiting(f"making a tiny model and its lessons in {directory.parent}"):
        taught = lessons()
        known = [*phrases, *_phrases(taught)]
        shutil.rmtree(blank, ignore_errors=True)
        if isinstance(shape, TinyShape):
            write_tiny_model(blank, known, shape, seed)
        else:
            write_tiny_vision_model(blank, known, *shape, seed)
        tokenizer = load_tokenizer(str(blank))
        examples = [to_demonstrations(lesson, tokenizer) for lesson in taught]
    num_steps = sum(-(-len(lesson) // batch_size) for lesson in taught)
    optimizer = OptimizerConfig(
        lr=lr, schedule="cosine", warmup_steps=30, total_steps=num_steps, min_lr_ratio=0.1, max_grad_norm=1.0
    )
    engine = load_train_engine(blank, TrainConfig(optimizer=optimizer, num_threads=num_threads), seed=seed)
    try:
        with progress("warm start", num_steps) as advance:

            def report(_: int, metrics: Mapping[str, float]) -> None:
                advance(loss=metrics["loss"])

            for lesson in examples:
                finetune(engine, lesson, batch_size=batch_size, seed=seed, on_step=report)
        write_model(engine, directory)
    finally:
        engine.close()
        shutil.rmtree(blank, ignore_errors=True)
    return directory


def tool_call(name: str, **arguments: object) -> str:
    """A call in the format of Qwen and Hermes."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _phrases(lessons: Sequence[Sequence[Example]]) -> list[str]:
    """The phrases that become one token each: every opening, and frequent phrases of the text after it."""
    looked_at = list(chain.from_iterable(islice(lesson, NUM_LOOKED_AT) for lesson in lessons))
    template = template_of(tiny_tokenizer())
    openings = dict.fromkeys(filter(None, (_opening(row, template) for row in looked_at)))
    said = (text for row in looked_at for m in row["messages"] if m["role"] != "system" for text in texts_of(m))
    return [*openings, *frequent_phrases(said)]


def frequent_phrases(texts: Iterable[str], min_share: float = 0.01) -> tuple[str, ...]:
    """The pieces of two characters or more, without digits, that occur in at least `min_share` of the texts."""
    counts: Counter[str] = Counter()
    num_texts = 0
    for text in texts:
        num_texts += 1
        counts.update({piece for piece in _SEPARATOR.split(text) if len(piece) > 1})
    return tuple(sorted(piece for piece, count in counts.items() if count >= min_share * num_texts))


def _opening(row: Example, template: ChatTemplate) -> str:
    """The system's turn, with the tools, without the tokens that begin and end it; empty if there is none."""
    message = row["messages"][0]
    begun = {**message, "content": "".join(texts_of(message))}
    first = template.encode(template.render([begun], row.get("tools") or ()))
    text = str(template.tokenizer.decode(list(first)))
    opening = text.removeprefix("<|im_start|>").partition("<|im_end|>")[0]
    return opening if opening.startswith("system\n") else ""
