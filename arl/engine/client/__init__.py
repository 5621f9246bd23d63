"""The client of inference servers, and the processes of the servers that arl starts itself.

`sglang` is the InferenceEngine; `line` finds a server for each request, `patience` limits its time; `server_pool` knows
the servers and their states, `upkeep` keeps them fit to serve, and `server_watch` loses none in silence;
`server_client` speaks SGLang's protocol to one of them; `processes` starts servers, and starts them again. Everything
here belongs to one event loop. It imports arl.api and arl.web, and no other part of the engine: new weights come as a
`WeightUpdate`.
"""
