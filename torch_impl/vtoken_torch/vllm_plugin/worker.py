"""vLLM's CPU worker with an evicting model runner. A GPU's is in ``worker_gpu.py``, since vLLM's CPU worker patches
``torch.cuda`` where it is imported.
"""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vtoken_torch.vllm_plugin.compat import check_start
from vtoken_torch.vllm_plugin.conversion import evicting

__all__ = ["VTokenCPUWorker"]


class VTokenCPUWorker(CPUWorker):
    """Set as ``worker_cls``, together with the scheduler class."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """Refuses another device before vLLM looks for the CPU's operators."""
        if vllm_config.device_config.device_type != "cpu":
            check_start(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        """Refuses what cannot work before the model is loaded."""
        check_start(self.vllm_config)
        super().init_device()
        evicting(self.model_runner)
