"""Oracle: the parsers of tool calls that SGLang and vLLM ship read the same calls from the same texts."""

import json
import random
import re
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest
from conformance.servers import python_of

from arl.workflow.call_formats import FORMATS, GEMMA, HARMONY, LLAMA, LLAMA_PYTHONIC, MUSE, KnownFormat, ToolCall

PARSERS = {
    "sglang": {
        "QWEN_XML": "qwen3_coder", "GLM": "glm45", "HERMES": "hermes", "LLAMA": "llama3", "MISTRAL": "mistral",
        "MISTRAL_ARGS": "mistral", "DEEPSEEK_V3": "deepseekv3", "DEEPSEEK_V31": "deepseekv31", "HARMONY": "gpt-oss",
        "KIMI": "kimi_k2", "MINIMAX": "minimax-m2", "LFM": "lfm2", "GEMMA": "gemma4", "MUSE": "muse",
        "LLAMA_PYTHONIC": "pythonic",
    },
    "vllm": {
        "QWEN_XML": "qwen3_coder", "GLM": "glm45", "HERMES": "hermes", "LLAMA": "llama3_json",
        "MISTRAL_ARGS": "mistral", "DEEPSEEK_V3": "deepseek_v3", "DEEPSEEK_V31": "deepseek_v31", "KIMI": "kimi_k2",
        "MINIMAX": "minimax_m2", "LFM": "lfm2", "GEMMA": "gemma4", "LLAMA_PYTHONIC": "pythonic",
    },
}  # fmt: skip
"""The parser that an engine has for a format. vLLM has none of its own for HARMONY, COHERE and MUSE; its parser for PHI
reads `functools[...]` alone, that for MISTRAL needs Mistral's own tokenizer."""
MISREAD = {("sglang", LLAMA_PYTHONIC), ("vllm", GEMMA)}
"""SGLang's pattern for Python calls loses calls whose strings have brackets, and takes minutes for some; vLLM makes
strings of the numbers in a list of which the schema says nothing."""
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array", "items": {"type": "integer"}},
        "map": {"type": "object"},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": SCHEMA}} for name in ("f", "g_h")
]
TAGS = re.compile(r"<[^<>\s=]+>|\[[A-Z_]+\]")


def random_calls(rng: random.Random, most: int) -> list[ToolCall]:
    def arguments() -> dict[str, Any]:
        values: dict[str, Any] = {
            "text": "".join(rng.choice("ab0 .,:;'\"\\\n{}[]()=é") for _ in range(rng.randint(1, 9))).strip(),
            "count": rng.randint(-9, 99),
            "ratio": rng.uniform(-9, 9),
            "flag": rng.random() < 0.5,
            "items": [rng.randint(0, 9) for _ in range(rng.randint(0, 3))],
            "map": {"a": rng.choice([1, "x", [2]])},
        }
        return {key: value for key, value in values.items() if rng.random() < 0.5}

    return [ToolCall(name=rng.choice(["f", "g_h"]), arguments=arguments()) for _ in range(rng.randint(1, most))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "engine", [pytest.param("sglang", marks=pytest.mark.sglang), pytest.param("vllm", marks=pytest.mark.vllm)]
)
def test_engines_read_the_same_calls(engine: Literal["sglang", "vllm"]) -> None:
    rng = random.Random(41)
    one_call = [ToolCall(name="f", arguments={"text": "x"})]
    tags = sorted({"<|python_tag|>", *(tag for one in FORMATS for tag in TAGS.findall(one.write(one_call)))})
    asked, written = list[str](), list[tuple[KnownFormat, list[tuple[str, list[ToolCall], bool]]]]()
    for form in (one for one in FORMATS if repr(one) in PARSERS[engine]):
        texts = list[tuple[str, list[ToolCall], bool]]()
        said = "" if form in (LLAMA, LLAMA_PYTHONIC, MUSE) else "Let me see. "
        before = "<|start|>assistant" if form is HARMONY else said
        for _ in range(20):
            calls = random_calls(rng, most=1 if form is HARMONY else 3)
            text = before + form.write(calls)
            texts += [(text, calls, True), (text[: rng.randrange(len(text))], calls, False)]
        written.append((form, texts))
        asked.append(json.dumps({
            "engine": engine, "parser": PARSERS[engine][repr(form)], "tools": TOOLS, "tags": tags,
            "texts": [text for text, *_ in texts],
        }))  # fmt: skip
    script = Path(__file__).with_name("engine_parsers.py")
    done = subprocess.run(
        [python_of(engine), str(script)], input="\n".join(asked), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for (form, texts), line in zip(written, done.stdout.splitlines(), strict=True):
        for (text, calls, is_whole), theirs in zip(texts, json.loads(line), strict=True):
            ours = [[one.name, one.arguments] for one in form.parse(text, TOOLS).calls if isinstance(one, ToolCall)]
            expected = [[call.name, call.arguments] for call in calls]
            assert ours == (expected if is_whole else expected[: len(ours)]), (form, text)
            if is_whole and (engine, form) not in MISREAD:  # of half a text, engines also read calls that are not there
                assert [[name, json.loads(arguments)] for name, arguments in theirs or ()] == ours, (form, text)
