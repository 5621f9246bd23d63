"""How weights travel from the trainer to the servers: a module for each transport, and what transports share.

`disk`, `adapter`, `delta` and `distributed` are the values of weights.transport. `package` is the delta format,
`mirror` the program that applies deltas beside servers, `sender` the trainer's side of process groups; `layout` says
how tensors lie in memory on the way. The wing imports arl.api, arl.web and arl.engine.local.received_weights (the
servers' side of process groups). It must not import the trainer or the client: transports state in protocols what they
need of both.
"""
