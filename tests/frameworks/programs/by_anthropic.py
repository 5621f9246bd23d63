"""Anthropic's SDK: an answer by a schema, and a forced tool."""

import anthropic
from point import Point, told

with anthropic.Anthropic() as client:
    asked = {"model": "any", "max_tokens": 1000, "messages": [{"role": "user", "content": "A point."}]}
    schema = {"type": "json_schema", "schema": Point.model_json_schema()}
    said = client.messages.create(**asked, output_config={"format": schema}).content[0].text
    tool = {"name": "draw", "description": "Draw.", "input_schema": Point.model_json_schema()}
    used = client.messages.create(**asked, tools=[tool], tool_choice={"type": "tool", "name": "draw"}).content[0].input
    told(Point.model_validate_json(said), Point.model_validate(used))
