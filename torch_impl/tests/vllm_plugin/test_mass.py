"""Attention mass of the engine against transformers' attention weights, and the victims that follow from it."""

import pytest

MASS_POLICIES = ("h2o", "scissorhands", "tova", "snapkv", "paged_eviction")
ALWAYS = {"policy": "h2o", "kv_budget": 60, "interval": 12, "when": "always", "page_size": 8}


@pytest.fixture
def watch():
    from vllm_mass import MassWatch

    return MassWatch


def _checked(engine, watch, reference):
    engine.assert_exact(reference)
    engine.assert_nothing_left()
    assert watch.num_reports
    assert not watch.num_unanswered
    return watch.assert_chosen_by(reference)


def test_every_policy_sees_and_chooses_what_the_reference_does(world, reference, tokens, watch):
    with world(ALWAYS) as engine:
        seen = watch(engine)
        for policy in MASS_POLICIES:
            engine.submit(tokens(110), 40, vtoken_policy=policy)
            engine.run()
        for length, policy in zip((90, 7, 200, 33, 64, 130), [*MASS_POLICIES, "random"], strict=True):
            engine.submit(tokens(length), 45, vtoken_policy=policy)
        engine.submit(tokens(95), 45, vtoken_off=True)
        engine.submit(tokens(50), 45)
        engine.run()
        assert engine.counts["peak running"] == 8
        assert engine.counts["recycled"] > 150
        assert engine.counts["moves"] > 100
        assert _checked(engine, seen, reference) > 500
        assert {choice.config.policy for choice in seen.choices if choice.victims} == set(MASS_POLICIES)


@pytest.mark.parametrize("chunk", [48, 100])
def test_chunks_of_a_prompt_add_up(world, reference, tokens, watch, chunk):
    with world(ALWAYS, max_num_batched_tokens=chunk) as engine:
        seen = watch(engine)
        for length, policy in zip((300, 170, 260, 130, 210), MASS_POLICIES, strict=True):
            engine.submit(tokens(length), 30, vtoken_policy=policy)
        engine.run()
        assert _checked(engine, seen, reference) > 500
        assert any(choice.victims and choice.num_computed < choice.prompt_len for choice in seen.choices)


def test_cached_tokens_have_mass_from_the_first_chunk_after_them_on(world, reference, tokens, watch):
    prefix = tokens(160)
    with world({**ALWAYS, "kv_budget": 130}, enable_prefix_caching=True) as engine:
        engine.submit(prefix + tokens(10), 5, vtoken_off=True)
        engine.run()
        seen = watch(engine)
        for count, policy in zip((30, 41, 3, 20, 1), MASS_POLICIES, strict=True):
            engine.submit(prefix + tokens(count), 50, vtoken_policy=policy)
        engine.run()
        assert all(engine.outcomes[key].num_cached == 160 for key in range(1, 6))
        assert _checked(engine, seen, reference) > 300
        assert min(choice.first for choice in seen.choices) == 160


def test_mass_is_forgotten_at_preemption(world, reference, tokens, watch):
    with world({**ALWAYS, "kv_budget": 150, "interval": 8}, num_blocks=17) as engine:
        seen = watch(engine)
        for length, policy in zip((60, 75, 50, 60, 40), MASS_POLICIES, strict=True):
            engine.submit(tokens(length), 170, vtoken_policy=policy)
        engine.run(abort_at={150: 1})
        assert engine.counts["preemptions"] > 0
        assert engine.counts["aborts"] == 1
        assert _checked(engine, seen, reference) > 300
        assert any(choice.epoch > 0 and choice.victims for choice in seen.choices)


def test_under_pressure_mass_is_there_from_the_first_token_on(world, reference, tokens, watch):
    with world({**ALWAYS, "when": "pressure"}, num_blocks=20) as engine:
        seen = watch(engine)
        for policy in MASS_POLICIES:
            engine.submit(tokens(60), 150, vtoken_policy=policy)
        engine.run()
        assert _checked(engine, seen, reference) > 100
        assert min(choice.num_computed for choice in seen.choices) > 80  # asked late, and nothing was missed


