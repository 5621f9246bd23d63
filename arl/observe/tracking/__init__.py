"""Experiment trackers: what sends a run to trackio, Weights & Biases, TensorBoard, MLflow, or a user's own class."""
