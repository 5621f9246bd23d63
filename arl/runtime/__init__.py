"""Processes, HTTP, threads, clocks, the console and signals, as all wings use them.

    http/        a client, a server, request bodies
    processes/   an object in a process of its own, its calls, its logs, the watch over a parent
    threads, clocks, stopping, console, notebook, lazy_names

It imports arl.api alone, and knows none of arl's protocols. Import its modules; the package itself loads nothing.
"""
