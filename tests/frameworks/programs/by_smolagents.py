"""smolagents: an agent that must call tools, and one that writes code."""

import os
import sys

from point import Point, told
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def point_at(x: int) -> dict:
    """Make a red point.

    Args:
        x: its place
    """
    return {"x": x, "colour": "red"}


model = OpenAIServerModel(model_id="any", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
kind = {"tools": ToolCallingAgent, "code": CodeAgent}[sys.argv[1]]
told(Point.model_validate(kind(tools=[point_at], model=model, verbosity_level=0).run("A point at 3.")))
