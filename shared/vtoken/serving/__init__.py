"""Continuous batching over the spec's scheduler side, for any framework's model."""
