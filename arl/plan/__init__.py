"""What a run would do on other machines, before they are rented: `arl plan`.

The real controller, buffer and ledger run in virtual time, against simulated servers and a simulated trainer whose
costs come from a `Costs` record (costs.py). May use arl.rollout and the trainer's delivery of weights; must not import
an engine.
"""
