"""The causes that the doctor can name and how to mend each; and the results of checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


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
NOT_LOADED = Cause(
    name="load without effect",
    means="The server answered that it loaded the weights, but still computes with the previous version.",
    mend="See the server's log of the load. Use another weights.transport, or restart the server.",
)
LOADED_IN_PART = Cause(
    name="load in part",
    means="The server took only a part of the update: some weights are still those of the previous version.",
    mend="Usual parts are linear layers that the server packed when it started (vLLM on a CPU), a tied head or "
    "embedding (tie_word_embeddings must equal the trained model's), and the shards of one rank (--tp-size, "
    "--dp-size): see the server's log of the load. Use another weights.transport, or restart the server.",
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
    mend="Start it with the run's model, without quantization and without --kv-cache-dtype. If a run trains it now, "
    "wait until that run ends.",
)
PRECISION = Cause(
    name="precision",
    means="The difference has the size of bfloat16's rounding, but server and trainer should compute in float32.",
    mend="Set the server's --dtype (engine.dtype) and train.dtype to float32, without --kv-cache-dtype; or declare "
    "bfloat16 for both, and correct for what is left (algorithm.preset icepop or mis).",
)
LOGPROB_TEMPERATURE = Cause(
    name="logprobs of another temperature",
    means="The server returns logprobs of logits that it divided by a temperature other than the request's.",
    mend="Leave SGLANG_RETURN_ORIGINAL_LOGPROB unset; with vLLM set --logprobs-mode processed_logprobs.",
)
SAMPLED_OTHERWISE = Cause(
    name="sampled otherwise",
    means="The returned logprobs are right, but the tokens do not follow them: they are sampled at another "
    "temperature, or only among the likeliest tokens.",
    mend="Use a server that samples as the request says: look at its plugins and at what was changed in it.",
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

Outcome = Literal["ok", "fault", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result of one check of one server."""

    check: str
    outcome: Outcome
    server: str = ""
    measured: str = ""
    """What was measured; if the check was skipped, why."""
    threshold: str = ""
    """The limit, and its reason."""
    cause: Cause | None = None
    """Set for a fault."""
    detail: str = ""
    """Details of this fault: which layer, which temperature."""

    def row(self) -> dict[str, Any]:
        """As JSON values."""
        found = {"check": self.check, "server": self.server, "outcome": self.outcome}
        found |= {"measured": self.measured, "threshold": self.threshold}
        if self.cause is not None:
            found |= {"cause": self.cause.name, "means": self.cause.means, "detail": self.detail}
            found |= {"mend": self.cause.mend}
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The results of all checks, in their order."""

    checked: Sequence[Checked]

    @property
    def faults(self) -> list[Checked]:
        return [one for one in self.checked if one.outcome == "fault"]

    @property
    def is_healthy(self) -> bool:
        return not self.faults

    @property
    def verdict(self) -> str:
        """One or two sentences. The first fault counts, because later ones may follow from it."""
        done = sum(one.outcome == "ok" for one in self.checked)
        skipped = sum(one.outcome == "skipped" for one in self.checked)
        if self.is_healthy:
            return f"sampler and trainer agree: {done} checks passed, {skipped} were skipped"
        first = self.faults[0]
        assert first.cause is not None
        others = list(dict.fromkeys(one.cause.name for one in self.faults[1:] if one.cause not in (None, first.cause)))
        also = f" Then: {', '.join(others)}." if others else ""
        detail = f" {first.detail.rstrip('.')}." if first.detail else ""
        allowed = f" (allowed: {first.threshold})" if first.threshold else ""
        found = f"{first.cause.means}{detail} Measured: {first.measured}{allowed}."
        return f"cause: {first.cause.name}. {found} To mend it: {first.cause.mend}{also}"

    def json_object(self) -> dict[str, Any]:
        cause = self.faults[0].cause if self.faults else None
        return {
            "healthy": self.is_healthy,
            "cause": cause and cause.name,
            "verdict": self.verdict,
            "checks": [one.row() for one in self.checked],
        }
