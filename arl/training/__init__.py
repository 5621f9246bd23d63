"""Training as a run: the loop, what a batch goes through, checkpoints, evaluation, what a run writes and shows.

Imports arl.api, arl.algorithm and arl.rollout. It sees train engines, inference engines and weight transports through
their contracts alone: arl.assembly puts the concrete ones in.
"""
