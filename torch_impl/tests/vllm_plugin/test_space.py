"""What eviction buys: more requests at once, blocks back in the same pass; nothing dropped while memory is ample."""

import pytest

ALWAYS = {"policy": "streaming_llm", "kv_budget": 63, "interval": 16, "when": "always"}


def _run(engine, tokens, num_requests=6, length=256, max_tokens=96):
    for _ in range(num_requests):
        engine.submit(tokens(length), max_tokens)
    engine.run()
    return engine


def test_freed_blocks_serve_waiting_requests(world, reference, tokens):
    peaks = {}
    for variant in ("native", "vtoken"):
        with world({**ALWAYS, "variant": variant}, num_blocks=20, max_num_batched_tokens=128) as engine:
            _run(engine, tokens)
            engine.assert_exact(reference)
            engine.assert_nothing_left()
            peaks[variant] = engine.counts["peak running"], engine.counts["preemptions"], engine.counts["steps"]
    assert peaks["vtoken"][0] >= 2 * peaks["native"][0], peaks
    assert peaks["vtoken"][1] == 0, peaks
    assert peaks["vtoken"][2] < peaks["native"][2], peaks


@pytest.mark.parametrize("is_async", [False, True], ids=["in step", "async"])
def test_a_request_starts_in_the_pass_that_frees_its_blocks(world, reference, tokens, is_async):
    starts = []
    with world(ALWAYS, num_blocks=18, async_scheduling=is_async) as engine:
        schedule = engine.scheduler.schedule

        def watched(*args, **kwargs):
            num_free = engine.pool.get_num_free_blocks()
            output = schedule(*args, **kwargs)
            starts.extend(
                (len(request.prompt_token_ids), num_free, set(output.vtoken_record.block_ids))
                for request in output.scheduled_new_reqs
            )
            return output

        engine.scheduler.schedule = watched
        engine.submit(tokens(250), 40)
        engine.submit(tokens(254), 40, vtoken_off=True)  # both together: 16 of 17 blocks
        engine.step()
        engine.submit(tokens(100), 40)
        engine.run()
        engine.assert_exact(reference)
        engine.assert_nothing_left()
    assert [length for length, _, _ in starts] == [250, 254, 100]
    _, num_free, planned = starts[2]
    assert num_free < 4, "there was room before"
    assert {req_id.split("-")[0] for req_id in planned} == {"0"}


def test_under_pressure_who_has_most_gives_first_until_enough_is_free(world, reference, tokens):
    low, high, total = 0.1, 0.5, 32
    settings = {**ALWAYS, "kv_budget": 40, "when": "pressure", "pressure_low": low, "pressure_high": high}
    passes = []
    with world(settings, num_blocks=total + 1) as engine:
        side = engine.scheduler.vtoken
        relieve, counters = side.relieve, side.counters

        def watched(is_short):
            before, num_evicted = engine.pool.get_num_free_blocks(), counters.num_evicted_tokens
            offers = {req_id: side._blocks_to_give(req_id, running) for req_id, running in side._running.items()}
            gave = relieve(is_short)
            free = engine.pool.get_num_free_blocks()
            passes.append((is_short, before, free, counters.num_evicted_tokens - num_evicted, offers, gave))
            return gave

        side.relieve = watched
        for length in (100, 300, 200):
            engine.submit(tokens(length), 140)
        engine.run()
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        assert engine.counts["preemptions"] == 0
    assert not any(is_short for is_short, *_ in passes)
    ample = [each for each in passes if each[1] >= low * total]
    assert len(ample) > 50
    assert not any(num_evicted for _, _, _, num_evicted, _, _ in ample)
    (short,) = (each for each in passes if each[1] < low * total)  # once, then there is room to the end
    _, _, free, num_evicted, offers, gave = short
    assert num_evicted > 0
    assert free >= high * total
    assert [req_id.split("-")[0] for req_id in gave] == ["1", "2"]
    assert gave == sorted(offers, key=offers.get, reverse=True)[:2]
    assert len({*offers.values()}) == 3


