"""vLLM's GPU worker with an evicting model runner. It has not run on a GPU: ``unproven_device`` must be set.

Importing it needs no GPU and touches none.
"""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from vtoken_torch.vllm_plugin.compat import check_start
from vtoken_torch.vllm_plugin.conversion import evicting

__all__ = ["VTokenGPUWorker"]


class VTokenGPUWorker(Worker):
    """Set as ``worker_cls``, together with the scheduler class."""

    def init_device(self) -> None:
        """Refuses what cannot work before the device is taken. From here on ``CUSTOM`` names our attention backend."""
        check_start(self.vllm_config)
        from vtoken_torch.vllm_plugin.mass.backend import register_custom  # needs Triton

        register_custom()
        super().init_device()

    def _make_model_runner(self) -> Any:
        """vLLM's runner, converted."""
        runner = super()._make_model_runner()
        evicting(runner)
        return runner
