"""What `arl view` shows of runs, live or ended: an HTTP server with a page and a JSON API over their event logs.

    browser --> view_server --> ViewedRun, a thread each --> RunRecord --> run_dir
                                  EpisodeTable, TextSearch, details, timeline, health

It reads run_dir and writes nothing. Import its modules; the package itself loads nothing.
"""
