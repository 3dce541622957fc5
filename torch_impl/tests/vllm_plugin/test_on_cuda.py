"""CUDA, as far as it goes without a GPU: what is refused, and the worker that vLLM would start."""

from types import SimpleNamespace

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
        "attention by FlashInferImpl, unproven here: use attention backend FLASH_ATTN or TRITON_ATTN"
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
    assert [type(part).__name__ for part in made.vtoken.parts] == ["MassCollector"]
