"""The embedded inference server: a separate program, `python -m arl.engine.local`, that speaks SGLang's protocol.

    HTTP (app, generate, control) --jobs--> scheduler --> running batch: plan, run, take --> runner, attention

Clients talk to it over HTTP, so other packages import only `received_weights`. It imports only `arl.api` and `arl.web`.
"""
