"""`arl try` and `arl eval`: episodes of a script's experiment, without training.

Both commands open a stage (episodes.py) in the frame of command.py. May use arl.experiment, arl.assembly,
arl.serving and arl.rollout; must not import an engine or the trainer.
"""
