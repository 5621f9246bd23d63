"""The fixed texts that servers and trainer are compared on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def short_prompts(encode: Any, limit: int) -> list[list[int]]:
    """The texts as token ids. limit: the most tokens of each."""
    return [encode(text)[: min(SHORT, limit)] for text in TEXTS]


def long_prompt(encode: Any, length: int) -> list[int]:
    """The texts over and over, numbered so that no two places look alike."""
    ids: list[int] = []
    number = 0
    while len(ids) < length:
        ids += encode(f"{number}. {TEXTS[number % len(TEXTS)]}\n")
        number += 1
    return ids[:length]
