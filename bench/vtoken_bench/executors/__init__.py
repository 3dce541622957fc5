"""The JAX and the PyTorch executor side by side, on the same programs and on the same model."""
