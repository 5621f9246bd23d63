"""litellm, with a schema and with a forced tool."""

import os

import litellm
from point import Point, told

asked = {
    "model": "openai/any",
    "api_base": os.environ["OPENAI_BASE_URL"],
    "messages": [{"role": "user", "content": "A point."}],
}
said = litellm.completion(**asked, response_format=Point).choices[0].message.content
tool = {"type": "function", "function": {"name": "draw", "parameters": Point.model_json_schema()}}
called = litellm.completion(**asked, tools=[tool], tool_choice="required").choices[0].message.tool_calls[0]
told(Point.model_validate_json(said), Point.model_validate_json(called.function.arguments))
