"""Steps of a recorded run, run again: with the run's own settings, or with others. No sampling, no servers.

recorded_run.py     which steps, from which checkpoint, under which settings
trained_steps.py    each step, and what trains it: another one where the run continued with other settings
again.py            the same numbers?
otherwise.py        what would others have been: another loss, weights, reward, learning rate, packing
compared_process.py two learners beside each other, in a process of their own
"""
