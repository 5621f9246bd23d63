"""The OpenAI endpoint: it trains programs that call a model over HTTP. Give the program its URL and key.

Each protocol has a module (chat, responses, anthropic) that turns a request into a call and answers into
the protocol's shape. Import only the two names below. The package never imports `arl.engine`.
"""

from arl.workflow.proxy.openai_proxy import OpenAIProxy
from arl.workflow.proxy.session import EpisodeSession

__all__ = ["EpisodeSession", "OpenAIProxy"]
