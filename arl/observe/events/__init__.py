"""The event log of a run: EventLog writes run_dir/events, read_run reads it."""
