"""Looking at runs, live or ended: an HTTP server with a page and a JSON API over their event logs, and other ways.

    browser  --> view_server --------> ViewedRun, a thread each --> RunRecord --> run_dir
    terminal --> top --------------->    EpisodeTable, TextSearch, health
    notebook --> showing ------------> RunRecord, trajectories

It reads run_dir and writes nothing. Import its modules; the package itself loads nothing.
"""
