"""The client of inference servers, and the processes of the servers that arl starts itself.

`sglang` is the InferenceEngine; `server_pool` knows the servers and their states, `upkeep` keeps them fit to serve,
`server_client` speaks SGLang's protocol to one of them, and `processes` starts and watches servers. Everything here
belongs to one event loop. It imports arl.api and arl.web, and no other part of the engine: new weights come as a
`WeightUpdate`.
"""
