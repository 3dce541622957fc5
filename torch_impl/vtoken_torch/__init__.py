"""The PyTorch executor: KV tensors, copy engines. Needs the extra ``torch``."""

from vtoken.plugins import require_extra

require_extra(__name__, "torch", "torch", "numpy")
