"""How weights travel from the trainer to the servers.

`disk` (models and adapters), `delta` and `distributed` are the transports. `package` is the delta format, `mirror` the
program that applies deltas beside servers, `sender` the trainer's side of process groups. The wing imports arl.api,
arl.web and arl.engine.local.received_weights (the servers' side of process groups). It must not import the trainer or
the client: transports state in protocols what they need of both.
"""
