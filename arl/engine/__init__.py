"""The engines: the train engine, the embedded server, the clients of inference servers, and how weights reach them.

    fsdp/     trains a Hugging Face model on one rank or many
    weights/  carries new weights from the trainer to inference servers
    client/   speaks to SGLang-protocol servers
    local/    the embedded inference server
    tiny.py   tiny models and tokenizers for tests, examples and benchmarks

Engines implement contracts of `arl.api`. Nothing here imports `arl.workflow`: both meet in `arl.api`.
"""
