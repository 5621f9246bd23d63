"""Steps of a recorded run, trained again: with the run's own settings, or with others. No sampling, no servers.

recorded_run.py     which steps, from which checkpoint, under which settings
replay.py           `arl.replay`: each step again and its weights compared, or two learners side by side
"""
