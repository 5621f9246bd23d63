"""Tokenizers of models that see, with the chat templates of their families, and transformers' processors for them."""

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from sighted import SEEING_FAMILIES, noise
from transformers import AutoImageProcessor, AutoTokenizer

from arl.api.images import Image
from arl.engine.tiny import TinyShape, VisionFamily, write_tiny_vision_model
from arl.workflow.messages import images_in, normalised

FAMILIES = SEEING_FAMILIES
PROCESSORS = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}
SMALL, WIDE, TALL = noise(16, 16, 0), noise(48, 16, 1), noise(20, 70, 2)
_SHAPE = TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
_kept = tempfile.TemporaryDirectory()


@cache
def directory_of(family: VisionFamily) -> Path:
    directory = write_tiny_vision_model(Path(_kept.name) / family, family=family, shape=_SHAPE)
    template = Path(__file__).parent / "templates" / f"{family}.jinja"
    (directory / "chat_template.jinja").write_text(template.read_text())
    return directory


@cache
def seeing(family: VisionFamily) -> Any:
    """The tokenizer, as users load it."""
    return AutoTokenizer.from_pretrained(directory_of(family))


@cache
def their_processor(family: VisionFamily) -> Any:
    """transformers' own, without the half for videos, which needs torchvision."""

    class Processor(getattr(transformers, PROCESSORS[family])):
        def check_argument_for_proper_class(self, argument_name: str, argument: object) -> type:
            return object

    images = AutoImageProcessor.from_pretrained(directory_of(family), backend="pil")
    tokenizer = seeing(family)
    return Processor(images, tokenizer, None, chat_template=tokenizer.chat_template)


def as_theirs(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """`normalised` messages, as transformers takes them."""
    made = [normalised(message) for message in messages]
    for message in made:
        if isinstance(message["content"], list):
            message["content"] = [
                {"type": "image", "image": part["image"].picture()} if part["type"] == "image" else part
                for part in message["content"]
            ]
    return made


def their_tokens(family: VisionFamily, messages: Sequence[Any], **options: Any) -> tuple[list[int], list[Image]]:
    """The tokens of a prompt, and the images for its placeholders."""
    made = their_processor(family).apply_chat_template(
        as_theirs(messages), tokenize=True, return_dict=True, add_generation_prompt=True, **options
    )
    return list(made["input_ids"][0]), images_in(map(normalised, messages))
