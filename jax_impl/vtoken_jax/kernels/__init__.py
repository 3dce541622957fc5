"""Attention over a paged pool: one file for each way to compute it, all with the signature of ``decode_xla``."""
