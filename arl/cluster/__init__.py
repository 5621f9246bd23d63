"""Runs on several machines: what runs where, and whether it can work there."""
