"""The fields that bodies of chat completions and of completions share, vLLM's and SGLang's among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from arl.endpoint.answer_forms import Form, json_schema, one_of, one_of_texts, regex
from arl.endpoint.calls import ALTERS, MAX_SAMPLES, Count, Seed
from arl.endpoint.exchange import CallBody
from arl.web.bodies import Integers, RequestBody, Strings
from arl.workflow.messages import arguments_of

UNALTERED: Mapping[str, Sequence[Any]] = {
    "frequency_penalty": (0,), "logit_bias": ({},), "presence_penalty": (0,), "repetition_penalty": (1,),
}  # fmt: skip
"""Fields that change the distribution -> the values that do not."""
WHY_UNALTERED = dict.fromkeys(UNALTERED, ALTERS)


class StreamOptions(RequestBody, ignored=("include_obfuscation",)):
    include_usage: bool = False


class SampledBody(CallBody):
    """The fields of sampling, and those that ask for a form of the answer, of which at most one may be there."""

    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: Strings = ()
    stop_token_ids: Integers = ()
    ignore_eos: bool = False
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    stream_options: StreamOptions = StreamOptions()
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    regex: Any = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of SamplingParams; None for those that the body does not name."""
        return {
            "max_new_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "stop": tuple(self.stop) or None,
            "stop_token_ids": tuple(self.stop_token_ids) or None,
            "ignore_eos": self.ignore_eos or None,
            "seed": self.seed,
        }

    def form(self, *others: tuple[str, Form]) -> tuple[str, Form | None]:
        """The form of the answer's text, and the field that asks for it. others: asked for by other fields."""
        forms = list(others)
        if (given := self.guided_json) is not None:
            forms.append(("guided_json", json_schema("guided_json", arguments_of(given))))
        for name, pattern in (("guided_regex", self.guided_regex), ("regex", self.regex)):
            if pattern is not None:
                forms.append((name, regex(name, pattern)))
        if (given := self.guided_choice) is not None:
            forms.append(("guided_choice", one_of_texts("guided_choice", given)))
        return one_of(forms)
