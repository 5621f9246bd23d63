"""Losses of trained tokens: pure, picklable functions of one microbatch, which never divide by a count."""
