"""What an answer means for the response in the making, without a server."""

from typing import Literal

from arl.api import ModelRequest, SamplingParams
from arl.engine.client.continuation import PartialResponse
from arl.engine.client.server_client import Answer


def test_an_end_token_ends_the_response_also_where_a_seams_one_token_budget_was_used_up_by_it() -> None:
    partial = PartialResponse(ModelRequest(input_ids=(1,), sampling=SamplingParams(max_new_tokens=9, stop=("</x>",))))
    partial.extend(answer("ab<", [5, 6, 7], "abort"), [0, 0, 0], eos_token_ids=[2])
    assert partial.payload("r.1", "0")["sampling_params"]["max_new_tokens"] == 1
    partial.extend(answer("", [2], "length"), [1], eos_token_ids=[2])
    assert partial.stop_reason == "stop"
    assert partial.response().output_ids == (5, 6, 7, 2)


def answer(text: str, output_ids: list[int], finish: Literal["stop", "length", "abort"]) -> Answer:
    return Answer(
        output_ids=output_ids,
        output_logprobs=[-0.5] * len(output_ids),
        finish=finish,
        text=text,
        label="0",
        spans=(),
    )
