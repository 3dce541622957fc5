"""What of vLLM's inside the plugin overrides, calls and reads; ``signatures.py`` looks whether this vLLM still has it.

``METHODS`` holds every method that a class of ours overrides (a test walks them) or wraps, and those called on vLLM's
scheduler, block pool, requests and runners. Functions and classes are imported by name, and fail there if they go.
``ATTRIBUTES`` holds what is read or written of vLLM's objects, as far as a class shows what its instances have: names
in the class, annotated, or assigned in ``__init__``. What it cannot show stands in docs/vllm.md.
"""

__all__ = ["ATTRIBUTES", "METHODS"]

_CORE, _WORKER = "vllm.v1.core", "vllm.v1.worker"

_ON_GPU = ("flash_attn:FlashAttention", "triton_attn:TritonAttention")  # the backends that are served there

METHODS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    f"{_CORE}.single_type_kv_cache_manager:FullAttentionManager": (
        (
            "get_num_blocks_to_allocate",
            (
                "request_id",
                "num_tokens",
                "new_computed_blocks",
                "total_computed_tokens",
                "num_local_computed_tokens",
                "num_tokens_main_model",
                "apply_admission_cap",
                "prefill_end",
            ),
        ),
        ("allocate_new_blocks", ("request_id", "num_tokens", "num_tokens_main_model")),
        ("cache_blocks", ("request", "num_tokens", "retention_interval", "replay_boundaries")),
        ("pop_blocks_for_free", ("request_id",)),
    ),
    f"{_CORE}.block_pool:BlockPool": (
        ("touch", ("blocks",)),
        ("free_blocks", ("ordered_blocks",)),
        ("evict_blocks", ("block_ids",)),
        ("get_new_blocks", ("num_blocks",)),
        ("get_num_free_blocks", ()),
    ),
    f"{_CORE}.kv_cache_utils:FreeKVCacheBlockQueue": (
        ("get_all_free_blocks", ()),
        ("remove", ("block",)),
    ),
    f"{_CORE}.kv_cache_manager:KVCacheManager": (
        ("get_computed_blocks", ("request",)),
        ("truncate_computed_blocks", ("blocks", "num_computed_tokens")),
    ),
    f"{_CORE}.sched.scheduler:Scheduler": (
        ("__init__", ("vllm_config",)),
        ("schedule", ("throttle_prefills",)),
        ("add_request", ("request",)),
        ("update_from_output", ("scheduler_output", "model_runner_output")),
        ("finish_requests", ("request_ids", "finished_status")),
        ("get_request_counts", ()),
        ("shutdown", ()),
        ("_free_request_blocks", ("request",)),
        ("_request_blocks_can_be_freed", ("request",)),
        ("_get_local_prefix_cache_hit", ("request",)),
        ("_reserve_prefill_lookahead", ("request", "num_computed_tokens", "num_new_tokens")),
    ),
    f"{_CORE}.sched.request_queue:RequestQueue": (("peek_request", ()),),
    "vllm.v1.request:Request": (
        ("is_finished", ()),
        ("get_finished_reason", ()),
        ("take_events", ()),
    ),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": (("max_memory_usage_bytes", ("vllm_config",)),),
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry": (("_ensure_registered", ()),),
    f"{_WORKER}.cpu_worker:CPUWorker": (("init_device", ()),),
    f"{_WORKER}.gpu_worker:Worker": (("init_device", ()), ("_make_model_runner", ())),
    f"{_WORKER}.gpu_model_runner:GPUModelRunner": (
        ("get_kv_cache_spec", ()),
        ("_update_states", ("scheduler_output",)),
        ("_prepare_inputs", ("scheduler_output", "num_scheduled_tokens")),
        ("execute_model", ("scheduler_output",)),
        ("sample_tokens", ()),
    ),
    f"{_WORKER}.gpu.model_runner:GPUModelRunner": (
        ("get_kv_cache_spec", ()),
        ("load_model", ()),
        ("execute_model", ("scheduler_output",)),
        ("update_requests", ("scheduler_output",)),
        ("prepare_attn", ("input_batch",)),
        ("sample_tokens", ()),
    ),
    f"{_WORKER}.gpu.model_states.interface:ModelState": (("prepare_attn", ("input_batch",)),),
    f"{_WORKER}.gpu.block_table:BlockTables": (("append_block_ids", ("req_index", "new_block_ids", "overwrite")),),
    f"{_WORKER}.gpu.buffer_utils:UvaBufferPool": (("copy_to_uva", ("x",)),),
    f"{_WORKER}.block_table:MultiGroupBlockTable": (
        ("add_row", ("block_ids", "row_idx")),
        ("compute_slot_mapping", ("num_reqs", "query_start_loc", "positions")),
    ),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl": (
        ("forward", ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")),
    ),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadata": (
        ("__init__", ("query_start_loc", "seq_lens", "block_table", "scheduler_metadata")),
    ),
    **{
        f"vllm.v1.attention.backends.{where}Impl": (
            ("forward", ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")),
        )
        for where in _ON_GPU
    },
    "vllm.sampling_params:SamplingParams": (("_verify_extra_args", ()),),
    "vllm.v1.engine.input_processor:InputProcessor": (
        ("__init__", ("vllm_config",)),
        ("process_inputs", ("request_id", "prompt", "params")),
    ),
    "vllm.v1.engine.async_llm:AsyncLLM": (("generate", ("prompt", "sampling_params", "request_id")),),
}

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    f"{_CORE}.single_type_kv_cache_manager:FullAttentionManager": (
        "block_pool",
        "block_size",
        "num_cached_block",
        "req_to_blocks",
        "_partial_hit_reqs",
    ),
    f"{_CORE}.block_pool:BlockPool": ("blocks", "free_block_queue", "hash_block_size", "num_gpu_blocks"),
    f"{_CORE}.kv_cache_utils:FreeKVCacheBlockQueue": ("fake_free_list_head",),
    f"{_CORE}.kv_cache_utils:KVCacheBlock": ("block_hash", "block_id", "is_null", "next_free_block", "ref_cnt"),
    f"{_CORE}.kv_cache_manager:KVCacheBlocks": ("blocks",),
    f"{_CORE}.kv_cache_manager:KVCacheManager": ("block_pool", "coordinator", "watermark_blocks"),
    f"{_CORE}.kv_cache_coordinator:KVCacheCoordinator": ("single_type_managers",),
    f"{_CORE}.sched.scheduler:Scheduler": (
        "block_size",
        "kv_cache_config",
        "kv_cache_manager",
        "max_model_len",
        "max_num_active_reqs",
        "num_spec_tokens",
        "max_num_scheduled_tokens",
        "requests",
        "running",
        "vllm_config",
        "waiting",
    ),
    f"{_CORE}.sched.output:SchedulerOutput": (
        "finished_req_ids",
        "num_scheduled_tokens",
        "preempted_req_ids",
        "scheduled_cached_reqs",
        "scheduled_new_reqs",
        "scheduled_spec_decode_tokens",
        "total_num_scheduled_tokens",
    ),
    f"{_CORE}.sched.output:CachedRequestData": ("new_block_ids", "req_ids", "resumed_req_ids"),
    f"{_CORE}.sched.output:NewRequestData": ("req_id",),
    "vllm.v1.request:Request": (
        "client_index",
        "is_prefill_chunk",
        "max_tokens",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_output_placeholders",
        "num_prompt_tokens",
        "num_tokens",
        "num_tokens_with_spec",
        "request_id",
        "resumable",
        "sampling_params",
        "spec_token_ids",
        "status",
        "trace_headers",
    ),
    "vllm.v1.request:RequestStatus": ("FINISHED_ERROR", "PREEMPTED", "WAITING"),
    "vllm.v1.engine:EngineCoreOutputs": ("outputs",),
    "vllm.v1.engine:EngineCoreOutput": (
        "events",
        "finish_reason",
        "new_token_ids",
        "request_id",
        "stop_reason",
        "trace_headers",
    ),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": (
        "attention_chunk_size",
        "block_size",
        "dtype",
        "kv_quant_mode",
        "page_size_bytes",
        "sliding_window",
    ),
    f"{_WORKER}.gpu_model_runner:GPUModelRunner": (
        "compilation_config",
        "device",
        "input_batch",
        "max_num_reqs",
        "max_num_tokens",
        "optimistic_seq_lens_cpu",
        "query_start_loc",
        "req_indices",
        "requests",
        "seq_lens",
        "vllm_config",
    ),
    f"{_WORKER}.gpu_model_runner:AsyncGPUModelRunnerOutput": ("_model_runner_output",),
    f"{_WORKER}.gpu_input_batch:CachedRequestState": ("block_ids",),
    f"{_WORKER}.gpu_input_batch:InputBatch": (
        "block_table",
        "num_computed_tokens_cpu",
        "num_reqs",
        "req_id_to_index",
        "req_ids",
    ),
    f"{_WORKER}.block_table:BlockTable": ("slot_mapping",),
    f"{_WORKER}.gpu.model_runner:GPUModelRunner": (
        "compilation_config",
        "device",
        "execute_model_state",
        "input_buffers",
        "max_num_reqs",
        "max_num_tokens",
        "req_states",
        "vllm_config",
    ),
    f"{_WORKER}.gpu.model_runner:ExecuteModelState": ("input_batch",),
    f"{_WORKER}.gpu.async_utils:AsyncOutput": ("model_runner_output",),
    f"{_WORKER}.gpu.states:RequestState": ("req_id_to_index",),
    f"{_WORKER}.gpu.input_batch:InputBuffers": ("seq_lens",),
    f"{_WORKER}.gpu.input_batch:InputBatch": (
        "num_computed_tokens_np",
        "num_reqs",
        "num_tokens",
        "positions",
        "query_start_loc",
        "query_start_loc_np",
        "req_ids",
        "seq_lens",
        "seq_lens_cpu_upper_bound",
    ),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl": (
        "head_size",
        "kv_cache_dtype",
        "logits_soft_cap",
        "num_heads",
        "num_kv_heads",
        "scale",
        "sinks",
    ),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadata": (
        "block_table",
        "causal",
        "query_start_loc",
        "scheduler_metadata",
        "seq_lens",
    ),
    **{
        f"vllm.v1.attention.backends.{where}Impl": ("head_size", "logits_soft_cap", "scale", "sinks")
        for where in _ON_GPU
    },
    **{
        f"vllm.v1.attention.backends.{where}Metadata": (
            "block_table",
            "num_actual_tokens",
            "query_start_loc",
            "seq_lens",
        )
        for where in _ON_GPU
    },
}
