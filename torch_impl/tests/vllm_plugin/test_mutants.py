"""The checks of this folder can fail: each mutant breaks one rule, and is caught."""

import pytest

SETTINGS = {"policy": "random", "kv_budget": 50, "recent": 8, "interval": 8, "when": "always"}


def _no_slot_shift(monkeypatch):
    from vtoken_torch.vllm_plugin.runner_v1 import EvictingRunnerV1

    packed = EvictingRunnerV1.packed

    def mutant(self, positions):
        packed(self, positions)
        return positions

    monkeypatch.setattr(EvictingRunnerV1, "packed", mutant)


def _logical_lengths(monkeypatch):
    from vtoken_torch.vllm_plugin.runner_v1 import EvictingRunnerV1

    monkeypatch.setattr(EvictingRunnerV1, "_count_live", lambda self: None)


def _packed_positions(monkeypatch):
    from vtoken_torch.vllm_plugin.runner_v1 import EvictingRunnerV1

    count_live = EvictingRunnerV1._count_live

    def mutant(self):
        count_live(self)
        dead = self.rows.dead_on_host
        for index, row in enumerate(self.req_indices.np[: self.query_start_loc.np[len(dead)]]):
            self.positions[index] -= dead[row]

    monkeypatch.setattr(EvictingRunnerV1, "_count_live", mutant)


def _no_moves(monkeypatch):
    from vtoken_torch.vllm_plugin.layout import TokenMover

    monkeypatch.setattr(TokenMover, "move", lambda self, src_slots, dst_slots: None)


def _recycled_token_appended(monkeypatch):
    from vtoken_torch.vllm_plugin.runner_v1 import EvictingRunnerV1

    monkeypatch.setattr(EvictingRunnerV1, "_aim_at_recycled", lambda self: None)


def _row_major_keys(monkeypatch):
    import torch

    from vtoken_torch.vllm_plugin import layout

    def guess(isa, dtype, block_size, head_size):
        rows = torch.arange(block_size * head_size).view(block_size, head_size)
        return torch.cat([rows, rows + block_size * head_size], dim=1)

    monkeypatch.setattr(layout, "probe_packing", guess)


@pytest.mark.parametrize(
    "mutate",
    [_no_slot_shift, _logical_lengths, _packed_positions, _no_moves, _recycled_token_appended, _row_major_keys],
)
def test_a_broken_worker_says_something_else(world, reference, tokens, monkeypatch, mutate):
    mutate(monkeypatch)
    with world(SETTINGS) as engine:
        for length in (100, 60):
            engine.submit(tokens(length), 40)
        engine.run()
        with pytest.raises(AssertionError, match=r"other tokens|logprobs differ"):
            engine.assert_exact(reference)


@pytest.mark.parametrize("is_mutant", [False, True], ids=["as it is", "mutant"])
def test_impure_blocks_in_the_prefix_cache_are_noticed(world, reference, tokens, monkeypatch, is_mutant):
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    from vtoken_torch.vllm_plugin.kv_spec import EvictingManager

    if is_mutant:
        monkeypatch.setattr(EvictingManager, "cache_blocks", FullAttentionManager.cache_blocks)
    prompt, settings = tokens(101), {**SETTINGS, "policy": "streaming_llm", "kv_budget": 100, "interval": 64}
    with world(settings, enable_prefix_caching=True) as engine:
        engine.submit(prompt, 50)  # one token dies after the prompt; block 3 fills up with what was computed without it
        engine.run()
        engine.submit(prompt, 2, vtoken_off=True)  # blocks 0 to 2 are whole again
        engine.run()
        engine.submit(prompt + engine.outcomes[0].tokens, 20, vtoken_off=True)
        engine.run()
        assert engine.outcomes[2].num_cached == (128 if is_mutant else 96)
        if not is_mutant:
            engine.assert_exact(reference)
            return
        with pytest.raises(AssertionError, match=r"request 2: (other tokens|logprobs differ)"):
            engine.assert_exact(reference)


def test_a_hash_left_on_a_written_block_is_noticed(world, reference, tokens, monkeypatch):
    from vtoken_torch.vllm_plugin.pool import VllmPool

    monkeypatch.setattr(VllmPool, "forget_hashes", lambda self, block_ids: None)
    with world(SETTINGS, enable_prefix_caching=True) as engine:
        engine.submit(tokens(150), 20)
        with pytest.raises(AssertionError, match="INV-7"):
            engine.run()


def test_a_block_that_is_written_while_another_holder_copies_out_of_it_is_noticed(world, tokens, monkeypatch):
    from vtoken_torch.vllm_plugin.pool import VllmPool

    monkeypatch.setattr(VllmPool, "copied_out_of", lambda self, block_ids: None)
    settings = {"policy": "random", "kv_budget": 60, "recent": 8, "interval": 8, "when": "always"}
    prefix = tokens(128)
    with world(settings, enable_prefix_caching=True, max_num_batched_tokens=2048) as engine:
        for seed in range(6):
            engine.submit(prefix + tokens(20), 4, vtoken_seed=seed)
        with pytest.raises(AssertionError, match="INV-5: what a copy reads another one writes"):
            engine.run()
