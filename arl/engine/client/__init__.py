"""The client of inference servers, and the processes of the servers that arl starts itself.

    remote_engine   the InferenceEngine: each request, from its first attempt to its response
    load_balancer   which server a request gets, and who waits for one
    partial_response  one response made of several answers
    server_pool     what is known about each server, its requests and its states
    membership      servers join and leave, as a servers file says
    health          updates of one or all servers; fences, probes, checks of weights
    watchdog        slow requests, signs of life, log lines, metrics, the least number of servers
    server_client   the calls to one server of any kind, and what servers say of themselves, compared
    sglang_client, vllm_client   the two protocols
    frame_client    calls of /generate over one WebSocket, to an embedded server
    server_processes  servers that arl starts and restarts
    ray_servers     and where it starts them on a Ray cluster
    servers_file    which servers there should be, and how they are, in two files

Everything here belongs to one event loop. It imports arl.api and arl.runtime, and no other part of the engine:
new weights come as a `WeightUpdate`.
"""
