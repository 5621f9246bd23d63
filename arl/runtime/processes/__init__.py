"""Other processes: `actor` holds an object in one, `rpc` carries it there, and its calls and errors.

`parent_watch` ends a process with the one that started it; `logs` keeps what a process writes, and says how it ended.
"""
