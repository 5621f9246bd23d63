"""Rollouts: which examples run, as groups of episodes, and how finished groups wait for their batch.

Everything here runs on one event loop and sees contracts alone: it imports arl.api and no torch. controller.py starts
what the other files describe: ledger.py (which example is next), buffer.py (when a group may be admitted and trained),
group.py (the life of one group), episode.py (one run of a workflow). monitors.py counts, warns, and may end the run.
"""
