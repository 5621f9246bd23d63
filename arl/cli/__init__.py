"""The commands: `arl try`, `arl eval`, `arl doctor`, `arl view` and the others; arl/__main__.py has the table.

Each module has a `main`. command.py is the frame of commands that run a script's experiment, episodes.py the stage of
those that run its episodes. May import any wing below; no wing imports this one.
"""
