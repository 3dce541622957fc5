"""Triton kernels: decode attention, token move, fingerprint. Each ends with its plain reference; each has AOT cases."""

from importlib.util import find_spec

if find_spec("triton") is None:
    raise ModuleNotFoundError(
        f"{__name__} needs triton, which PyTorch's builds for CPUs leave out: pip install triton", name="triton"
    )
