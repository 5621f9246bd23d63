"""Training as a run: the loop, the training of a batch, checkpoints, evaluation, logs and display.

Imports arl.api, arl.algorithm and arl.rollout. It uses train engines, inference engines and weight transports through
their contracts alone; arl.run.launch supplies the concrete ones.
"""
