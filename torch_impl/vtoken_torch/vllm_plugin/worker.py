"""vLLM's workers with an evicting model runner.

The CPU's is here. A GPU's would derive from ``gpu_worker.Worker`` and convert what ``_make_model_runner`` returns; both
runners are device-free already, and the token mover and copy streams of a GPU exist (``device_layout.py``).
"""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vtoken_torch.vllm_plugin.compat import check_vllm, config_refusals, raise_all
from vtoken_torch.vllm_plugin.runner_v1 import EvictingRunnerV1
from vtoken_torch.vllm_plugin.runner_v2 import EvictingRunnerV2

__all__ = ["VTokenCPUWorker", "evicting"]


class VTokenCPUWorker(CPUWorker):
    """Set as ``worker_cls``, together with the scheduler class."""

    def init_device(self) -> None:
        """Refuses what cannot work before the model is loaded."""
        check_vllm()
        raise_all(config_refusals(self.vllm_config))
        super().init_device()
        evicting(self.model_runner)


def evicting(runner: Any) -> None:
    """Makes a runner that vLLM built, of either kind, an evicting one."""
    kind = EvictingRunnerV1 if isinstance(runner, GPUModelRunner) else EvictingRunnerV2
    kind.convert(runner)
