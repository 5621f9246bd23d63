"""The causes that the doctor can name, and how to mend each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why servers and trainer differ."""

    name: str
    means: str
    """What goes wrong."""
    mend: str
    """The setting, server flag or file to change."""


TOKENIZER = Cause(
    name="tokenizer",
    means="The server encodes texts into other token ids than the tokenizer of the trained model.",
    mend="Start the server with the run's model directory, without --tokenizer-path, or copy the tokenizer's files of "
    "the trained model there.",
)
TEMPLATE = Cause(
    name="chat template",
    means="The server renders the same messages into other tokens than the workflow does, such as with another default "
    "of the template.",
    mend="Start the server without --chat-template; give the workflow the tokenizer of the trained model; pass the "
    "option that differs in template_options.",
)
CONTEXT = Cause(
    name="context length",
    means="The server takes fewer tokens than the run needs, or cuts long prompts without saying so.",
    mend="Set the server's --context-length (engine.context_length) to what prompts and answers need, and leave out "
    "--allow-auto-truncate.",
)
TRAIN_ENGINE = Cause(
    name="train engine",
    means="The train engine computes other logprobs than plain transformers does with the weights that it publishes.",
    mend="Compare train.dtype, train.compile and train.tensor_parallel with a run without them; report it.",
)
NOT_LOADED = Cause(
    name="load without effect",
    means="The server answered that it loaded the weights, and still computes with the version before.",
    mend="See the server's log of the load. Use another weights.transport, or start the server again.",
)
PARTS_NOT_UPDATED = Cause(
    name="parts not updated",
    means="Some layers still have the weights of the version before.",
    mend="Look at the server's weight loader for these names; a server that keeps copies of weights must make them "
    "again at each load. Use another weights.transport, or start the server again for each version.",
)
PACKED = Cause(
    name="packed linear layers",
    means="Embeddings and norms are new, and the linear layers are those of the version before: the server packed them "
    "when it started, and a load fills the originals, which it no longer reads.",
    mend="Turn the packing of linear weights off (vLLM on a CPU does it), or use SGLang or the embedded server.",
)
TIED_HEAD = Cause(
    name="tied head not updated",
    means="Embedding and head share one tensor in the trained model, and only one of them was updated.",
    mend="Look at tie_word_embeddings in the server's config.json: it must be the trained model's.",
)
SHARD = Cause(
    name="shard not updated",
    means="One rank's part of each weight is of the version before.",
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
    means="A request that names the adapter is computed with that of another version.",
    mend="Give each version's adapter a name of its own, and unload the old one; leave --max-loaded-loras unset.",
)
UNKNOWN_ADAPTER = Cause(
    name="unknown adapter accepted",
    means="A request that names an adapter which was never loaded is answered, by something else.",
    mend="Use a server that refuses unknown adapters; otherwise a restarted server serves its base model unnoticed.",
)
OTHER_WEIGHTS = Cause(
    name="other weights",
    means="The server computes with weights that are of no version of this trainer.",
    mend="Start it with the run's model and without quantization. If a run trains it now, wait for its end.",
)
PRECISION = Cause(
    name="precision",
    means="The difference is of the size of bfloat16's rounding, but server and trainer should compute in float32.",
    mend="Set the server's --dtype (engine.dtype) to float32, and train.dtype, too; or declare bfloat16 for both and "
    "correct for what is left (algorithm.preset icepop or mis).",
)
CHUNKED_PREFILL = Cause(
    name="chunked prefill",
    means="Tokens behind the first chunk of a long prompt are computed with wrong positions, or without what is before "
    "them.",
    mend="Start the server with --chunked-prefill-size -1, or above the longest prompt.",
)
BATCH_VARIANCE = Cause(
    name="batch variance",
    means="A request's logprobs depend on the requests beside it, by more than rounding.",
    mend="Start the server with --enable-deterministic-inference, or with another --attention-backend.",
)
PREFIX_CACHE = Cause(
    name="prefix cache",
    means="Tokens behind a cached prefix differ, and without the cache they do not, under one version of the weights.",
    mend="Start the server with --disable-radix-cache; report it to the server.",
)
STALE_CACHE = Cause(
    name="stale prefix cache",
    means="After a load the server goes on from keys and values of the version before.",
    mend="Use a server that keeps requests of different extra_key apart and flushes the cache with a load, or set "
    "engine.pause_mode to retract, or start it with --disable-radix-cache.",
)
LOGPROB_TEMPERATURE = Cause(
    name="logprobs of another temperature",
    means="The server returns logprobs of logits that it divided by another temperature than the request's.",
    mend="Leave SGLANG_RETURN_ORIGINAL_LOGPROB unset; with vLLM set --logprobs-mode processed_logprobs.",
)
SAMPLED_TEMPERATURE = Cause(
    name="sampled at another temperature",
    means="The returned logprobs are right, but the tokens are drawn as at another temperature.",
    mend="See the server's own sampling defaults (--preferred-sampling-params, generation_config.json) and plugins.",
)
TRUNCATION = Cause(
    name="undeclared truncation",
    means="The server samples among the likeliest tokens alone, though the request asks for all of them.",
    mend="Start the server with --sampling-defaults openai and without --preferred-sampling-params; remove top_p, "
    "top_k and min_p from generation_config.json; or ask for them in SamplingParams, which arl then replays.",
)
KEPT_IDS = Cause(
    name="truncated sampling",
    means="With the run's top_p, top_k or min_p, the returned logprobs are not those among the ids that were kept.",
    mend="Use SGLang 0.5.23 or newer or the embedded server, or top_p 1, top_k -1 and min_p 0.",
)
STOP_STRINGS = Cause(
    name="stop strings",
    means="A response does not end at its stop string, or lacks the tokens of it.",
    mend="Use stop_token_ids in the place of stop, or a server that keeps the tokens of a stop string.",
)
END_OF_SEQUENCE = Cause(
    name="end of sequence",
    means="The server ends responses at other tokens than those that the trained model's files name.",
    mend="Make eos_token_id agree in config.json, generation_config.json and the tokenizer of the server's model, or "
    "name the tokens in stop_token_ids.",
)
LABEL = Cause(
    name="version label",
    means="Tokens carry the label of another version than the one that sampled them, so staleness is wrong.",
    mend="Update the server: weight_version must change together with the weights.",
)
LABEL_INSIDE = Cause(
    name="version label inside a response",
    means="After an update during a response, the labels change at another token than the weights do.",
    mend="Start the server with --disable-overlap-schedule, or set engine.pause_mode to retract.",
)
ROUTING = Cause(
    name="routing",
    means="The experts that the server reports are not those that it computed with, or it reports none.",
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
    means="The numbers differ, and none of the known causes explains them.",
    mend="Send the JSON of this diagnosis with the server's version and flags.",
)

CAUSES = {cause.name: cause for cause in list(globals().values()) if isinstance(cause, Cause)}
"""By name."""
