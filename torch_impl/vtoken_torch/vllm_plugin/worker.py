"""vLLM's CPU worker with an evicting model runner."""

from vllm.v1.worker.cpu_worker import CPUWorker

from vtoken_torch.vllm_plugin.compat import check_vllm, config_refusals, raise_all
from vtoken_torch.vllm_plugin.runner_v1 import evicting

__all__ = ["VTokenCPUWorker"]


class VTokenCPUWorker(CPUWorker):
    """Set as ``worker_cls``, together with the scheduler class."""

    def init_device(self) -> None:
        """Refuses what cannot work before the model is loaded."""
        check_vllm()
        raise_all(config_refusals(self.vllm_config))
        super().init_device()
        evicting(self.model_runner)