def test_under_pressure_a_head_that_cannot_start_is_reason_enough(world, reference, tokens):
    """It alone: both thresholds are 0, and who runs can grow."""
    settings = {**ALWAYS, "kv_budget": 40, "when": "pressure", "pressure_low": 0.0, "pressure_high": 0.0}
    passes = []
    with world(settings, num_blocks=17) as engine:
        side = engine.scheduler.vtoken
        relieve = side.relieve

        def watched(is_short):
            before = side.counters.num_evicted_tokens
            gave = relieve(is_short)
            passes.append((is_short, side.counters.num_evicted_tokens - before))
            return gave

        side.relieve = watched
        engine.submit(tokens(300), 60)
        for _ in range(3):
            engine.step()
        assert passes == [(False, 0)] * 3
        assert engine.pool.get_num_free_blocks() == 6
        engine.submit(tokens(220), 20, vtoken_off=True)  # starts with 7
        engine.step()
        is_short, num_evicted = passes[-1]
        assert is_short
        assert num_evicted > 200
        assert len(engine.scheduler.running) == 2
        engine.run()
        engine.assert_exact(reference)
        engine.assert_nothing_left()


@pytest.mark.parametrize("recycle", [True, False], ids=["recycle", "fill alone"])
def test_in_steady_state_no_block_is_taken_and_given_back(world, reference, tokens, recycle):
    """Decoding requests with budget + interval at a block's edge, below and beyond it."""
    with world({**ALWAYS, "recycle": recycle}) as engine:
        for budget in (79, 80, 81):
            engine.submit(tokens(100), 120, vtoken_budget=budget)
        for _ in range(40):
            engine.step()
        counters = engine.scheduler.vtoken.counters
        num_freed, num_evicted = counters.num_freed_blocks, counters.num_evicted_tokens
        for _ in range(60):
            engine.step()
        assert counters.num_evicted_tokens - num_evicted == 3 * 60
        assert counters.num_freed_blocks - num_freed == (0 if recycle else 60)  # the last one's, in each step
        engine.run()
        engine.assert_exact(reference)
        engine.assert_nothing_left()


def test_under_pressure_alone_nothing_is_dropped_while_memory_is_ample(world, reference, tokens):
    settings = {**ALWAYS, "when": "pressure"}
    with world(settings) as engine:
        _run(engine, tokens, num_requests=3, length=100, max_tokens=40)
        assert engine.scheduler.vtoken.counters.num_evicted_tokens == 0
    with world(settings, num_blocks=20) as engine:
        _run(engine, tokens)
        assert engine.scheduler.vtoken.counters.num_evicted_tokens > 0
        assert engine.counts["preemptions"] == 0
        engine.assert_exact(reference)
        engine.assert_nothing_left()


def test_a_request_may_opt_out_or_name_its_own_budget(world, reference, tokens):
    with world(ALWAYS) as engine:
        settings = [
            {"vtoken_off": 1},
            {"vtoken_budget": 100, "vtoken_protect": [0, 20, 40, 60]},
            {"vtoken": {"kv_budget": 120, "protected": "prompt"}},
            {"vtoken_ratio": 0.5},
        ]
        for each in settings:
            engine.submit(tokens(90), 50, **each)
        engine.run()
        engine.assert_exact(reference)
        deaths = [{position for _, position in engine.outcomes[key].epochs[0].deaths} for key in range(4)]
        assert not deaths[0]
        assert deaths[1]
        assert not deaths[1] & {*range(20), *range(40, 60)}
        assert deaths[2]
        assert min(deaths[2]) >= 90
        assert len(deaths[3]) == pytest.approx(0.5 * 139, abs=17)


@pytest.mark.parametrize("budget", [48, 200])
def test_an_exhausted_token_budget_rolls_recycles_back(world, reference, tokens, budget):
    settings = {**ALWAYS, "kv_budget": 40, "interval": 8}
    with world(settings, max_num_batched_tokens=budget, max_num_seqs=8) as engine:
        side, scheduler = engine.scheduler.vtoken, engine.scheduler
        for _ in range(6):
            engine.submit(tokens(60), 40)
        full, steps = scheduler.max_num_scheduled_tokens, iter(range(10**6))
        schedule = scheduler.schedule

        def starved(*args, **kwargs):
            scheduler.max_num_scheduled_tokens = 2 if next(steps) % 3 == 2 else full
            return schedule(*args, **kwargs)

        scheduler.schedule = starved
        engine.run()
        engine.assert_exact(reference)
        engine.assert_nothing_left()
        assert engine.counts["passed over"] > 0
        assert side.counters.num_recycled_tokens == engine.counts["recycled"]


def test_preemption_in_the_pass_of_a_plan_drops_its_moves(world, reference, tokens):
    settings = {"policy": "random", "kv_budget": 120, "interval": 4, "when": "always"}
    with world(settings, num_blocks=17) as engine:
        for length in (100, 64, 80, 90, 70):
            engine.submit(tokens(length), 140)
        engine.run(abort_at={30: 0, 90: 2})
        assert engine.counts["preemptions"] > 0
        engine.assert_exact(reference)
        engine.assert_nothing_left()
