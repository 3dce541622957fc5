"""Makes a model runner that vLLM built, of either kind, an evicting one."""

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vtoken_torch.vllm_plugin.runner_v1 import EvictingRunnerV1
from vtoken_torch.vllm_plugin.runner_v2 import EvictingRunnerV2

__all__ = ["evicting"]


def evicting(runner: Any) -> None:
    """Converts ``runner`` in place."""
    kind = EvictingRunnerV1 if isinstance(runner, GPUModelRunner) else EvictingRunnerV2
    kind.convert(runner)
