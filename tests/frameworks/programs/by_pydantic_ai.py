"""pydantic-ai's typed output, by a forced tool and by a schema."""

from point import Point, told
from pydantic_ai import Agent, NativeOutput, ToolOutput

for output in (ToolOutput(Point), NativeOutput(Point)):
    told(Agent("openai-chat:any", output_type=output).run_sync("A point.").output)
