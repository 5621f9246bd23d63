"""OpenAI's .parse(), of both protocols, and a forced tool."""

import openai
from point import Point, told

with openai.OpenAI() as client:
    asked = {"model": "any", "messages": [{"role": "user", "content": "A point."}]}
    parsed = client.chat.completions.parse(**asked, response_format=Point).choices[0].message.parsed
    response = client.responses.parse(model="any", input="A point.", text_format=Point).output_parsed
    tool = openai.pydantic_function_tool(Point, name="draw")
    called = client.chat.completions.parse(**asked, tools=[tool], tool_choice="required").choices[0].message
    told(parsed, response, called.tool_calls[0].function.parsed_arguments)
