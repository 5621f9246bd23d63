"""Fine-tuning on chats with images: what is learned, from which images, and that a model learns to see by it."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pictures
from workflow.sighted_chats import SMALL, TALL, WIDE, seeing, their_tokens

from arl.api.errors import DatasetError
from arl.api.settings.engines import OptimizerConfig, TrainConfig
from arl.api.train_engine import ModelLimits
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.model_files import load_tokenizer
from arl.engine.tiny import TinyShape, TinyVision
from arl.run.finetuning.examples import Examples, Preference, finetune, to_demonstrations, to_preferences, to_sequence
from arl.run.finetuning.warm_starts import warm_start
from arl.workflow.messages import image_part

SEES, SEES_TOO = seeing("qwen3_vl"), seeing("qwen2_5_vl")
SHAPE = TinyShape(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16)
VISION = TinyVision(hidden_size=32, intermediate_size=64, depth=1)


def asking(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def said(words: str) -> dict[str, Any]:
    return {"role": "assistant", "content": words}


def learned(demonstration: Any) -> str:
    ids, mask, _ = demonstration
    return str(SEES.decode([token for token, is_learned in zip(ids, mask, strict=True) if is_learned]))


def test_a_chat_with_images_is_learned_after_what_the_model_would_see() -> None:
    asked = [asking(image_part(SMALL), "?"), said("a cat"), asking("and ", image_part(TALL), "?")]
    ((ids, mask, images),) = to_demonstrations([{"messages": [*asked, said("a dog")]}], SEES_TOO)
    prompt, shown = their_tokens("qwen2_5_vl", asked)
    assert list(ids[: len(prompt)]) == prompt
    assert [placed.image for placed in images] == shown
    assert learned((ids, mask, images)) == "a cat<|im_end|>a dog<|im_end|>"
    assert not any(mask[i] for placed in images for i in range(placed.start, placed.stop))


def test_images_of_a_column_go_to_their_places() -> None:
    row = {"prompt": "<image> or <image>?", "images": [SMALL, WIDE], "completion": "a cat"}
    ((ids, _, images),) = to_demonstrations([row], SEES)
    prompt, shown = their_tokens("qwen3_vl", [asking(image_part(SMALL), " or ", image_part(WIDE), "?")])
    assert list(ids[: len(prompt)]) == prompt
    assert [placed.image for placed in images] == shown
    (preference,) = to_preferences([{**row, "chosen": "a cat", "rejected": "a dog"}], SEES)
    assert preference.chosen[2] == preference.rejected[2] == images


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [asking({"type": "image", "path": "/no/such.png"}), said("a")]}, "row 0: cannot read the image"),
        ({"messages": [asking("<image><image>"), said("a")], "image": SMALL}, "row 0: .* has 1 images .* 2 places"),
        ({"text": "<image> a cat", "image": SMALL}, "row 0: it has `text`, which shows no images, and `image`"),
    ],
)
def test_a_row_whose_images_do_not_fit_is_named(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DatasetError, match=reason):
        to_demonstrations([row], SEES)


def test_reward_models_refuse_images() -> None:
    pairs = to_preferences([{"prompt": "<image>?", "image": SMALL, "chosen": "a", "rejected": "b"}], SEES)
    with pytest.raises(DatasetError, match="the chosen answer of pair 0 has images, and reward models are trained on"):
        Examples("rm", pairs, ModelLimits(vocab_size=len(SEES)))


def test_images_that_do_not_lie_among_the_tokens_are_an_error_with_the_demonstrations_name() -> None:
    ((ids, mask, images),) = to_demonstrations([{"messages": [asking(image_part(TALL)), said("a")]}], SEES)
    with pytest.raises(DatasetError, match="demonstration 3: image 0 has the placeholders"):
        to_sequence("demonstration 3", (ids[:3], mask[-3:], images), ModelLimits(vocab_size=len(SEES)))


def coloured(colour: str) -> dict[str, Any]:
    return {"messages": [asking(image_part_of(colour)), said(colour)]}


def image_part_of(colour: str) -> dict[str, Any]:
    return {"type": "image", "image": Pictures.new("RGB", (16, 16), colour)}


def test_a_warm_start_on_pictures_learns_to_tell_them_apart(tmp_path: Path) -> None:
    rows = [coloured(colour) for colour in ("red", "lime")] * 400
    model = warm_start(
        tmp_path / "model", lambda: [rows], seed=0, shape=(SHAPE, VISION), batch_size=16, lr=1e-2, num_threads=1
    )
    tokenizer = load_tokenizer(str(model))
    engine = FSDPTrainEngine(model, TrainConfig(optimizer=OptimizerConfig(lr=1e-3)))
    try:
        right = [to_demonstrations([coloured(colour)], tokenizer)[0] for colour in ("red", "lime")]
        swapped = [
            (ids, mask, images) for (ids, mask, _), images in zip(right, [r[2] for r in right[::-1]], strict=True)
        ]
        likely, unlikely = (
            [float(row.sum()) for row in engine.forward([to_sequence("it", one, engine.limits) for one in some])]
            for some in (right, swapped)
        )
        assert all(a > b + 1 for a, b in zip(likely, unlikely, strict=True))
        preference = Preference(chosen=right[0], rejected=swapped[0])
        assert preference.chosen[2] != preference.rejected[2]
        assert finetune(engine, right)["loss"] < 1
    finally:
        engine.close()
