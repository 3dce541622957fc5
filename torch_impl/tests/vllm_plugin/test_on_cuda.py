"""CUDA, as far as it goes without a GPU: what is refused, and the worker that vLLM would start."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from vllm_plain_config import plain_config

H2O = {"policy": "h2o", "kv_budget": 64, "unproven_device": True}


def on_cuda(settings, mode="PIECEWISE", **changes):
    from vllm.config import CUDAGraphMode

    from vtoken_torch.vllm_plugin.compat import GPU_WORKER

    changes = {
        "additional_config": {"vtoken": settings},
        "device_config__device_type": "cuda",
        "parallel_config__worker_cls": GPU_WORKER,
        "compilation_config": SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode]),
        **changes,
    }
    return plain_config(**changes)


def test_cuda_starts_only_if_it_is_said_that_it_is_unproven():
    from vtoken_torch.vllm_plugin.compat import WORKER, config_refusals

    assert config_refusals(on_cuda(H2O)) == []
    assert config_refusals(on_cuda({**H2O, "copy_stream": "own", "signal_source": "score_pass"})) == []
    (reason,) = config_refusals(on_cuda({"policy": "random", "kv_budget": 64}))
    assert reason == (
        "device cuda, on which nothing of the plugin has run: use the CPU, or set unproven_device=true to try it"
    )
    (reason,) = config_refusals(on_cuda(H2O, parallel_config__worker_cls=WORKER))
    assert "set worker_cls='vtoken_torch.vllm_plugin.worker_gpu.VTokenGPUWorker'" in reason
    on_the_cpu = plain_config(additional_config={"vtoken": H2O})
    assert config_refusals(on_the_cpu) == []
    on_the_cpu.parallel_config.worker_cls = on_cuda(H2O).parallel_config.worker_cls
    (reason,) = config_refusals(on_the_cpu)
    assert "set worker_cls='vtoken_torch.vllm_plugin.worker.VTokenCPUWorker'" in reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"verify": True}, "verify=true on cuda, unproven there: leave it out"),
        ({"mode": "lazy"}, "mode='lazy' on cuda"),
    ],
)
def test_settings_that_wait_for_a_gpu_are_refused(changes, words):
    from vtoken_torch.vllm_plugin.compat import config_refusals

    (reason,) = config_refusals(on_cuda({**H2O, **changes}))
    assert words in reason


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_full_graphs_are_refused_beside_mass_for_the_engine_and_for_one_request(mode):
    from vtoken.config import VTokenConfig
    from vtoken_torch.vllm_plugin.capacity import Capacity
    from vtoken_torch.vllm_plugin.compat import config_refusals
    from vtoken_torch.vllm_plugin.on_cuda import mass_refusal

    (reason,) = config_refusals(on_cuda(H2O, mode))
    assert f"full CUDA graphs (cudagraph_mode={mode})" in reason
    assert "set cudagraph_mode to PIECEWISE" in reason
    config = on_cuda({**H2O, "policy": "streaming_llm"}, mode)
    assert config_refusals(config) == []
    capacity = Capacity(VTokenConfig(policy="none"), 32, 8, 512, 2000, mass_refusal=mass_refusal(config))
    assert "policy='tova': full CUDA graphs" in capacity.policy_refusal(VTokenConfig(policy="tova", kv_budget=9))
    assert capacity.policy_refusal(VTokenConfig(policy="random", kv_budget=9)) is None
    assert mass_refusal(on_cuda(H2O)) is None
    assert mass_refusal(plain_config()) is None


def test_other_attention_backends_are_refused():
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    from vtoken_torch.vllm_plugin.on_cuda import backend_refusals

    layers = [SimpleNamespace(impl=owner.__new__(owner)) for owner in (FlashAttentionImpl, TritonAttentionImpl)]
    assert backend_refusals(layers) == []
    other = SimpleNamespace(impl=type("FlashInferImpl", (), {})())
    assert backend_refusals([*layers, other]) == [
        "attention by FlashInferImpl, unproven here: use attention backend FLASH_ATTN, TRITON_ATTN or CUSTOM"
    ]


def test_workers_refuse_before_they_take_a_device(monkeypatch):
    from vllm.v1.worker.gpu_worker import Worker

    from vtoken_torch.vllm_plugin.compat import WORKER
    from vtoken_torch.vllm_plugin.worker import VTokenCPUWorker
    from vtoken_torch.vllm_plugin.worker_gpu import VTokenGPUWorker

    taken = []
    monkeypatch.setattr(Worker, "init_device", lambda self: taken.append(self))
    worker = VTokenGPUWorker.__new__(VTokenGPUWorker)
    worker.vllm_config = on_cuda({"policy": "random", "kv_budget": 64})
    with pytest.raises(ValueError, match="device cuda, on which nothing of the plugin has run"):
        worker.init_device()
    assert not taken
    worker.vllm_config = on_cuda(H2O)
    worker.init_device()
    assert taken == [worker]
    with pytest.raises(ValueError, match=r"set worker_cls=.*VTokenGPUWorker"):
        VTokenCPUWorker(on_cuda(H2O, parallel_config__worker_cls=WORKER), 0, 0, "")


@pytest.mark.parametrize("is_v2", [False, True], ids=["V1", "V2"])
def test_the_gpu_worker_converts_the_runner_that_vllm_makes(monkeypatch, is_v2):
    import torch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1
    from vllm.v1.worker.gpu_worker import Worker

    from vtoken_torch.vllm_plugin.runner import EvictingRunner
    from vtoken_torch.vllm_plugin.worker_gpu import VTokenGPUWorker

    owner = RunnerV2 if is_v2 else RunnerV1
    runner = owner.__new__(owner)
    runner.vllm_config = SimpleNamespace(**vars(on_cuda(H2O)), max_concurrent_batches=2)
    runner.device, runner.max_num_reqs, runner.max_num_tokens = torch.device("cpu"), 4, 64
    runner.input_buffers = SimpleNamespace(seq_lens=torch.zeros(4, dtype=torch.int32))
    monkeypatch.setattr(Worker, "_make_model_runner", lambda self: runner)
    made = VTokenGPUWorker.__new__(VTokenGPUWorker)._make_model_runner()
    assert made is runner
    assert isinstance(made, EvictingRunner)
    assert [type(part).__name__ for part in made.vtoken.parts] == ["MassKeeper"]


@pytest.fixture
def custom_backend():
    """``CUSTOM`` as the GPU worker registers it; the process has none afterwards."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vtoken_torch.vllm_plugin.mass.backend import register_custom

    register_custom()
    yield AttentionBackendEnum.CUSTOM
    AttentionBackendEnum.CUSTOM.clear_override()


