"""The math agent's tiny model: made from a config, then fine-tuned on demonstrations until it is a mediocre agent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import math_tasks
from math_tasks import Demonstration, Entry
from transformers import PreTrainedTokenizerBase

from arl.api.config import OptimizerConfig, TrainConfig
from arl.engine.fsdp import FSDPTrainEngine
from arl.engine.tiny import TinyShape, frequent_phrases, tiny_tokenizer, write_tiny_model
from arl.sft import finetune
from arl.workflow.conversation import Conversation
from arl.workflow.tools import Tool

Prompt = Callable[[str], list[dict[str, str]]]

SHAPE = TinyShape(hidden_size=128, intermediate_size=256, num_layers=4, num_heads=4, num_kv_heads=4)
NUM_CAREFUL, NUM_MIXED, BATCH_SIZE = 16000, 2000, 16
"""First only careful demonstrations, from which it learns to copy; then mixed ones, from which it learns bad habits."""


def warm_start(directory: Path, prompt: Prompt, tool: Tool, excluded: Sequence[Entry], seed: int) -> Path:
    """Write the warm-started model to `directory`, and return it; done before, it is used as it is."""
    if directory.exists():
        return directory
    teacher = math_tasks.demonstrations(NUM_CAREFUL, NUM_MIXED, excluded, seed)
    blank = directory.with_name(directory.name + ".blank")
    shutil.rmtree(blank, ignore_errors=True)
    phrases = _phrases(teacher, prompt, tool)
    write_tiny_model(blank, phrases, SHAPE, seed)
    num_steps = (NUM_CAREFUL + NUM_MIXED) // BATCH_SIZE
    optimizer = OptimizerConfig(
        lr=1e-3, schedule="cosine", warmup_steps=30, total_steps=num_steps, min_lr_ratio=0.1, max_grad_norm=1.0
    )
    engine = FSDPTrainEngine(blank, TrainConfig(optimizer=optimizer, num_threads=2), seed)
    try:
        tokenizer = tiny_tokenizer(phrases)
        examples = [demonstrated(demonstration, tokenizer, prompt, tool) for demonstration in teacher]
        for part in (examples[:NUM_CAREFUL], examples[NUM_CAREFUL:]):
            finetune(engine, part, batch_size=BATCH_SIZE, seed=seed, on_step=_report)
        engine.export(directory)
    finally:
        engine.close()
        shutil.rmtree(blank, ignore_errors=True)
    return directory


def _report(step: int, metrics: Mapping[str, float]) -> None:
    if step % 50 == 0:
        print(f"warm start: {step:4d} steps, loss {metrics['loss']:.3f}")


def demonstrated(
    demonstration: Demonstration, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, tool: Tool
) -> tuple[Sequence[int], Sequence[int]]:
    """The token ids of a demonstration, and which of them are the model's to learn."""
    conversation = Conversation(tokenizer, prompt(demonstration.question), tools=[tool])
    for expression, result in demonstration.calls:
        conversation.demonstrate(_call(expression))
        conversation.add({"role": "tool", "content": result})
    conversation.demonstrate(demonstration.answer)
    return conversation.token_ids, conversation.loss_mask


def _call(expression: str) -> str:
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def _phrases(teacher: Sequence[Demonstration], prompt: Prompt, tool: Tool) -> list[str]:
    """What the tokenizer takes as one token: what comes before every question, and what recurs in them and in calls."""
    opening = tiny_tokenizer().apply_chat_template(prompt("")[:1], tools=[dict(tool.spec)], tokenize=False)
    opening = str(opening).removeprefix("<|im_start|>").removesuffix("<|im_end|>\n")
    return [
        opening,
        *frequent_phrases([text for d in teacher[:1000] for text in (d.question, *map(_call, d.expressions))]),
    ]
