"""Attention over a paged pool: decode in three ways behind one function, and prefill of a chunk over paged history."""
