"""vToken inside vLLM: evicts tokens and gives their blocks back to vLLM's own pool. Needs the extra ``vllm[-cpu]``.

vLLM calls ``register`` in each of its processes (entry-point group ``vllm.general_plugins``). It does nothing unless
``VTOKEN_VLLM=1``: an engine is switched on by its scheduler class, worker class and ``additional_config``.
"""

import os

__all__ = ["ENABLE", "register"]

ENABLE = "VTOKEN_VLLM"
"""Environment variable by which a process of the API server learns that its engines use vToken."""


def register() -> None:
    """Entry point. Re-entrant; inert, with no import of vLLM or torch, unless the variable is set."""
    if os.environ.get(ENABLE, "0") in ("", "0"):
        return
    from vtoken_torch.vllm_plugin.compat import check_vllm
    from vtoken_torch.vllm_plugin.metrics.exposition import expose_engines
    from vtoken_torch.vllm_plugin.validation import check_requests

    check_vllm()
    check_requests()
    expose_engines()
