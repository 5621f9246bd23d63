"""Renders the growing history of a dialogue for the cost of what is new."""
