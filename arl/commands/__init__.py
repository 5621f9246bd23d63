"""What `arl try` and `arl eval` do: episodes of a script's experiment, without training."""
