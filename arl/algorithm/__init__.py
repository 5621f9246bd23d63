"""The mathematics of an algorithm: advantages, losses, aggregation, and the packing of sequences.

Everything here is pure and synchronous: functions of records and tensors. It imports arl.api and torch, no asyncio, and
does no I/O. Add an estimator to `advantages`, a loss to `losses.surrogates`, their settings to
arl.api.settings.algorithm.
"""
