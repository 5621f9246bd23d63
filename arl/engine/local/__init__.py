"""The embedded inference server: a program of its own, `python -m arl.engine.local`, that speaks SGLang's protocol.

    HTTP (app, generate, openai, control) --jobs--> scheduler --> running batch: plan, run, take --> runner, attention

Import nothing of it but `received_weights`: clients talk to it over HTTP. It imports `arl.api` and `arl.web` alone.
"""
