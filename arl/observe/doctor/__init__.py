"""The doctor: compares what servers sample with what the trainer computes, and names the cause of a difference.

causes.py           the causes that it knows, each with its mend; the result of a check, and of all
visit.py            what checks use: the server, the run's settings, the fixed texts
trainer_probe.py    what the train engine says of the same tokens
checks.py           the checks, each a coroutine from a Visit to a Checked
examination.py      their order, and which checks depend on which
"""
