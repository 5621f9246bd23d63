"""The causes that the doctor can name, and how to mend each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why servers and trainer differ."""

    name: str
    means: str
    """A description of what goes wrong."""
    mend: str
    """The setting, server flag or file to change."""


TOKENIZER = Cause(
    name="tokenizer",
    means="The server encodes texts into different token ids than the trained model's tokenizer.",
    mend="Start the server with the run's model directory, without --tokenizer-path, or copy the trained model's "
    "tokenizer files there.",
)
TEMPLATE = Cause(
    name="chat template",
    means="The server renders the same messages into different tokens than the workflow does, for example because a "
    "default of the template differs.",
    mend="Start the server without --chat-template; give the workflow the tokenizer of the trained model; pass the "
    "option that differs in template_options.",
)
CONTEXT = Cause(
    name="context length",
    means="The server accepts fewer tokens than the run needs, or silently cuts long prompts.",
    mend="Set the server's --context-length (engine.context_length) to what prompts and answers need, and leave out "
    "--allow-auto-truncate.",
)
TRAIN_ENGINE = Cause(
    name="train engine",
    means="The train engine computes different logprobs than plain transformers does with the weights that it "
    "publishes.",
    mend="Run the doctor without train.dtype, train.compile and train.tensor_parallel to see which of them causes it, "
    "and report it.",
)
NOT_LOADED = Cause(
    name="load without effect",
    means="The server answered that it loaded the weights, but still computes with the previous version.",
    mend="See the server's log of the load. Use another weights.transport, or restart the server.",
)
PARTS_NOT_UPDATED = Cause(
    name="parts not updated",
    means="Some layers still have the weights of the previous version.",
    mend="Look at the server's weight loader for these names; a server that keeps copies of weights must make them "
    "again at each load. Use another weights.transport, or restart the server for each version.",
)
PACKED = Cause(
    name="packed linear layers",
    means="Embeddings and norms are new, but the linear layers are those of the previous version: the server packed "
    "them when it started, and a load fills the originals, which it no longer reads.",
    mend="Turn the packing of linear weights off (vLLM on a CPU does it), or use SGLang or the embedded server.",
)
TIED_HEAD = Cause(
    name="tied head not updated",
    means="Embedding and head share one tensor in the trained model, and only one of them was updated.",
    mend="Look at tie_word_embeddings in the server's config.json: it must equal the trained model's.",
)
SHARD = Cause(
    name="shard not updated",
    means="One rank's part of each weight is of the previous version.",
    mend="See the log of that rank of the server, and whether weight updates reach all of its processes (--tp-size, "
    "--dp-size); else publish with another weights.transport.",
)
BASE_SERVED = Cause(
    name="base model instead of adapter",
    means="A request that names the adapter is computed with the base model alone.",
    mend="Start the server with --enable-lora, and with --lora-target-modules and --max-lora-rank of train.lora; see "
    "that the adapter is in its /v1/models.",
)
OTHER_ADAPTER = Cause(
    name="another adapter",
    means="A request that names the adapter is computed with the adapter of another version.",
    mend="Give each version's adapter a name of its own, and unload the old one; leave --max-loaded-loras unset.",
)
UNKNOWN_ADAPTER = Cause(
    name="unknown adapter accepted",
    means="The server answers a request for an adapter that was never loaded.",
    mend="Use a server that refuses unknown adapters; otherwise a restarted server serves its base model unnoticed.",
)
OTHER_WEIGHTS = Cause(
    name="other weights",
    means="The server computes with weights that belong to no version of this trainer.",
    mend="Start it with the run's model and without quantization. If a run trains it now, wait until that run ends.",
)
PRECISION = Cause(
    name="precision",
    means="The difference has the size of bfloat16's rounding, but server and trainer should compute in float32.",
    mend="Set the server's --dtype (engine.dtype) and train.dtype to float32; or declare bfloat16 for both, and "
    "correct for what is left (algorithm.preset icepop or mis).",
)
KEYS_AND_VALUES = Cause(
    name="keys and values",
    means="The server stores keys and values in another dtype than its model's.",
    mend="Start the server without --kv-cache-dtype.",
)
CHUNKED_PREFILL = Cause(
    name="chunked prefill",
    means="Tokens after the first chunk of a long prompt are computed with wrong positions, or without the tokens "
    "before them.",
    mend="Start the server with --chunked-prefill-size -1, or above the longest prompt.",
)
BATCH_VARIANCE = Cause(
    name="batch variance",
    means="A request's logprobs depend on the other requests in its batch, by more than rounding.",
    mend="Start the server with --enable-deterministic-inference, or with another --attention-backend.",
)
PREFIX_CACHE = Cause(
    name="prefix cache",
    means="Under one version of the weights, tokens after a cached prefix get other logprobs than without the cache.",
    mend="Start the server with --disable-radix-cache, and report it to the server's developers.",
)
STALE_CACHE = Cause(
    name="stale prefix cache",
    means="After a load the server continues from keys and values of the previous version.",
    mend="Use a server that keeps requests of different extra_key apart and flushes the cache with a load, or set "
    "engine.pause_mode to retract, or start it with --disable-radix-cache.",
)
LOGPROB_TEMPERATURE = Cause(
    name="logprobs of another temperature",
    means="The server returns logprobs of logits that it divided by a temperature other than the request's.",
    mend="Leave SGLANG_RETURN_ORIGINAL_LOGPROB unset; with vLLM set --logprobs-mode processed_logprobs.",
)
SAMPLED_TEMPERATURE = Cause(
    name="sampled at another temperature",
    means="The returned logprobs are right, but the tokens are sampled at another temperature.",
    mend="Use a server that samples at the request's temperature: look at its plugins and at what was changed in it.",
)
TRUNCATION = Cause(
    name="undeclared truncation",
    means="The server samples only among the likeliest tokens, though the request asks for all of them.",
    mend="Use a server that samples as the request says: look at its plugins, and at settings that overrule requests. "
    "Or ask for the truncation in SamplingParams; arl then replays it.",
)
KEPT_IDS = Cause(
    name="truncated sampling",
    means="With the run's top_p, top_k or min_p, the returned logprobs are not those over the kept ids.",
    mend="Use SGLang 0.5.23 or newer or the embedded server, or top_p 1, top_k -1 and min_p 0.",
)
STOP_STRINGS = Cause(
    name="stop strings",
    means="A response does not end at its stop string, or lacks the stop string's tokens.",
    mend="Use stop_token_ids in place of stop, or a server that keeps the tokens of a stop string.",
)
END_OF_SEQUENCE = Cause(
    name="end of sequence",
    means="The server ends responses at other tokens than those in the trained model's files.",
    mend="Make eos_token_id agree in config.json, generation_config.json and the tokenizer of the server's model, or "
    "name the tokens in stop_token_ids.",
)
LABEL = Cause(
    name="version label",
    means="Tokens carry the label of a version that did not sample them, so staleness is wrong.",
    mend="Update the server: weight_version must change together with the weights.",
)
LABEL_INSIDE = Cause(
    name="version label inside a response",
    means="When an update interrupts a response, the labels change at another token than the weights do.",
    mend="Start the server with --disable-overlap-schedule, or set engine.pause_mode to retract.",
)
ROUTING = Cause(
    name="routing",
    means="The experts that the server reports are not those with which it computed, or it reports none.",
    mend="Start SGLang with --enable-return-routed-experts, in a version that returns them right; until then set "
    "engine.replay_routing to false.",
)
LOAD_FAILED = Cause(
    name="load failed",
    means="The servers refused the new weights, or did not get them.",
    mend="See the reason, and the servers' logs; try another weights.transport.",
)
UNANSWERED = Cause(
    name="no usable answer",
    means="The server failed or refused a request that a run would make.",
    mend="See the reason, and the server's log.",
)
UNEXPLAINED = Cause(
    name="unexplained difference",
    means="The numbers differ, and no known cause explains the difference.",
    mend="Send the JSON of this diagnosis with the server's version and flags.",
)

CAUSES = {cause.name: cause for cause in list(globals().values()) if isinstance(cause, Cause)}
"""By name."""
