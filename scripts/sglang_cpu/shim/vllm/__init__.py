"""A stand-in for the one vLLM kernel that SGLang borrows on CPUs without AMX: rotary embedding."""
