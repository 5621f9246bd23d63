"""LangGraph's agent with a tool and an answer by a schema."""

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_openai import ChatOpenAI
from point import Point, told


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = create_agent(ChatOpenAI(model="any"), tools=[add], response_format=ProviderStrategy(Point))
told(agent.invoke({"messages": [("user", "A point at 1 + 2.")]})["structured_response"])
