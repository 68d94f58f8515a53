"""Checkpoints of training runs and of training loops."""