def test_vllm_resolves_custom_to_our_backend_on_a_card(custom_backend, monkeypatch):
    import torch
    from vllm.config.attention import AttentionConfig

    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("stands for the GPU wheel's operators"))
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from vtoken_torch.vllm_plugin.mass.backend import VTokenAttentionBackend
    from vtoken_torch.vllm_plugin.on_cuda import backend_refusals

    chosen = AttentionConfig(backend="CUSTOM").backend
    assert chosen is custom_backend
    capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    monkeypatch.setattr(CudaPlatformBase, "get_device_capability", capability)
    case = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}
    path = CudaPlatformBase.get_attn_backend_cls(chosen, AttentionSelectorConfig(**case))
    assert resolve_obj_by_qualname(path) is VTokenAttentionBackend
    assert type(custom_backend)[VTokenAttentionBackend.get_name()] is custom_backend  # as a layer looks itself up
    impl = VTokenAttentionBackend.get_impl_cls()(32, 128, 0.1, 8, None, None, "auto")
    assert isinstance(impl, TritonAttentionImpl)
    assert backend_refusals([SimpleNamespace(impl=impl)]) == []
    with pytest.raises(ValueError, match="Selected backend"):
        CudaPlatformBase.get_attn_backend_cls(chosen, AttentionSelectorConfig(**case, use_mla=True))


def test_layers_of_our_backend_keep_their_class_and_are_vllms_until_somebody_watches(monkeypatch):
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    from vtoken_torch.vllm_plugin.mass.attention_device import DeviceAttention
    from vtoken_torch.vllm_plugin.mass.backend import VTokenTritonAttentionImpl

    served, added = [], []
    monkeypatch.setattr(TritonAttentionImpl, "forward", lambda self, *args: served.append(self) or args[6])
    impl = VTokenTritonAttentionImpl.__new__(VTokenTritonAttentionImpl)
    impl.__dict__ |= {"logits_soft_cap": 0, "sinks": None, "head_size": 64}
    step = (None, None, None, None, None, SimpleNamespace(num_actual_tokens=3), "output")
    assert impl.forward(*step) == "output"
    collector = SimpleNamespace(num_asks=0, add=lambda *args: added.append(args))
    DeviceAttention(replaces=True).watch([SimpleNamespace(impl=impl)], collector)
    assert type(impl) is VTokenTritonAttentionImpl
    impl.forward(*step)
    assert (len(served), len(added)) == (2, 0)
    collector.num_asks = 2  # of three rows: the third is vLLM's
    impl.forward(*step)
    assert (len(served), len(added)) == (3, 1)
    collector.num_asks = 3
    impl.forward(*step)
    assert (len(served), len(added)) == (3, 2)


def test_the_gpu_worker_registers_our_backend(monkeypatch):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.worker.gpu_worker import Worker

    from vtoken_torch.vllm_plugin.worker_gpu import VTokenGPUWorker

    monkeypatch.setattr(Worker, "init_device", lambda self: None)
    worker = VTokenGPUWorker.__new__(VTokenGPUWorker)
    worker.vllm_config = on_cuda(H2O)
    try:
        worker.init_device()
        assert AttentionBackendEnum.CUSTOM.get_class().get_name() == "CUSTOM"
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()
