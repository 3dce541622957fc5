"""What vLLM's two model runners have in common once they evict."""

import copy
from typing import Any, ClassVar

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.core.sched.output import SchedulerOutput

from vtoken_torch.vllm_plugin.compat import config_refusals, layer_refusals, raise_all
from vtoken_torch.vllm_plugin.kv_spec import EvictableSpec
from vtoken_torch.vllm_plugin.on_cuda import backend_refusals
from vtoken_torch.vllm_plugin.rows import StepRows
from vtoken_torch.vllm_plugin.worker_side import WorkerSide

__all__ = ["EvictingRunner", "ReportingRunner"]


class EvictingRunner:
    """Stands in front of the class of a runner that vLLM built (its CPU worker builds it in line, with no hook).

    A subclass may have three faces, so that an override runs only where it has something to do: for steps like vLLM's
    own, for those of requests with dead tokens, and for those in which a part of the worker's side acts.
    """

    vllm_config: Any
    max_num_reqs: int
    vtoken: WorkerSide
    rows: StepRows
    faces: ClassVar["tuple[type[EvictingRunner], ...]"] = ()
    _faces: tuple[type, ...]

    @classmethod
    def convert(cls, runner: Any) -> None:
        """Makes ``runner`` an evicting one."""
        owner = type(runner)
        faces = cls.faces or (cls,) * 3
        runner._faces = tuple(type(f"VToken{each.__name__}", (each, owner), {}) for each in faces)
        runner.__class__ = runner._faces[-1]
        runner.vtoken = WorkerSide(runner)
        num_steps = runner.vllm_config.max_concurrent_batches
        runner.rows = StepRows.on(runner.device, runner.max_num_reqs, runner.max_num_tokens, num_steps)

    @property
    def hooked(self) -> list[Any]:
        """Objects with overrides of ours: where clocks of what the plugin adds belong."""
        return [self]

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """The model's specs under our type, so that blocks are counted by our manager; refuses what cannot work."""
        specs = super().get_kv_cache_spec()  # type: ignore[misc]  # of vLLM's runner, next in line
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        found = [*config_refusals(self.vllm_config), *layer_refusals(specs, layers)]
        if self.vllm_config.device_config.device_type != "cpu":
            found += backend_refusals(layers.values())
        raise_all(found)
        return {name: EvictableSpec.wrap(spec) for name, spec in specs.items()}

    def show_face(self) -> None:
        """The one for the step whose record is carried out."""
        face = self._faces[2 if self.vtoken.acts else self.vtoken.any_evicted]
        if type(self) is not face:
            self.__class__ = face


class ReportingRunner(EvictingRunner):
    """Tells the parts of every step."""

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; a step without tokens is over with it, and the parts report on it here."""
        result = super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]  # vLLM's
        if scheduler_output.total_num_scheduled_tokens or not self.vtoken.reports:
            return result
        result = copy.copy(result)  # vLLM gives one constant for all such steps
        self.vtoken.end_step([], result)
        return result
