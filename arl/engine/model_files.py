"""What a model's files say of it: its tokenizer, its config, its limits, a digest. Loads no torch of its own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arl.api.engine import MODEL_SIZES, ServedModel
from arl.api.errors import ConfigError, ModelError
from arl.api.train_engine import ModelLimits

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_WEIGHTS = "model.safetensors"
_SAMPLES = 64
"""How many pages identify a weights file. Training changes most numbers of each tensor, so a few are enough."""


def check_same_tokens(setting: str, model: str, other: str, what: str) -> None:
    """Raise ConfigError unless `model` has the tokens of `other`; it may know more. setting, what: for the message."""
    vocabulary, known = (load_tokenizer(name).get_vocab() for name in (other, model))
    if not vocabulary.items() <= known.items():
        token = next(token for token, i in vocabulary.items() if known.get(token) != i)
        raise ConfigError(
            f"{setting} {model} has other tokens than {other}: {token!r} is {known.get(token, 'none')} there and "
            f"{vocabulary[token]} here; use a {what} of the same family"
        )


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or of a model on the hub. Raises ModelError."""
    from transformers import AutoTokenizer

    tokenizer = load_part(AutoTokenizer, name, "its tokenizer")
    # Without its files, transformers returns an empty tokenizer of the model's kind.
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):
        raise ModelError(f"{name} has no tokenizer: save one there with tokenizer.save_pretrained(directory)")
    return tokenizer


def end_token_ids(name: str | Path) -> frozenset[int]:
    """The tokens at which inference servers end a response: those of the model's config and of its tokenizer."""
    from transformers import AutoConfig, GenerationConfig

    configs: list[Any] = [load_part(AutoConfig, name, "its config")]
    with contextlib.suppress(OSError):  # not every model has one
        configs.append(GenerationConfig.from_pretrained(str(name)))
    named = [getattr(config, "eos_token_id", None) for config in configs] + [load_tokenizer(name).eos_token_id]
    return frozenset(i for ids in named if ids is not None for i in (ids if isinstance(ids, list) else [ids]))


def served_model(name: str | Path, *, replay_routing: bool = False) -> ServedModel:
    """What servers of this model should have. replay_routing: they return routes, if it is a mixture of experts.

    Raises ModelError.
    """
    from transformers import AutoConfig

    from arl.engine.routers import routing_of

    config = load_part(AutoConfig, name, "its config")
    text = config.get_text_config()
    return ServedModel(
        name=str(name),
        vocab_size=model_limits(config).vocab_size,
        end_token_ids=end_token_ids(name),
        model_type=config.model_type,
        shape={size: getattr(text, size, None) for size in MODEL_SIZES},
        routing=routing_of(config, str(name)) if replay_routing else None,
    )


_IMAGE_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def model_limits(config: PreTrainedConfig) -> ModelLimits:
    """Scaled rotary positions reach as far as they are scaled."""
    text: Any = config.get_text_config()
    context_length = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if context_length is not None:
        scaled = (rope.get("factor") or 0) * (rope.get("original_max_position_embeddings") or 0)
        context_length = max(context_length, int(scaled))
    image_ids = frozenset(number for name in _IMAGE_IDS if isinstance(number := getattr(config, name, None), int))
    return ModelLimits(vocab_size=text.vocab_size, context_length=context_length, image_ids=image_ids)


def local_directory(name: str) -> str:
    """`name` if it is a directory; else the local copy of the hub's model of that name, downloaded if necessary."""
    if Path(name).is_dir():
        return name
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"])
    except Exception as error:  # the hub, its HTTP client and the disk each raise their own
        raise ModelError(f"{name} is not a directory here, and cannot be downloaded: {_first_line(error)}") from error


def copy_here(name: str | Path) -> Path:
    """`name` if it is a directory; else the local copy of the hub's model. Raises OSError if there is none."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(name), local_files_only=True))


def file_dtypes(name: str | Path) -> dict[str, str]:
    """The dtype, such as BF16, of each tensor in a model's safetensors. Empty if it is not here or has none."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        for file in sorted(copy_here(name).glob("model*.safetensors")):
            with file.open("rb") as opened:
                header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
            found |= {key: entry["dtype"] for key, entry in header.items() if key != "__metadata__"}
    return found


def as_stored(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], files: Collection[str]) -> dict[str, Any]:
    """A model's tensors as files and servers have them: transformers fuses some at loading, such as experts.

    files: the names in the model's files. A layer whose own name stands there keeps it, though transformers would
    rename it together with others.
    """
    from transformers.core_model_loading import revert_weight_conversion

    names = {id(tensor): name for name, tensor in tensors.items()}
    return {
        names[id(tensor)] if name not in files and names.get(id(tensor)) in files else name: tensor
        for name, tensor in revert_weight_conversion(model, dict(tensors)).items()
    }


def model_digest(name: str) -> str | None:
    """A digest of a model, the same wherever it lies: of config, vocabulary and samples of the weights files.

    None if it is not here, or has no safetensors.
    """
    try:
        directory = copy_here(name)
        config = json.loads((directory / "config.json").read_bytes())
        known = {key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")}
        digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
        vocabularies = (directory / file for file in ("tokenizer.json", "tokenizer.model", "vocab.json"))
        digest.update(next((file.read_bytes() for file in vocabularies if file.exists()), b""))
        index = directory / f"{_WEIGHTS}.index.json"
        shards = json.loads(index.read_bytes())["weight_map"].values() if index.exists() else [_WEIGHTS]
        for shard in sorted(set(shards)):
            with (directory / shard).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                digest.update(f"{shard} {size} ".encode())
                for sample in range(_SAMPLES):
                    file.seek(size * sample // _SAMPLES)
                    digest.update(file.read(4096))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return digest.hexdigest()


def whole_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that loads all of a language model: with its tower if it sees, as its files have it."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as SEEING

    sees = SEEING.get(config.model_type) in (config.architectures or SEEING.values())
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def load_part(auto_class: Any, name: str | Path, what: str, **options: object) -> Any:
    """Load `what` of a model with one of transformers' Auto classes. Raises ModelError."""
    try:
        return auto_class.from_pretrained(str(name), **options)
    except Exception as error:  # a broken model directory makes transformers raise almost anything
        raise ModelError(
            f"cannot load {what} from {name}: {_first_line(error)}. Name a directory that save_pretrained "
            "wrote (config.json, *.safetensors and the tokenizer's files), or a model on the hub"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


def copy_tokenizer(model: str | Path, directory: Path) -> None:
    """Copy the model's tokenizer.json, if it has one, so that logs can be read where the model is not."""
    source: Any = Path(model) / "tokenizer.json"
    # TypeError: the hub's model has none, or is not here. ValueError: no model of the hub can have this name.
    with contextlib.suppress(OSError, TypeError, ValueError):
        if not Path(model).is_dir():
            from huggingface_hub import try_to_load_from_cache

            source = try_to_load_from_cache(str(model), "tokenizer.json")
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, directory / "tokenizer.json")
