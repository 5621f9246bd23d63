"""Run with an interpreter that has SGLang or vLLM: reads texts with the engine's own parsers of tool calls.

In: {"engine", "parser", "tools", "tags", "texts"}, a line each. Out: for each text [[name, arguments], ...], the
arguments as JSON; null if the parser raises.
"""

import json
import signal
import sys
from collections.abc import Callable
from typing import Any

Reader = Callable[[str], list[list[str]]]


def of_sglang(parser: str, tools: list[Any], _: list[str]) -> Reader:
    from sglang.srt.entrypoints.openai.protocol import Tool  # pyright: ignore[reportMissingImports]
    from sglang.srt.function_call.function_call_parser import FunctionCallParser  # pyright: ignore[reportMissingImports]

    described = [Tool.model_validate(tool) for tool in tools]
    return lambda text: [
        [call.name, call.parameters] for call in FunctionCallParser(described, parser).parse_non_stream(text)[1]
    ]


def of_vllm(parser: str, tools: list[Any], tags: list[str]) -> Reader:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # pyright: ignore[reportMissingImports]
    from vllm.tool_parsers import ToolParserManager  # pyright: ignore[reportMissingImports]

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    request = ChatCompletionRequest(messages=[], tools=tools, model="any")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)

    def read(text: str) -> list[list[str]]:
        found = ToolParserManager.get_tool_parser(parser)(fast, request.tools)
        calls = found.extract_tool_calls(text, request).tool_calls
        return [[call.function.name, call.function.arguments] for call in calls]

    return read


def too_slow(*_: object) -> None:
    raise TimeoutError


def main() -> None:
    out = sys.stdout
    signal.signal(signal.SIGALRM, too_slow)
    sys.stdout = sys.stderr
    for line in sys.stdin:
        asked = json.loads(line)
        read = {"sglang": of_sglang, "vllm": of_vllm}[asked["engine"]](asked["parser"], asked["tools"], asked["tags"])
        answers = list[Any]()
        for text in asked["texts"]:
            signal.setitimer(signal.ITIMER_REAL, 2)
            try:
                answers.append(read(text))
            except Exception:  # noqa: BLE001 - a parser that raises has read nothing
                answers.append(None)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answers), file=out, flush=True)


main()
