"""A stand-in for vLLM's configuration, as far as the refusals read it."""

from types import SimpleNamespace


def plain_config(**changes):
    """The parts of a VllmConfig that the checks read, in a shape that works."""
    from vtoken_torch.vllm_plugin.compat import SCHEDULER, WORKER

    parts = {
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "tensor_parallel_size": 1,
            "enable_dbo": False,
            "worker_cls": WORKER,
        },
        "cache_config": {"kv_sharing_fast_prefill": False, "enable_prefix_caching": True},
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
