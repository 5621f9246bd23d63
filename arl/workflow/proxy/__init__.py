"""The OpenAI endpoint: programs that call a model over HTTP are trained by being called with its URL and key."""

from arl.workflow.proxy.openai_proxy import OpenAIProxy
from arl.workflow.proxy.session import EpisodeSession

__all__ = ["EpisodeSession", "OpenAIProxy"]
