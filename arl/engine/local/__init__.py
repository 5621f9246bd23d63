"""The embedded inference server: a separate program, `python -m arl.engine.local`, that speaks SGLang's protocol.

    app (HTTP), frame_server --> generate: jobs --> model_thread --> scheduler: plan, run, take --> runner, attention

Clients talk to it over HTTP, so other packages import only `weight_receiver`.
"""
