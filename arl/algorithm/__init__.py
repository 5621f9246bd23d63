"""The mathematics of an algorithm: advantages, losses, aggregation, and how sequences are packed.

All of it is pure and synchronous: functions of records and tensors. It imports arl.api and torch, and does no I/O.
Add an estimator to `advantages`, a loss to `losses.surrogates`; the settings of both are in arl.api.objective.
"""
