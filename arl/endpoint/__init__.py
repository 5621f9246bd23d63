"""The OpenAI endpoint: it trains programs that call a model over HTTP. Give the program its URL and key.

proxy.py is the endpoint, session.py an episode behind it. Each protocol has a module (chat, responses,
anthropic) that turns a request into a call and answers into the protocol's shape. It never imports `arl.engine`.
"""
