"""Images in requests to servers that speak SGLang's protocol, and how an answer shows that the prompt was understood.

    ours     <|vision_start|> <|image_pad|> <|image_pad|> <|image_pad|> <|vision_end|>     a placeholder for each vector
    SGLang's <|vision_start|> <|image_pad|> <|vision_end|>, image_data                     one, which it expands

The embedded server takes ours as they are. See docs/sglang_protocol.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from arl.api.errors import RefusedRequestError
from arl.api.images import PlacedImage
from arl.engine.client.server_client import GenerateCall


def num_bytes(images: Sequence[PlacedImage]) -> int:
    return sum(len(placed.image.data) for placed in images)


def image_fields(call: GenerateCall, *, is_embedded: bool) -> dict[str, Any]:
    """The fields of /generate for a call with images. Raises RefusedRequestError."""
    urls = [placed.image.data_url for placed in call.images]
    if is_embedded:
        return {"image_data": urls, "image_places": [(placed.start, placed.stop) for placed in call.images]}
    ids = contracted(call.input_ids, call.images)
    placeholder = call.input_ids[call.images[0].start]
    if (num_others := int((ids == placeholder).sum()) - len(call.images)) > 0:
        raise RefusedRequestError(
            f"the prompt has the placeholder of images, {placeholder}, {num_others} times where no image lies, as a "
            "model can sample it; SGLang would take each for an image"
        )
    return {"input_ids": ids, "image_data": urls, "return_prompt_token_ids": True}


def contracted(input_ids: np.ndarray, images: Sequence[PlacedImage]) -> np.ndarray:
    """The tokens with one placeholder for each image."""
    is_left_out = np.zeros(len(input_ids), bool)
    for placed in images:
        is_left_out[placed.start + 1 : placed.stop] = True
    return input_ids[~is_left_out]


def told_of_prompt(body: Mapping[str, Any]) -> Any:
    """The tokens of the prompt as SGLang expanded it, or their number; None if an answer names neither."""
    if (ids := body.get("prompt_token_ids")) is not None:
        return ids
    return (body.get("meta_info") or {}).get("prompt_tokens")


def check_prompt(address: str, told: Any, call: GenerateCall) -> None:
    """Raise RefusedRequestError unless a server computed the tokens of this call, as far as it says which it computed.

    told: the prompt's tokens, or their number.
    """
    if told is None:
        return
    if isinstance(told, int):
        is_same, count = told == len(call.input_ids), told
    else:
        is_same, count = np.array_equal(told, call.input_ids), len(told)
    if is_same:
        return
    what = f"{count} tokens of a prompt with {len(call.input_ids)}" if count != len(call.input_ids) else "other tokens"
    raise RefusedRequestError(
        f"{address} computed {what} and {len(call.images)} images: its image processor, or its settings (such as "
        "min_pixels and max_pixels), are not those of the model's directory here"
    )
