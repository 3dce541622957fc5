"""What is refused at start: each alone, and all of it in one message."""

from types import SimpleNamespace

import pytest


def _config(**changes):
    """The parts of a VllmConfig that the checks read, in a shape that works."""
    from vtoken_torch.vllm_plugin.compat import SCHEDULER, WORKER

    parts = {
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "enable_dbo": False,
            "worker_cls": WORKER,
        },
        "cache_config": {"kv_sharing_fast_prefill": False},
        "scheduler_config": {"async_scheduling": False, "scheduler_cls": SCHEDULER},
        "model_config": {"is_encoder_decoder": False, "uses_alibi": False, "runner_type": "generate"},
        "device_config": {"device_type": "cpu"},
    }
    whole = {
        "kv_transfer_config": None,
        "ec_transfer_config": None,
        "kv_events_config": None,
        "speculative_config": None,
    }
    whole["use_v2_model_runner"] = False
    whole["additional_config"] = {"vtoken": {"policy": "streaming_llm", "kv_budget": 64}}
    for path, value in changes.items():
        part, _, key = path.rpartition("__")
        (parts[part] if part else whole)[key] = value
    return SimpleNamespace(**whole, **{name: SimpleNamespace(**part) for name, part in parts.items()})


BAD = {
    "parallel_config__pipeline_parallel_size": (2, "pipeline parallelism"),
    "parallel_config__decode_context_parallel_size": (2, "decode context parallelism"),
    "parallel_config__prefill_context_parallel_size": (2, "prefill context parallelism"),
    "parallel_config__enable_dbo": (True, "dual batch overlap"),
    "parallel_config__worker_cls": ("vllm.v1.worker.cpu_worker.CPUWorker", "set worker_cls="),
    "scheduler_config__scheduler_cls": (None, "set scheduler_cls="),
    "scheduler_config__async_scheduling": (True, "asynchronous scheduling"),
    "cache_config__kv_sharing_fast_prefill": (True, "kv_sharing_fast_prefill"),
    "model_config__is_encoder_decoder": (True, "encoder-decoder models"),
    "model_config__uses_alibi": (True, "ALiBi"),
    "model_config__runner_type": ("pooling", "pooling models"),
    "device_config__device_type": ("cuda", "device cuda"),
    "kv_transfer_config": (SimpleNamespace(), "KV connectors"),
    "kv_events_config": (SimpleNamespace(enable_kv_cache_events=True), "KV events"),
    "speculative_config": (SimpleNamespace(), "speculative decoding"),
    "use_v2_model_runner": (True, "model runner V2"),
    "additional_config": ({"vtoken": {"policy": "h2o", "kv_budget": 64}}, "needs attention_mass"),
}


def test_a_plain_engine_is_not_refused():
    from vtoken_torch.vllm_plugin.compat import config_refusals

    assert config_refusals(_config()) == []


@pytest.mark.parametrize("path", BAD)
def test_each_setting_is_refused_alone(path):
    from vtoken_torch.vllm_plugin.compat import config_refusals

    value, words = BAD[path]
    (reason,) = config_refusals(_config(**{path: value}))
    assert words in reason


def test_one_message_names_all_reasons():
    from vtoken_torch.vllm_plugin.compat import config_refusals, raise_all

    with pytest.raises(ValueError, match="vToken cannot run with") as caught:
        raise_all(config_refusals(_config(**{path: value for path, (value, _) in BAD.items()})))
    assert all(words in str(caught.value) for _, words in BAD.values())


def test_layers_without_token_wise_kv_are_refused():
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    from vtoken_torch.vllm_plugin.compat import layer_refusals

    shape = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    full = FullAttentionSpec(**shape)
    assert layer_refusals({"a": full, "b": full}, {}) == []
    cases = {
        "MLAAttentionSpec": MLAAttentionSpec(**{**shape, "num_kv_heads": 1}),
        "SlidingWindowSpec": SlidingWindowSpec(**shape, sliding_window=64),
        "sliding-window or chunked-local": FullAttentionSpec(**shape, sliding_window=64),
        "chunked-local": FullAttentionSpec(**shape, attention_chunk_size=64),
        "quantized KV": FullAttentionSpec(**{**shape, "dtype": torch.float8_e4m3fn}),
        "hybrid models": FullAttentionSpec(**{**shape, "head_size": 64}),
    }
    for words, spec in cases.items():
        assert any(words in reason for reason in layer_refusals({"a": full, "b": spec}, {})), words
    layers = {"a": SimpleNamespace(impl=SimpleNamespace(alibi_slopes=[1.0]))}
    assert "ALiBi (first: a)" in layer_refusals({"a": full}, layers)[0]


def test_another_vllm_is_refused_by_name(monkeypatch):
    import vllm

    from vtoken_torch.vllm_plugin.compat import check_vllm

    check_vllm()
    for version in ("0.31.2", "0.33.0", "0.320.1", "1.0"):
        monkeypatch.setattr(vllm, "__version__", version)
        with pytest.raises(RuntimeError, match=r"works with vLLM 0\.32\.x, this is " + version):
            check_vllm()


def test_a_private_method_that_changed_is_named(monkeypatch):
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vtoken_torch.vllm_plugin.compat import check_vllm

    monkeypatch.setattr(FullAttentionManager, "allocate_new_blocks", lambda self, request_id, num_slots: None)
    monkeypatch.delattr(GPUModelRunner, "_prepare_inputs")
    with pytest.raises(RuntimeError) as caught:
        check_vllm()
    assert "FullAttentionManager.allocate_new_blocks lost num_tokens, num_tokens_main_model" in str(caught.value)
    assert "GPUModelRunner._prepare_inputs is gone" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"worker_cls": "auto"}, "set worker_cls="),
        ({"scheduler_cls": None}, "set scheduler_cls="),
        ({"additional_config": {}}, "no settings: give additional_config"),
        ({"additional_config": {"vtoken": {"policy": "h2o", "kv_budget": 9}}}, "needs attention_mass"),
    ],
)
def test_a_real_engine_refuses_to_start_half_enabled(world, settings, words):
    from vtoken_torch.vllm_plugin.compat import SCHEDULER, WORKER

    enabled = {
        "scheduler_cls": SCHEDULER,
        "worker_cls": WORKER,
        "additional_config": {"vtoken": {"policy": "streaming_llm", "kv_budget": 64}},
    }
    with pytest.raises(ValueError, match=words):
        world(None, **{**enabled, **settings})