def test_a_shortage_that_an_arrival_brings_is_relieved_by_the_next_pass(world, reference, tokens, watch):
    with world({**ALWAYS, "when": "pressure"}, num_blocks=20) as engine:
        seen = watch(engine)
        for length in (200, 190):
            engine.submit(tokens(length), 60)
        for _ in range(12):
            engine.step()
        assert not seen.asks  # nobody foresees a shortage
        late = engine.submit(tokens(220), 10, vtoken_off=True)
        engine.step()
        assert seen.num_unanswered > 0
        assert seen.asks
        assert not engine.outcomes[late].epochs
        engine.step()
        assert engine.outcomes[late].epochs
        engine.run()
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        assert seen.assert_chosen_by(reference) > 100
        assert engine.counts["preemptions"] == 0


@pytest.mark.parametrize(("when", "chunk"), [("always", 512), ("pressure", 512), ("always", 48)])
def test_results_that_come_a_step_late_are_read_by_the_layout_of_their_own_step(
    world, reference, tokens, watch, when, chunk
):
    settings = {"num_blocks": 21, "enable_prefix_caching": True, "max_num_batched_tokens": chunk}
    settings["async_scheduling"] = True
    with world({**ALWAYS, "when": when, "kv_budget": 120, "interval": 5}, **settings) as engine:
        seen = watch(engine)
        for length, policy in zip((60, 175, 50, 130, 40), MASS_POLICIES, strict=True):
            engine.submit(tokens(length), 140, vtoken_policy=policy)
        engine.run(abort_at={100: 0})
        assert _checked(engine, seen, reference) > 100
        assert all(choice.known == choice.num_computed - 1 for choice in seen.choices if not choice.is_cut)
        in_prompt = [choice for choice in seen.choices if choice.is_cut and choice.victims]
        assert bool(in_prompt) == (chunk == 48)  # of a chunk that is not judged yet the policy sees nothing


@pytest.mark.parametrize("is_async", [False, True])
def test_the_score_pass_shows_the_policies_chunks_and_sampled_queries_alone(world, reference, tokens, watch, is_async):
    options = {**ALWAYS, "signal_source": "score_pass", "score_every": 5}
    with world(options, max_num_batched_tokens=97, num_blocks=30, async_scheduling=is_async) as engine:
        seen = watch(engine, every=5)
        for length, policy in zip((110, 40, 97, 133, 64), MASS_POLICIES, strict=True):
            engine.submit(tokens(length), 60, vtoken_policy=policy)
        engine.submit(tokens(20), 30, vtoken_policy="h2o", vtoken_budget=5)  # fewer than are scored at once
        engine.submit(tokens(50), 40, vtoken_off=True)
        engine.run()
        assert _checked(engine, seen, reference) > 200
        decoding = [choice for choice in seen.choices if choice.num_computed > choice.prompt_len + 5]
        assert {choice.config.policy for choice in decoding if choice.victims} == set(MASS_POLICIES)
        assert all(choice.known <= choice.num_computed < choice.known + 5 + is_async for choice in decoding)
        assert any(choice.known < choice.num_computed - 1 for choice in decoding)
        assert engine.counts["recycled"] > 50


def _a_position_off_by_one(monkeypatch):
    from vtoken_torch.vllm_plugin.ledger import Ledger

    packed = Ledger.packed_positions

    def mutant(self, req_id):
        positions = packed(self, req_id)
        return positions[1:] + positions[:1]

    monkeypatch.setattr(Ledger, "packed_positions", mutant)


def _mass_that_stays_where_its_token_was(monkeypatch):
    from vtoken_torch.vllm_plugin.mass.kept import KeptMass

    rearrange = KeptMass.rearrange

    def mutant(self, positions, num_computed):
        before = self._state[1:, : len(positions)].clone()
        rearrange(self, positions, num_computed)
        self._state[1:, : before.shape[1]] = before

    monkeypatch.setattr(KeptMass, "rearrange", mutant)


def _a_recycled_slot_keeps_its_mass(monkeypatch):
    from vtoken_torch.vllm_plugin.mass.kept import KeptMass

    def mutant(self, place, start, num_tokens):
        before = self._state[1:, place].clone() if place < self.num_slots else None
        write(self, place, start, num_tokens)
        if before is not None:
            self._state[1:, place] = before

    write = KeptMass.write
    monkeypatch.setattr(KeptMass, "write", mutant)


