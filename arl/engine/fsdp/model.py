"""Reads Hugging Face model directories for training, refusing models that arl cannot train exactly, and writes them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from arl.api.errors import ModelError, TransportError
from arl.api.train_engine import Head
from arl.data.image_processor import ImageProcessor
from arl.engine.fsdp.policy import (
    LogitsForm,
    TokenModel,
    head_bias,
    head_weight,
    logits_form,
    score_weight,
    token_values,
)
from arl.engine.fsdp.vision import VISION_ATTENTION, image_processor, vision_tower
from arl.engine.fsdp.ways import RowDecoder, find_way
from arl.engine.model_files import (
    as_stored,
    copy_here,
    end_token_ids,
    file_dtypes,
    load_part,
    load_tokenizer,
    local_directory,
    whole_class,
)
from arl.engine.trial import beside_decoder, remembered, transformer_layers
from arl.engine.weights.distributed import spec_of, torch_dtype

_SCORE = "score.weight"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedModel:
    """A model with float32 weights, its tokenizer, and its config with the dtype that files have."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stored_config: PreTrainedConfig
    decoder: RowDecoder
    """Of the model, in the way that its trial chose."""
    head: Head
    form: LogitsForm
    processor: ImageProcessor | None = None
    """Of a model that sees."""

    file_dtypes: Mapping[str, str] = field(default_factory=dict[str, str])
    """The dtype of each tensor in its files, such as BF16; empty if that is unknown."""

    def token_model(self) -> TokenModel:
        """The module to train."""
        return TokenModel(self.decoder, self.head, self.form)


def load_model(name: str | Path, head: Head = "policy") -> LoadedModel:
    """Load a directory or, by name, a model of the hub. Raises ModelError.

    head value: a sequence-classification model of one label; a causal language model gets a new head of zeros. head
    policy: a causal language model, which may see; one whose images arl does not know is trained on texts, which leave
    its tower as it is. The model is in evaluation mode, as dropout would make logprobs
    random.
    """
    if (directory := Path(name)).is_dir() and not (directory / "config.json").is_file():
        raise ModelError(f"{name} has no config.json; a model directory needs it, *.safetensors and a tokenizer")
    config = load_part(AutoConfig, name, "its config")
    tokenizer = load_tokenizer(name)
    options = {"dtype": torch.float32, "output_loading_info": True}
    processor, kind = image_processor(name), whole_class(config)
    if processor is not None or kind is AutoModelForImageTextToText:
        if head == "value":
            raise ModelError(
                f"{name} sees images, and arl has no value head for such models; use an advantage estimator without a "
                "critic, or train a model of texts"
            )
        model, report = load_part(kind, name, "it", **options)
        if processor is None:
            for part in beside_decoder(model).values():
                part.requires_grad_(False)
        elif (tower := vision_tower(model)) is not None:  # its patches see each other both ways, image by image
            tower.config._attn_implementation = VISION_ATTENTION
    elif head == "value":
        with _unreported():
            model, report = load_part(AutoModelForSequenceClassification, name, "it", num_labels=1, **options)
    else:
        model, report = load_part(kind, name, "it", **options)
    is_causal = any(architecture.endswith("ForCausalLM") for architecture in config.architectures or ())
    is_new_head = head == "value" and is_causal
    _check_whole(report, name, head, may_lack={_SCORE} if is_new_head else set())
    model.eval()
    _check_supported(model, name, head)
    try:
        scale, cap, way = json.loads(remembered(name, {"trains": head}, lambda: _tried(model, head)))
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error
    if is_new_head:
        nn.init.zeros_(score_weight(model))  # after the trial, which needs a head that is not zero
        _describe_classifier(config, model, tokenizer, end_token_ids(name))
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        stored_config=config,
        decoder=RowDecoder(model, way),
        head=head,
        form=LogitsForm(scale=scale, cap=cap),
        processor=processor,
        file_dtypes=file_dtypes(name),
    )


def _tried(model: PreTrainedModel, head: Head) -> str:
    """What a trial finds: the scale and cap of the logits, and in which way the model is trained."""
    form = logits_form(model) if head == "policy" else LogitsForm()
    return json.dumps([form.scale, form.cap, find_way(model, partial(_to_logits, model, head, form))])


