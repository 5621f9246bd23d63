"""A dialogue on a tokenizer's template, in which tests give the answers as text."""

from collections.abc import Sequence
from typing import Any

from chat_templates import tokenizer_of
from scripted_answers import response_of
from transformers import PreTrainedTokenizerFast

from arl.workflow.chat_template import ChatTemplate
from arl.workflow.dialogue import Dialogue, Prompt, Turn
from arl.workflow.messages import Message

CHATML, QWEN2_5, QWEN3, LLAMA3, MISTRAL, DEEPSEEK, ALPACA = map(
    tokenizer_of, ("chatml", "qwen2_5", "qwen3", "llama3", "mistral", "deepseek_r1", "alpaca")
)
GLM = tokenizer_of("deepseek_r1")
"""With a template like GLM's, whose model ends its turn with whatever begins the next one."""
GLM.chat_template = (
    "{% for m in messages %}<|{{ m.role | capitalize }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
SPEC = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
OTHER_SPEC = {**SPEC, "function": {**SPEC["function"], "name": "hear"}}
THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = '<tool_call>\n{"name": "look", "arguments": {"word": "é", "n": 1}}\n</tool_call>'
QUESTION = [{"role": "user", "content": "?"}]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def model(text: str) -> Message:
    return {"role": "assistant", "content": text}


def result(text: str, of: str = "call00000") -> Message:
    return {"role": "tool", "content": text, "tool_call_id": of}


def calling(arguments: object = None, *, thought: str | None = None, key: str = "call00000") -> dict[str, Any]:
    given = {"word": "é", "n": 1} if arguments is None else arguments
    call = {"type": "function", "id": key, "function": {"name": "look", "arguments": given}}
    said: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    return said if thought is None else {**said, "reasoning_content": thought}


SURE, RESULT = user("sure?"), result("42")


class Talk:
    """A dialogue on a tokenizer's template, in which answers are given as text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, **options: Any) -> None:
        self.tokenizer = tokenizer
        self.tools = [SPEC] if "tools" in str(tokenizer.chat_template) else []
        self.dialogue = Dialogue(ChatTemplate(tokenizer, options))

    def prompt(self, messages: Sequence[Message], after: Turn | None = None) -> Prompt:
        return self.dialogue.prompt(messages, self.tools, after=after)

    def answer(self, prompt: Prompt, words: str, message: Message | None = None, end: str | None = "") -> Turn:
        """end: what ends the answer, by default as the tokenizer has it; None: a length limit did."""
        said = words + (self.tokenizer.eos_token if end == "" else end or "")
        ids = self.tokenizer.encode(said, add_special_tokens=False)
        return self.dialogue.record(
            prompt, response_of(ids, stop_reason="stop" if end is not None else "length"), message
        )

    def say(self, messages: Sequence[Message], *words: Any, **more: Any) -> Turn:
        return self.answer(self.prompt(messages), *words, **more)

    def text(self, prompt: Prompt | Turn) -> str:
        ids = prompt.input_ids if isinstance(prompt, Prompt) else prompt.token_ids
        return str(self.tokenizer.decode(list(ids)))

    def then(self, turn: Turn, *messages: Message) -> str:
        """What the model sees after the turn, when these are said."""
        return self.text(self.prompt([*turn.messages, *messages], after=turn))

    def parent(self, messages: Sequence[Message]) -> Turn | None:
        """The turn that these messages continue, when they come without a word of where."""
        return self.prompt(messages).parent