def _a_recycled_slot_keeps_its_position(monkeypatch):
    from vtoken_torch.vllm_plugin.mass.kept import KeptMass

    def mutant(self, place, start, num_tokens):
        is_recycled = place < self.num_slots
        write(self, place, start, num_tokens)
        if is_recycled:
            del self._unwritten[place]

    write = KeptMass.write
    monkeypatch.setattr(KeptMass, "write", mutant)


def _answers_a_step_behind(monkeypatch):
    from vtoken_torch.vllm_plugin.mass.kept import KeptMass

    def mutant(self, masses, num_queries, num_computed):
        late, self.late = getattr(self, "late", None), (masses, num_queries, num_computed)
        if late is not None and late[0].shape == masses.shape:
            add(self, *late)
        self.num_known = num_computed

    add = KeptMass.add
    monkeypatch.setattr(KeptMass, "add", mutant)


def _no_causal_mask(monkeypatch):
    from vtoken_torch.vllm_plugin.mass.queries import ChunkRows

    tiled = ChunkRows._tiled

    def mutant(*args):
        return [(first, last, hidden & False) for first, last, hidden in tiled(*args)]

    monkeypatch.setattr(ChunkRows, "_tiled", staticmethod(mutant))


@pytest.mark.parametrize(
    "mutate",
    [
        _a_position_off_by_one,
        _mass_that_stays_where_its_token_was,
        _a_recycled_slot_keeps_its_mass,
        _a_recycled_slot_keeps_its_position,
        _answers_a_step_behind,
        _no_causal_mask,
    ],
)
def test_mass_of_the_wrong_token_is_noticed(world, reference, tokens, watch, monkeypatch, mutate):
    mutate(monkeypatch)
    with world({**ALWAYS, "kv_budget": 50, "interval": 8}) as engine:
        seen = watch(engine)
        engine.submit(tokens(100), 40)
        engine.submit(tokens(60), 40, vtoken_policy="tova")
        engine.run()
        engine.assert_exact(reference)  # wrong victims, but honestly evicted
        with pytest.raises(AssertionError, match=r"differs by|other victims|other candidates"):
            seen.assert_chosen_by(reference)


def test_an_engine_without_mass_policies_runs_vllms_own_attention(world, reference, tokens):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from vtoken_torch.vllm_plugin.mass.attention_cpu import MassAttentionImpl

    with world({"policy": "streaming_llm", "kv_budget": 50, "interval": 8, "when": "always"}) as engine:
        asked = []
        (feed,) = (part for part in engine.scheduler.parts if type(part).__name__ == "MassFeed")
        pass_closed = feed.pass_closed

        def watched(output, record):
            pass_closed(output, record)
            asked.append(dict(record.mass))

        feed.pass_closed = watched
        engine.submit(tokens(80), 20)
        engine.run()
        assert not any(asked)
        assert {type(layer.impl) for layer in engine.runner.vtoken.layers} == {CPUAttentionBackendImpl}
        asked.clear()
        off, tova, plain, h2o = (
            engine.submit(tokens(70), 10, **settings)
            for settings in ({"vtoken_off": 1}, {"vtoken_policy": "tova"}, {}, {"vtoken_policy": "h2o"})
        )
        engine.run()
        assert all(isinstance(layer.impl, MassAttentionImpl) for layer in engine.runner.vtoken.layers)
        needs = {req_id.split("-")[0]: order.need for record in asked for req_id, order in record.items() if order.need}
        assert {key: need.window for key, need in needs.items()} == {str(tova): 1, str(h2o): 0}
        engine.assert_exact(reference)
        assert engine.outcomes[plain].epochs[0].deaths
        assert not engine.outcomes[off].epochs[0].deaths


@pytest.mark.parametrize("method", ["mass_need", "ranking"])
def test_a_mass_policy_that_raises_costs_its_request_the_eviction_and_nothing_else(
    world, reference, tokens, watch, monkeypatch, method
):
    from vtoken.policies.tova import TOVAPolicy

    monkeypatch.setattr(TOVAPolicy, method, lambda self, given: 1 / 0)
    with world(ALWAYS) as engine:
        engine.submit(tokens(90), 30, vtoken_policy="tova")
        engine.submit(tokens(90), 30)
        engine.run()
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        assert not engine.outcomes[0].epochs[0].deaths
        assert engine.outcomes[1].epochs[0].deaths
