"""Verification mode: INV-1 to INV-8 online. A request that breaks one ends with an error; the server never does."""