def _to_logits(model: PreTrainedModel, head: Head, form: LogitsForm, states: torch.Tensor) -> torch.Tensor:
    """[M, H] -> float32 logits of about a thousand tokens of the vocabulary, [M, <= 2048]; [M, 1] of a value head."""
    if head == "value":
        return token_values(states, score_weight(model))[:, None]
    weight, bias = head_weight(model), head_bias(model)
    some = slice(None, None, len(weight) // 1024 + 1)
    logits = form.scale * nn.functional.linear(states.float(), weight[some], None if bias is None else bias[some])
    return logits if form.cap is None else form.cap * torch.tanh(logits / form.cap)


@contextlib.contextmanager
def _unreported() -> Iterator[None]:
    """Silence transformers' reports of missing tensors, which _check_whole reports instead, and of unsharded ones."""
    # The third is the second in other versions of transformers.
    names = ("modeling_utils", "distributed.tensor_parallel", "integrations.tensor_parallel")
    loggers = [logging.getLogger(f"transformers.{name}") for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _check_whole(report: Mapping[str, Any], name: str | Path, head: Head, *, may_lack: set[str]) -> None:
    """Raise ModelError if transformers invented a tensor or left a head out."""
    if missing := sorted(set(report["missing_keys"]) - may_lack):
        raise ModelError(f"the weights of {name} lack {', '.join(missing)}: the download or copy is incomplete")
    if head != "value" and _SCORE in report["unexpected_keys"]:
        raise ModelError(
            f"{name} has a value head ({_SCORE}): it is a critic or a reward model, and cannot be the policy. To "
            "start a critic from it, set algorithm.critic.model"
        )
    own = {"lm_head.weight"} if may_lack else set()
    if head == "value" and (others := sorted(set(report["unexpected_keys"]) - own)):
        raise ModelError(
            f"{name} has {', '.join(others)}, which no sequence-classification model of one label has; if it is a "
            f"value head, save it as {_SCORE}"
        )


def _describe_classifier(
    config: PreTrainedConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, end_tokens: Collection[int]
) -> None:
    """Turn a causal language model's config and tokenizer into those of the value model that was built from it.

    transformers scores a padded text at its last token that is not the pad token, so no text may end in the pad token.
    The pad token becomes the tokenizer's own; else a new one, if the embedding has a spare row; else the token that
    begins every text. Without any of these it stays unset, and transformers takes no padded texts.
    """
    config.architectures = [type(model).__name__]
    config.num_labels = 1
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in end_tokens:
        if len(tokenizer) < config.get_text_config().vocab_size:
            tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        else:
            tokenizer.pad_token = tokenizer.bos_token if tokenizer.bos_token_id not in end_tokens else None
    config.get_text_config().pad_token_id = tokenizer.pad_token_id


def _check_supported(model: PreTrainedModel, name: str | Path, head: Head) -> None:
    if head == "value":
        score = getattr(model, "score", None)
        if not isinstance(score, nn.Linear) or score.bias is not None or score.out_features != 1:
            raise ModelError(f"{name}: {type(model).__name__} needs a head `score` of one label without bias")
    else:
        if model.get_output_embeddings() is None:
            raise ModelError(f"{name}: {type(model).__name__} has no language-model head to be trained")
    transformer_layers(model)
    for parameter, values in model.named_parameters():
        if not values.isfinite().all():
            raise ModelError(
                f"{name} is damaged, or was written by a run that diverged: {parameter}{_file_of(name, parameter)} has "
                "values that are not finite"
            )


def _file_of(model: str | Path, parameter: str) -> str:
    """Where a model directory holds a parameter, if it is one of its tensors: " in FILE"."""
    for file in sorted(Path(local_directory(str(model))).glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            if parameter in opened.keys():  # noqa: SIM118 (it is no mapping)
                return f" in {file}"
    return ""


# Writing


class ModelWriter:
    """Writes model directories, after every step if need be: config and tokenizer are rendered once and then copied."""

    def __init__(self, loaded: LoadedModel) -> None:
        """Make it before the model is sharded."""
        self.model = loaded.model
        self._companions = _companion_files(loaded)
        self._files = loaded.file_dtypes
        tied = getattr(loaded.model, "all_tied_weights_keys", None) or {}
        own = {name: tensor.to("meta") for name, tensor in loaded.model.state_dict().items() if name not in tied}
        names = {id(tensor): name for name, tensor in self.served(own).items()}
        self.own_specs = tuple(
            spec_of(name, tensor, _stored_dtype(loaded, name, tensor, names.get(id(tensor), "")))
            for name, tensor in own.items()
        )
        """The model's parameters and buffers by its own names, in its order, with the files' dtypes; tied ones once."""
        self.is_converted = {id(tensor) for tensor in own.values()} != names.keys()
        """Whether files and servers have other tensors than the model, as with fused experts, beyond other names."""
        empty = {spec.name: torch.empty(spec.shape, dtype=torch_dtype(spec), device="meta") for spec in self.own_specs}
        converted = (spec_of(name, tensor, tensor.dtype) for name, tensor in self.served(empty).items())
        renamed = (replace(spec, name=names.get(id(own[spec.name]), "")) for spec in self.own_specs)
        self.specs = tuple(converted if self.is_converted else renamed)
        """The tensors as files and servers have them, in the model's order if they are the same."""

    def served(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's tensors as files and servers have them."""
        return as_stored(self.model, tensors, self._files)

    def write(self, directory: Path, tensors: Mapping[str, torch.Tensor]) -> int:
        """Write a complete model directory; returns its bytes. tensors: as own_specs, on the CPU."""
        with whole_directory(directory) as aside:
            weights = {name: tensor.contiguous() for name, tensor in self.served(tensors).items()}
            save_file(weights, aside / "model.safetensors", metadata={"format": "pt"})
            for name, content in self._companions.items():
                (aside / name).write_bytes(content)
            return sum(file.stat().st_size for file in aside.iterdir())


def _stored_dtype(loaded: LoadedModel, name: str, tensor: torch.Tensor, file_name: str) -> torch.dtype:
    """The dtype in which files and servers hold a tensor of the model. file_name: its name there.

    Models keep some in float32, such as the biases that choose among experts: bfloat16 would make them equal.
    """
    dtype, files = loaded.stored_config.dtype, loaded.file_dtypes
    if not tensor.is_floating_point():
        return tensor.dtype
    is_exempt = any(part in name for part in loaded.model._keep_in_fp32_modules_strict or ())
    is_exempt |= files.get(file_name) == "F32" and not {"BF16", "F16"}.isdisjoint(files.values())
    return dtype if isinstance(dtype, torch.dtype) and not is_exempt else torch.float32


@contextlib.contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """A directory to write to. At the end it is renamed to `directory`; on an error it is deleted.

    It may not survive a power cut, because forcing it to the disk would delay a step. Checkpoints survive. Raises
    TransportError if it cannot be written.
    """
    directory = Path(os.path.abspath(directory))
    aside: Path | None = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        yield aside
        aside.chmod(0o755)
        replace_directory(aside, directory)
    except BaseException as error:  # also if the caller is interrupted
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise TransportError(f"cannot write {directory} on {socket.gethostname()}: {error}") from error
        raise


def replace_directory(source: Path, target: Path) -> None:
    """Rename `source` to `target`, moving an older `target` out of the way and deleting it afterwards."""
    if not target.exists():
        source.rename(target)
        return
    retired = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    target.rename(retired / target.name)
    source.rename(target)
    shutil.rmtree(retired, ignore_errors=True)


def _companion_files(loaded: LoadedModel) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as scratch:
        loaded.stored_config.save_pretrained(scratch)
        loaded.tokenizer.save_pretrained(scratch)
        if loaded.model.can_generate() and loaded.model.generation_config is not None:
            # save_pretrained refuses the generation configs of some published models.
            loaded.model.generation_config.to_json_file(Path(scratch) / "generation_config.json")
        written = {file.name: file.read_bytes() for file in Path(scratch).iterdir() if file.is_file()}
    if loaded.head == "policy":  # as it was: transformers leaves out fields that it translates, and servers read those
        written["config.json"] = (copy_here(str(loaded.stored_config.name_or_path)) / "config.json").read_bytes()
    if loaded.processor is None:
        return written
    # The files that say how servers make pixels of images, as they are in the model's directory.
    names = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
    files = [Path(local_directory(loaded.processor.model)) / name for name in names]
    return {file.name: file.read_bytes() for file in files if file.is_file()} | written
