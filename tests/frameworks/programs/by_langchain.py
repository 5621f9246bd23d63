"""LangChain's with_structured_output, by a schema and by a forced tool."""

from langchain_openai import ChatOpenAI
from point import Point, told

model = ChatOpenAI(model="any")
for method in ("json_schema", "function_calling"):
    told(model.with_structured_output(Point, method=method).invoke("A point."))
