"""Prompts as arrays that grow with a line of turns, and what turns are made of."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_answers import response_of
from talk import CALL, QUESTION, QWEN3, RESULT, SURE, THOUGHT, Talk, calling

from arl.api.errors import TrajectoryError
from arl.api.routed_experts import Routes
from arl.workflow.turn_columns import Part, TokenLine, columns_of, routes


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


def routed(number: int, start: int, num_given: int, num_said: int, routes_from: int = 0) -> Part:
    """A turn after `start` tokens; token t was computed in it by expert 10 * number + t."""
    num_tokens = start + num_given + num_said
    experts = np.arange(routes_from, num_tokens - 1, dtype=np.uint8)[:, None, None] + 10 * number
    of_response = Routes.joined([routes_from, Routes.of(experts), 1])
    return (0,) * num_given, response_of([1] * num_said, routes=of_response), True


def told(turns: Sequence[Part]) -> list[int | None]:
    found = routes(turns)
    assert found is not None
    numbers = iter(found.experts.ravel().tolist())
    return [next(numbers) if known else None for known in found.is_known]


def test_a_token_has_the_routes_of_the_turn_that_computed_it_first() -> None:
    turns = [routed(0, 0, 2, 2), routed(5, 4, 1, 2), routed(9, 7, 0, 1)]
    assert told(turns) == [0, 1, 2, 53, 54, 55, 96, None]
    assert told([turns[0], routed(5, 4, 1, 2, routes_from=3), turns[2]]) == told(turns)


def test_a_turn_without_routes_leaves_its_tokens_to_the_next_one_or_unknown() -> None:
    bare: Part = (0,), response_of([1, 1]), True
    assert told([routed(0, 0, 2, 2), bare]) == [0, 1, 2, None, None, None, None]
    assert told([bare, routed(5, 3, 0, 2)]) == [50, 51, 52, 53, None]
    assert told([bare, routed(5, 3, 0, 2, routes_from=2)]) == [None, None, 52, 53, None]
    assert routes([bare, bare]) is None


def test_routes_of_other_tokens_than_the_turns_are_refused() -> None:
    with pytest.raises(TrajectoryError, match="routes has 5 entries for the 4 tokens of a turn's prompt and answer"):
        routes([routed(0, 1, 2, 2)])
