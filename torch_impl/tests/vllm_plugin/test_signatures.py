"""What the plugin touches of vLLM is listed, and what this vLLM lacks of it is named."""

import importlib
import inspect
import pkgutil

import pytest


def test_a_private_method_that_changed_is_named(monkeypatch):
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vtoken_torch.vllm_plugin.compat import check_vllm

    monkeypatch.setattr(FullAttentionManager, "allocate_new_blocks", lambda self, request_id, num_slots: None)
    monkeypatch.delattr(GPUModelRunner, "_prepare_inputs")
    monkeypatch.setattr(GPUModelRunnerV2, "prepare_attn", lambda self, batch: None)
    with pytest.raises(RuntimeError) as caught:
        check_vllm()
    assert "FullAttentionManager.allocate_new_blocks lost num_tokens, num_tokens_main_model" in str(caught.value)
    assert "GPUModelRunner._prepare_inputs is gone" in str(caught.value)
    assert "GPUModelRunner.prepare_attn lost input_batch" in str(caught.value)


def test_every_method_of_vllm_that_is_overridden_is_listed():
    from vtoken_torch.vllm_plugin.touched import METHODS

    listed = {(_class_at(where), name) for where, methods in METHODS.items() for name, _ in methods}
    overrides = {
        (owner, name)
        for owner in _classes()
        for part in owner.__mro__
        if part.__module__.startswith("vtoken_torch.")
        for name, value in vars(part).items()
        if inspect.isfunction(value) and not name.startswith("__") and any(name in vars(base) for base in _vllms(owner))
    }
    found = {f"{owner.__name__}.{name}" for owner, name in overrides}
    assert found >= {
        *("VTokenScheduler.schedule", "VTokenScheduler.shutdown", "VTokenCPUWorker.init_device"),
        *("EvictableSpec.max_memory_usage_bytes", "EvictingManager.cache_blocks", "ReportingRunnerV1.execute_model"),
        *("EvictingRunnerV2.get_kv_cache_spec", "_PackedTable.compute_slot_mapping", "CountingLive.prepare_attn"),
        "MassAttentionImpl.forward",
    }
    unlisted = [
        f"{owner.__name__}.{name}"
        for owner, name in overrides
        if not any((base, name) in listed for base in _vllms(owner))
    ]
    assert unlisted == []


def _classes():
    """The plugin's classes that derive from vLLM's."""
    from vllm.v1.worker.gpu.model_states.interface import ModelState

    from vtoken_torch import vllm_plugin
    from vtoken_torch.vllm_plugin.runner_v2 import _counting_live

    names = [module.name for module in pkgutil.walk_packages(vllm_plugin.__path__, f"{vllm_plugin.__name__}.")]
    found = {each for name in names for each in vars(importlib.import_module(name)).values() if inspect.isclass(each)}
    found.add(_counting_live(ModelState, None))
    return [each for each in found if each.__module__.startswith("vtoken_torch.") and _vllms(each)]


def _vllms(owner):
    return [base for base in owner.__mro__ if base.__module__.startswith("vllm.")]


def _class_at(where):
    module, name = where.split(":")
    return getattr(importlib.import_module(module), name)


def test_an_attribute_or_a_class_that_is_gone_is_named(monkeypatch):
    from vtoken_torch.vllm_plugin import touched
    from vtoken_torch.vllm_plugin.signatures import changes

    assert changes() == []
    for where, name in (("v1.core.block_pool:BlockPool", "bloks"), ("v1.core.sched.output:SchedulerOutput", "new_ids")):
        monkeypatch.setitem(touched.ATTRIBUTES, f"vllm.{where}", (name,))
    monkeypatch.setitem(touched.METHODS, "vllm.v1.core.block_pool:Pool", (("touch", ()),))
    assert sorted(changes()) == [
        "BlockPool.bloks is gone",
        "SchedulerOutput.new_ids is gone",
        "vllm.v1.core.block_pool:Pool is gone",
    ]
