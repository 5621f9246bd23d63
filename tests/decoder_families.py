"""One tiny random model of each decoder family of transformers, and its slow reference logits.

Of the types that AutoModelForCausalLM knows, a family is one whose model, built from the type's own config, predicts
text from token ids alone and is causal by default. Left out are encoders and what else is bidirectional by default
(bert, xlm, xlnet, reformer, cpmant), encoder-decoders and their halves (bart, whisper, trocr), wrappers whose text
part is a type of its own or a copy of one (gemma3, llama4, emu3, fuyu, mllama, phi4_multimodal, git), decoders of
sounds (moshi, musicgen), and draft models that read another model's states (gemma4_assistant). Types that share a
class count once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from arl.engine.tiny import tiny_tokenizer, write_model

FAMILIES: tuple[str, ...] = tuple(
    """afmoe apertus arcee aria_text axk1 axk2 bamba biogpt bitnet bloom blt codegen cohere cohere2 cohere2_moe
    cohere_compass_text ctrl cwm dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1
    ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo gemma gemma2 gemma3_text
    gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neo
    gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid
    granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling_text jais2 jamba
    jetmoe kimi_linear laguna lfm2 lfm2_moe llama llama4_text longcat_flash mamba mamba2 mellum mimo_v2_flash minicpm3
    minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder mpt nanochat nemotron
    nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3
    qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp_text recurrent_gemma rwkv seed_oss smollm3 solar_open
    stablelm starcoder2 vaultgemma xglm xlstm youtu zamba zamba2 zaya""".split()  # noqa: SIM905
)

SEEING = ("gemma3", "gemma4", "glm4v", "internvl", "kimi_k25", "llama4", "mistral3", "qwen3_5")
"""Wrappers of a text family and a tower, of which texts are tried."""

VOCABULARY, CONTEXT, LAYERS = 288, 256, 4

# Every name that a config has for a size, or for a number that must not be neutral. What is None by default stays None.
_NUMBERS: dict[str, float] = {
    name: number
    for names, number in {
        "vocab_size vocab_size_per_layer_input": VOCABULARY,
        "max_position_embeddings n_positions n_ctx max_seq_len context_length": CONTEXT,
        "num_hidden_layers n_layer n_layers num_layers num_blocks": LAYERS,
        "hidden_size n_embd d_model embedding_dim word_embed_proj_dim lru_width mamba_d_ssm ple_embed_dim": 64,
        "attention_hidden_size": 128,
        "intermediate_size n_inner ffn_dim ffn_hidden_size dff dim_ff intermediate_size_mlp "
        "dense_intermediate_size": 96,
        "moe_intermediate_size expert_ffn_hidden_size shared_intermediate_size shared_expert_intermediate_size "
        "moe_shared_expert_intermediate_size prefix_dense_intermediate_size": 48,
        "num_attention_heads n_head n_heads num_heads attention_heads swa_num_attention_heads linear_num_value_heads "
        "linear_num_heads mamba_n_heads mamba_num_heads n_mamba_heads num_experts n_routed_experts "
        "moe_num_experts num_local_experts hc_lowrank laurel_rank gated_norm_rank d_rel adapter_rank": 4,
        "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads num_experts_per_tok moe_topk "
        "moe_k moe_top_k n_groups n_group index_topk_blocks num_mem_blocks zero_expert_num": 2,
        "qk_head_dim": 24,
        "index_n_heads": 32,  # with few, several tokens have the score 0, and which are chosen is left open
        "head_dim dim_head kv_channels swa_head_dim v_head_dim qk_nope_head_dim linear_key_head_dim state_size "
        "linear_value_head_dim linear_head_dim index_head_dim kv_lora_rank mamba_d_state ssm_state_size mamba_head_dim "
        "hidden_size_per_layer_input q_lora_rank o_lora_rank router_hidden_size floor_scale mamba_d_head "
        "query_pre_attn_scalar local_attention": 16,
        "qk_rope_head_dim sliding_window sliding_window_size attention_chunk_size attention_window_size window_size "
        "index_topk mamba_chunk_size chunk_size block_size index_block_size time_step_rank mamba_dt_rank rotary_dim "
        "keep_window_size rel_extent": 8,
        "topk_group n_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers": 1,
        "time_step_max": 1.0,
        "time_step_floor": 0.1,
        "time_step_min": 1e-5,
        "final_logit_softcapping attn_logit_softcapping logits_soft_cap output_logit_soft_cap swiglu_limit": 3.0,
        "embedding_multiplier logits_scaling routed_scaling_factor route_scale logits_mup_width_multiplier "
        "lm_head_multiplier key_multiplier moe_routed_scaling_factor linear_attn_alpha_factor": 1.5,
        "residual_multiplier logit_scale mlp_alpha_factor ssm_in_multiplier ssm_out_multiplier attention_in_multiplier "
        "attention_out_multiplier": 0.7,
        "attention_multiplier": 0.3,
    }.items()
    for name in names.split()
}

_OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 500}
    | {
        f"{part}_config": {
            "vocab_size": VOCABULARY,
            "hidden_size": size,
            "hidden_size_global": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "intermediate_size": 96,
            "max_position_embeddings": CONTEXT,
        }
        for part, size in {"patcher": 32, "encoder": 32, "decoder": 32, "global": 64}.items()
    },
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]},
            "full_attention": None,
        },
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 2},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 48, "moe_top_k": 2},
    },
    "deepseek_v2": {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "topk_method": "group_limited_greedy"},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "dots1": {
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
    "falcon_h1": {"mamba_n_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]},
    "gemma4_text": {
        "global_head_dim": 32,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
    },
    "gemma4_unified_text": {"global_head_dim": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "glm4v_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "granite_swa": {"layer_rope_theta": [0, 10_000.0, 0, 1_000.0]},
    "granitemoe_swa": {"layer_rope_theta": [0, 10_000.0, 0, 1_000.0]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "mamba_n_heads": 8},
    "hrm_text": {"num_hidden_layers": 1},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2},
    "laguna": {"layer_types": ["full_attention", "sliding_attention"] * 2, "num_attention_heads_per_layer": [4, 8] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"layer_types": None, "interleave_moe_layer_step": 2},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": 2},
    "nemotron": {"num_key_value_heads": 2},
    "phi3": {"sliding_window": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1],
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 500,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
    },
    "rwkv": {"attention_hidden_size": 64},
    "starcoder2": {"sliding_window": 8},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "youtu": {"pad_token_id": None},  # whose embedding is zeroed at loading
    "zamba": {"attention_head_dim": 32, "mamba_expand": 2},
    "zamba2": {"num_key_value_heads": 4, "use_shared_attention_adapter": True, "use_mem_rope": True},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 8},
}


_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "depth": 2, "num_attention_heads": 2,
    "num_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "image_size": 28, "patch_size": 14, "out_hidden_size": 64,
    "vision_output_dim": 64, "projector_input_dim": 32, "projector_output_dim": 64,
}  # fmt: skip


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The defaults of the family's config with every size shrunk, and layers of each kind that these defaults have."""
    config_class = CONFIG_MAPPING[model_type]
    if model_type in SEEING:
        return _seeing(config_class)
    default, changes = config_class(), dict[str, Any]()
    default.allow_global_per_layer_attribute_access = True
    names = {field.name for field in fields(config_class)}
    for name in names:
        value = getattr(default, name, None)
        if name in _NUMBERS and (isinstance(value, int | float | list) or name == "head_dim"):
            changes[name] = _NUMBERS[name]
        elif name.endswith(("layer_types", "layers_block_type")) and value:
            kinds = list(dict.fromkeys(value))
            changes[name] = (kinds * LAYERS)[:LAYERS]
    if "qk_rope_head_dim" in names:  # multi-head latent attention
        changes |= {"head_dim": changes["qk_rope_head_dim"], "num_key_value_heads": changes["num_attention_heads"]}
    tokens = {"pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258}  # as in tiny_tokenizer
    changes |= {name: token for name, token in tokens.items() if name in names}
    return config_class(**changes | _OVERRIDES.get(model_type, {}))


def _seeing(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Around the tiny config of its text part."""
    kind = config_class.sub_configs["vision_config"]
    vision = type(config_class().vision_config) if kind is AutoConfig else kind
    sizes = {name: size for name, size in _VISION.items() if hasattr(vision(), name)}
    text = tiny_config(config_class().get_text_config().model_type)
    return config_class(text_config=text.to_dict(), vision_config=vision(**sizes).to_dict())


def tiny_family(model_type: str, seed: int = 0) -> PreTrainedModel:
    """float32, in evaluation mode, the same for a seed. No parameter or saved bias has a neutral value."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto = AutoModelForImageTextToText if model_type in SEEING else AutoModelForCausalLM
        model = auto.from_config(tiny_config(model_type), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    seen = set[int]()
    parameters = dict(model.named_parameters())
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or tensor.data_ptr() in seen:
            continue
        if name not in parameters and tensor.unique().numel() > 1:  # computed from the config
            continue
        seen.add(tensor.data_ptr())
        noise = torch.randn(tensor.shape, generator=generator)
        spread = tensor.std(correction=0)
        if tensor.dim() > 1 and spread > 0 and tensor.mean().abs() < 0.5 * spread:  # a matrix, not decays nor scales
            tensor.copy_(0.2 * noise)
        else:
            tensor += 0.2 * noise * torch.where(tensor == 0, 1, tensor.abs())
    return model


def write_family(model_type: str, directory: Path, seed: int = 0) -> Path:
    """A Hugging Face directory with a tokenizer of which the model's vocabulary has every token."""
    return write_model(directory, tiny_family(model_type, seed), tiny_tokenizer())


@torch.no_grad()
def reference_logits(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """[T, V] for each: by the model itself with eager attention, one sequence at a time, without a cache."""
    model.set_attn_implementation("eager")
    return [model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0] for tokens in sequences]


@torch.no_grad()
def reference_cached_logits(model: PreTrainedModel, sequence: Sequence[int], prompt: int) -> torch.Tensor:
    """[T, V] by transformers' own decoding: the prompt's tokens at once, then token after token into its cache.

    Models without a usable cache (openai-gpt has none, recurrent_gemma keeps it to itself, blt's is wrong by nats) are
    called with all tokens instead.
    """
    if model.config.model_type in ("blt", "openai-gpt", "recurrent_gemma"):
        return reference_logits(model, [sequence])[0]
    model.set_attn_implementation("eager")
    tokens, accepted = torch.tensor([list(sequence)]), signature(model.forward).parameters
    logits, cache = list[torch.Tensor](), dict[str, Any]()
    for start, stop in pairwise([0, *range(prompt, len(sequence) + 1)]):
        places = {"position_ids": torch.arange(start, stop)[None]} if "position_ids" in accepted else {}
        output = model(input_ids=tokens[:, start:stop], use_cache=True, **places, **cache)
        logits.append(output.logits[0])
        cache = {name: output[name] for name in ("past_key_values", "cache_params", "state") if output.get(name)}
    return torch.cat(logits)
