"""Rows as Parquet, JSON and their users hold them: what only another row has does not reach the prompt."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scripted_answers import exact
from talk import QWEN3

from arl.api.errors import DatasetError
from arl.data.loading import load_dataset
from arl.run.finetuning.examples import to_demonstrations, to_preferences
from arl.workflow.agent import SingleTurnWorkflow
from arl.workflow.messages import without_padding


def tool(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties], **more}
    return {"type": "function", "function": {"name": name, "description": "Do it.", "parameters": parameters}}


def called(name: str, **arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "user", "content": "do"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


ADD = tool("add", {"a": {"type": "integer"}, "far": {"type": "object", "properties": {"x": {"type": "number"}}}})
SAY = tool("say", {"text": {"type": "string", "enum": ["hi", "ho"]}, "to": {"type": ["string", "null"]}})
ROWS = [
    {"messages": called("add", a=1, far={"x": 2.0}), "tools": [ADD]},
    {"messages": called("say", text="hi", to=None), "tools": [SAY]},
]


NONE = {"a": None, "far": None, "to": None}


def from_parquet(rows: list[dict[str, Any]], place: Path) -> Any:
    pq.write_table(pa.Table.from_pylist(rows), place / "rows.parquet")
    return load_dataset(place / "rows.parquet")


def test_rows_of_parquet_are_learned_as_they_were_written(tmp_path: Path) -> None:
    rows = from_parquet(ROWS, tmp_path)
    assert rows[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {**NONE, "text": "hi"}
    assert to_demonstrations(rows, QWEN3) == to_demonstrations(ROWS, QWEN3)
    assert '{"text": "hi", "to": null}}' in QWEN3.decode(to_demonstrations(rows, QWEN3)[1][0])


def test_answers_of_parquet_are_compared_without_what_the_other_lacks(tmp_path: Path) -> None:
    asked = {"role": "user", "content": "do"}
    row = {"chosen": ROWS[1]["messages"], "rejected": [asked, {"role": "assistant", "content": "no"}], "tools": [SAY]}
    assert to_preferences(from_parquet([row], tmp_path), QWEN3) == to_preferences([row], QWEN3)


def test_an_agent_begins_with_what_the_row_says(tmp_path: Path) -> None:
    rows = [{**row, "messages": [*row["messages"], {"role": "user", "content": "so?"}]} for row in ROWS]
    workflow = SingleTurnWorkflow(QWEN3, exact)
    assert [workflow.messages(row) for row in from_parquet(rows, tmp_path)] == [workflow.messages(row) for row in rows]
    as_json = {"messages": json.dumps(rows[1]["messages"]), "tools": [SAY]}
    assert workflow.messages(as_json) == rows[1]["messages"]


NULLABLE = {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}], "default": None}
PLACE = {"type": "object", "properties": {"x": {"type": "integer", "nullable": True}, "y": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "given", "right"),
    [
        ({"type": "string"}, None, {}),
        ({}, None, {}),
        ({"type": ["string", "null"]}, None, {"p": None}),
        ({"enum": ["a", None]}, None, {"p": None}),
        ({"enum": ["a", "null"]}, None, {}),
        (NULLABLE, None, {"p": None}),
        (NULLABLE, {"x": None, "y": None}, {"p": {"x": None}}),
        (
            {"type": "array", "items": {"$ref": "#/$defs/Place"}},
            [{"x": None, "y": None}, None],
            {"p": [{"x": None}, None]},
        ),
    ],
)
def test_a_none_is_an_argument_where_the_schema_declares_it(schema: Any, given: Any, right: Any) -> None:
    spec = tool("f", {"p": schema}, **{"$defs": {"Place": PLACE}})
    messages, tools = without_padding(called("f", p=given, q=None), [spec])
    assert messages == called("f", **right)
    assert tools == [spec]


def test_a_schema_keeps_the_default_null_of_a_type_that_may_be_null_and_the_nulls_of_an_enum() -> None:
    kept = {"type": ["integer", "null"], "default": None, "enum": [1, None]}
    padded = {**kept, "items": None}, {"type": "integer", "default": None, "const": None}
    _, (spec,) = without_padding((), [{**tool("f", {"a": padded[0], "b": padded[1], "default": None}), "strict": None}])
    assert spec == {**tool("f", {"a": kept, "b": {"type": "integer"}}), "function": spec["function"]}
    assert spec["function"]["parameters"]["properties"] == {"a": kept, "b": {"type": "integer"}}


@pytest.mark.parametrize("name", ["messages", "tools", "tool_calls", "one tool", "parameters", "arguments"])
def test_columns_of_json_are_read(name: str) -> None:
    (user, said), (function,) = ROWS[0]["messages"], (ADD["function"],)
    (call,) = said["tool_calls"]
    row: dict[str, Any] = {
        "messages": {"messages": json.dumps([user, said])},
        "tools": {"tools": json.dumps([ADD])},
        "tool_calls": {"messages": [user, {**said, "tool_calls": json.dumps([call])}]},
        "one tool": {"tools": [json.dumps(ADD)]},
        "parameters": {"tools": [{**ADD, "function": {**function, "parameters": json.dumps(function["parameters"])}}]},
        "arguments": {"messages": [user, {**said, "tool_calls": [with_text(call)]}]},
    }[name]
    assert to_demonstrations([{**ROWS[0], **row}], QWEN3) == to_demonstrations(ROWS[:1], QWEN3)


def with_text(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"tools": "[{"}, "row 1: the tools cannot be read: Expecting"),
        ({"tools": "{}"}, "row 1: the tools must be a list of objects, or its JSON"),
        ({"tools": [1]}, "row 1: the tools must be a list of objects"),
        ({"messages": "[{"}, "row 1: `messages` is a str; it must be a list of messages, or its JSON"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": "add(1)"}]},
            "the tool_calls of message 0 can",
        ),
    ],
)
def test_json_that_cannot_be_read_is_an_error_with_the_rows_number(changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DatasetError, match=re.escape(complaint)):
        to_demonstrations([ROWS[0], {**ROWS[1], **changed}], QWEN3)
