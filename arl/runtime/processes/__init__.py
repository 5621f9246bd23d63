"""Other processes: `actor` holds an object in one, `rpc` carries calls and errors, `pickled_object` what is sent to it.

`parent_watch` ends a process with the one that started it; `logs` keeps what a process writes, and says how it ended.
"""
