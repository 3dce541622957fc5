"""Bad request settings are refused where the request is parsed: a ValueError offline, an HTTP 400 from the server.

The one place of vLLM that is wrapped, and only in a process where vToken is on.
"""

import functools
from typing import Any

from vtoken.config import VTokenConfig
from vtoken_torch.vllm_plugin.options import request_config

__all__ = ["check_requests"]

_PLACEHOLDER = VTokenConfig(policy="streaming_llm", kv_budget=1)
_default = _PLACEHOLDER


def check_requests(default: VTokenConfig | None = None) -> None:
    """From now on ``SamplingParams`` with bad vtoken settings raise. Re-entrant; the newest ``default`` counts.

    Args:
        default: the engine's configuration, which a request's changes must fit; None if this process knows none.
    """
    from vllm.sampling_params import SamplingParams

    global _default
    _default = default or _default
    verify = SamplingParams._verify_extra_args
    if hasattr(verify, "vtoken"):
        return

    @functools.wraps(verify)
    def verify_with_vtoken(self: Any) -> None:
        verify(self)
        request_config(self.extra_args, _default)

    verify_with_vtoken.vtoken = True  # type: ignore[attr-defined]
    SamplingParams._verify_extra_args = verify_with_vtoken
