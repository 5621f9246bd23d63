"""The fixed tokens on which servers and trainer are compared."""

from typing import Any

from arl.api.fakes import ScriptedTrainEngine
from arl.api.train_engine import ModelLimits
from arl.engine.model_files import model_limits
from arl.engine.tiny import tiny_vision_tokenizer, write_tiny_vision_model
from arl.training.learner_process import probe_of


def test_a_probe_has_no_placeholder_of_an_image_that_nobody_gave() -> None:
    plain, seeing = (
        probe_of(ScriptedTrainEngine(limits=ModelLimits(vocab_size=8, image_ids=image_ids)), is_exact=True)
        for image_ids in (frozenset(), frozenset({0, 3, 5}))
    )
    assert {0, 3, 5} <= {*plain.token_ids}, "else nothing is seen here"
    assert seeing.token_ids == tuple(1 if number in (0, 3, 5) else number for number in plain.token_ids)


def test_a_models_config_says_which_ids_are_of_images(tmp_path: Any) -> None:
    from transformers import AutoConfig

    write_tiny_vision_model(tmp_path)
    vocabulary = tiny_vision_tokenizer().get_vocab()
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    assert model_limits(AutoConfig.from_pretrained(tmp_path)).image_ids == {vocabulary[name] for name in names}
