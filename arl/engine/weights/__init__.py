"""How weights travel from the trainer to the servers.

`disk` (models and adapters), `delta` and `distributed` are the transports, `mirror` the program that applies deltas
beside servers, `process_groups` the trainer's side of process groups. It must not import the trainer or the client:
transports state in protocols what they need of both.
"""
