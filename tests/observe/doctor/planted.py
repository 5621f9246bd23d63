"""The faults that tests plant, the cause that the doctor must name for each, and an examination of one server."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from observe.doctor.faulty_server import FaultyServer

from arl.api.settings.engines import SGLangEngineConfig
from arl.api.settings.run import Config
from arl.api.types import SamplingParams
from arl.engine.model_files import load_tokenizer
from arl.engine.tiny import TinyShape
from arl.observe.doctor.causes import Checked, Diagnosis
from arl.rewards.adapt import InlineReward
from arl.run.doctor import opened_examination
from arl.workflow.agent import SingleTurnWorkflow

SHAPE = TinyShape(
    hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, context_length=640,
    initializer_range=0.2,
)  # fmt: skip

NAMED = {
    "tokenizer_with_one_token_more": "tokenizer",
    "template_with_a_default_system_prompt": "chat template",
    "context_of_48_tokens": "context length",
    "prompts_cut_to_128_tokens": "context length",
    "weights_of_another_model": "other weights",
    "load_without_effect": "load without effect",
    "one_layer_not_updated": "load in part",
    "packed_linear_layers": "load in part",
    "tied_head_not_updated": "load in part",
    "load_rounds_to_bfloat16": "precision",
    "load_fails": "load failed",
    "label_of_the_version_before": "version label",
    "labels_change_two_tokens_early": "version label inside a response",
    "logprobs_of_temperature_1": "logprobs of another temperature",
    "sampled_at_temperature_1": "sampled otherwise",
    "top_k_40_that_nobody_asked_for": "sampled otherwise",
    "top_p_with_renormalised_logprobs": "undeclared truncation",
    "kept_ids_with_logprobs_of_all_ids": "truncated sampling",
    "bfloat16_in_the_place_of_float32": "precision",
    "routes_of_the_token_before": "routing",
    "base_model_instead_of_adapter": "base model instead of adapter",
    "first_adapter_for_every_name": "another adapter",
    "unknown_adapters_answered_by_the_base_model": "unknown adapter accepted",
}
SETTINGS_OF_SGLANG = {
    "--chat-template of another template": "chat template",
    "--context-length 60": "context length",
    "--allow-auto-truncate": "context length",
    "--dtype bfloat16": "precision",
    "SGLANG_RETURN_ORIGINAL_LOGPROB=1": "logprobs of another temperature",
    "a tokenizer with one token more": "tokenizer",
    "a model directory with another layer": "other weights",
}
"""Faults that settings and files of stock SGLang make."""
OF_ADAPTERS = [name for name in NAMED if "adapter" in name]
OF_MIXTURES = ["routes_of_the_token_before"]
OPTIONS = {"bfloat16_in_the_place_of_float32": ("--dtype", "bfloat16")}
"""Faults that are servers of their own, by their options."""


def post(address: str, path: str, body: dict[str, str]) -> None:
    request = urllib.request.Request(address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


@contextmanager
def planted(server: FaultyServer, name: str, model: Path) -> Iterator[None]:
    post(server.address, "/plant", {"name": name})
    try:
        yield
    finally:
        post(server.address, "/plant", {"name": ""})
        post(server.address, "/update_weights_from_disk", {"model_path": str(model), "weight_version": "default"})


def config_of(model: Path, server: FaultyServer, run_dir: Path, **more: Any) -> Config:
    return Config(
        model=str(model),
        run_dir=run_dir,
        engine=SGLangEngineConfig(addresses=(server.address,), update_timeout_s=20, request_timeout_s=60),
        **more,
    )


class FaultFoundError(Exception):
    """Ends an examination at its first fault; there is no need for what comes after."""


async def first_fault(config: Config, sampling: SamplingParams | None = None) -> Checked | None:
    def on_check(one: Checked) -> None:
        if one.outcome == "fault":
            raise FaultFoundError(one)

    try:
        await diagnosis_of(config, sampling, on_check)
    except FaultFoundError as found:
        return found.args[0]
    return None


USUAL = SamplingParams(temperature=0.8, max_new_tokens=64)
TRUNCATED = SamplingParams(temperature=0.8, max_new_tokens=64, top_p=0.9)
OF_TRUNCATION = ["kept_ids_with_logprobs_of_all_ids"]
"""Faults that show only with TRUNCATED."""


async def diagnosis_of(config: Config, sampling: SamplingParams | None = None, on_check: Any = print) -> Diagnosis:
    sampling = sampling or USUAL
    workflow = SingleTurnWorkflow(
        load_tokenizer(config.model), InlineReward(lambda answer, data: 0.0), sampling=sampling
    )
    async with opened_examination(config, workflow, publish=True, on_check=on_check) as examination:
        return await examination.run()
