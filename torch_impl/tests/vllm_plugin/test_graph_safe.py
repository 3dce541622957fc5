"""A captured graph replays the addresses that it saw: those of block table, lengths and slots never change."""

import pytest

SETTINGS = {"policy": "random", "kv_budget": 50, "recent": 8, "interval": 8, "when": "always"}
SAME = {"block_table_tensor": 1, "seq_lens": 1, "slot_mapping": 1}


def _addresses(engine, tokens, num_steps):
    from vllm_addresses import watched_addresses

    with watched_addresses() as seen:
        engine.submit(tokens(100), num_steps)
        engine.submit(tokens(70), num_steps - 5, vtoken_policy="streaming_llm", vtoken_budget=90)
        engine.run()
    return {name: len(found) for name, found in seen.items()}


def test_addresses_stay_over_200_steps_of_moves_and_recycles(world, reference, tokens):
    with world(SETTINGS) as engine:
        assert _addresses(engine, tokens, 210) == SAME
        side = engine.runner.vtoken
        assert side.num_moved_tokens == engine.counts["moves"] > 20
        assert side.num_recycled_tokens == engine.counts["recycled"] > 300
        assert engine.counts["steps"] >= 200
        engine.assert_exact(reference)


@pytest.mark.parametrize("name", ["seq_lens", "slot_mapping"])
def test_a_fresh_tensor_is_noticed(world, tokens, monkeypatch, name):
    from vtoken_torch.vllm_plugin.runner_v1 import EvictingRunnerV1

    count_live = EvictingRunnerV1._count_live

    def mutant(self):
        count_live(self)
        if name == "seq_lens":
            self.seq_lens = self.seq_lens.clone()
        else:
            slots = self.input_batch.block_table[0].slot_mapping
            slots.gpu = slots.gpu.clone()

    monkeypatch.setattr(EvictingRunnerV1, "_count_live", mutant)
    with world(SETTINGS) as engine:
        assert _addresses(engine, tokens, 12)[name] > 1
