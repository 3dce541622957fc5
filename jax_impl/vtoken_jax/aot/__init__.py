"""Compiles kernels and whole steps for an H100 that is not there, and judges the machine code: ``make aot-jax``."""
