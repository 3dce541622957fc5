"""Room for Triton kernels: decode attention, token move, fingerprint. Each file ends with its plain reference."""
