"""The doctor: compares what servers sample with what the trainer computes, and names the cause of a difference.

probes.py                    the fixed texts
server_probe.py, trainer_probe.py, reference_model.py    what a server, the train engine and transformers say of them
evidence.py, mixtures.py     pure functions: numbers in, the cause that explains them out
causes.py, checked.py        the causes that it knows, each with its mend; and the result of a check
*_checks.py                  the checks, each a coroutine from a Visit to a Checked
examination.py               their order, and which checks depend on which
"""
