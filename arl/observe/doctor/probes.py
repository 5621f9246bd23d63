"""The fixed texts on which servers and trainer are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from arl.api.errors import ModelError

TEXTS = (
    "The quick brown fox jumps over the lazy dog.\n",
    "def fib(n):\n\treturn n if n < 2 else fib(n - 1) + fib(n - 2)  # O(2^n)",
    "Q: What is 17 * 23 - 4?\nA: Let us see. 17 * 23 is 391, so it is 387.",
    "Ein Gespräch über Bäume: « C'est déjà vu », 你好世界。 🙂 naïve café",
)
"""Prose, code, numbers, other scripts."""

CHATS: tuple[Sequence[dict[str, Any]], ...] = (
    ({"role": "user", "content": "What is 2 + 2?"},),
    ({"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Capital of France?"}),
    (
        {"role": "user", "content": "Say hi."},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "And now in French, please."},
    ),
)
"""With and without a system prompt, and with an earlier answer."""

SHORT = 48
"""Tokens of a short prompt: less than a server's chunk, its page and its prefix block."""
_LEAST = 4
"""The fewest tokens of a prompt: servers refuse an empty one, and one token has no logprob."""
LEAST_CONTEXT = 48
"""The shortest context with room for the prompts of every check and their answers."""

Encode = Callable[[str], list[int]]
"""A text in token ids, without special tokens around it."""


def short_prompts(encode: Encode, limit: int) -> list[list[int]]:
    """The texts as token ids. limit: the most tokens of each. Raises ModelError if one has hardly any."""
    prompts = [encode(text)[: max(_LEAST, min(SHORT, limit))] for text in TEXTS]
    for text, ids in zip(TEXTS, prompts, strict=True):
        if len(ids) < _LEAST:
            raise ModelError(
                f"the model's tokenizer makes {len(ids)} tokens of {text!r}; the doctor's prompts need {_LEAST}"
            )
    return prompts


def long_prompt(encode: Encode, length: int) -> list[int]:
    """The texts, repeated and numbered so that no two places look alike."""
    ids: list[int] = []
    number = 0
    while len(ids) < max(length, _LEAST):
        ids += encode(f"{number}. {TEXTS[number % len(TEXTS)]}\n")
        number += 1
    return ids[: max(length, _LEAST)]
