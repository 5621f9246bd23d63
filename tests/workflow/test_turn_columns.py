"""Prompts as arrays that grow with a line of turns, and what turns are made of."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_answers import response_of
from talk import CALL, QUESTION, QWEN3, RESULT, SURE, THOUGHT, Talk, calling

from arl.api.errors import TrajectoryError
from arl.workflow.turn_columns import TokenLine, columns_of


@given(st.lists(st.tuples(st.integers(0, 99), st.lists(st.integers(0, 3), max_size=5)), max_size=20))
def test_lines_that_share_a_beginning_have_their_own_tokens_and_views_stay_as_they_were(
    steps: Sequence[tuple[int, list[int]]],
) -> None:
    lines: list[tuple[TokenLine, list[int], np.ndarray]] = [(TokenLine(), [], TokenLine().view(0))]
    for number, more in steps:
        line, ids, _ = lines[number % len(lines)]
        longer = line.extended(len(ids), more)
        lines.append((longer, ids + more, longer.view(len(ids) + len(more))))
    for line, ids, seen in lines:
        assert line.view(len(ids)).tolist() == seen.tolist() == ids
        assert not seen.flags.writeable


def test_prompts_of_a_dialogue_lie_in_one_array_until_it_branches() -> None:
    talk = Talk(QWEN3)
    turn = talk.say(QUESTION, CALL, calling())
    turn = talk.say([*turn.messages, RESULT], THOUGHT + "4")
    prompts = [turn.prompt, talk.prompt([*turn.messages, RESULT], turn), talk.prompt([*turn.messages, SURE], turn)]
    seen = [talk.dialogue.input_array(prompt) for prompt in (*prompts, prompts[1])]
    assert [ids.tolist() for ids in seen[:3]] == [list(prompt.input_ids) for prompt in prompts]
    assert np.shares_memory(seen[1], seen[3])
    assert not np.shares_memory(seen[1], seen[2])


@pytest.mark.parametrize(("ids", "name"), [([1.5], "token_ids"), ([-1], "token_ids"), ([1 << 31], "token_ids")])
def test_an_answer_of_other_things_than_token_ids_makes_no_trajectory(ids: list[int], name: str) -> None:
    with pytest.raises(TrajectoryError, match=rf"{name}\[2\] is {ids[0]}"):
        columns_of([0, 0], response_of(ids))
