"""What one scheduling pass must survive: no token for a request that has a plan, its preemption, its abort."""

import pytest

SETTINGS = {"policy": "random", "kv_budget": 60, "recent": 8, "interval": 8, "when": "always"}


def _watch(engine, before=lambda: None, after=lambda output: None):
    """Calls ``before`` and ``after`` around each pass."""
    schedule = engine.scheduler.schedule

    def watched(*args, **kwargs):
        before()
        output = schedule(*args, **kwargs)
        after(output)
        return output

    engine.scheduler.schedule = watched


@pytest.mark.parametrize("is_async", [False, True], ids=["in step", "async"])
@pytest.mark.parametrize("budget", [0, 1])
def test_plans_run_without_tokens(world, reference, tokens, budget, is_async):
    """The pass after the prefill has a plan for each request, and tokens for none, or one."""
    with world(SETTINGS, async_scheduling=is_async) as engine:
        scheduler, seen = engine.scheduler, []
        full = scheduler.max_num_scheduled_tokens

        def starve():
            scheduler.max_num_scheduled_tokens = budget if len(seen) == 1 else full

        _watch(engine, starve, lambda output: seen.append((output, engine.pool.get_num_free_blocks())))
        for length in (150, 140, 160):
            engine.submit(tokens(length), 40)
        engine.run()
        (prefill, free_before), (starved, free_after) = seen[:2]
        assert prefill.total_num_scheduled_tokens == 450
        assert starved.total_num_scheduled_tokens == budget
        assert len(starved.vtoken_record.block_ids) == 3
        assert starved.vtoken_record.src_slots
        assert free_after >= free_before + 6
        engine.assert_exact(reference)
        engine.assert_nothing_left()


@pytest.mark.parametrize("is_async", [False, True], ids=["in step", "async"])
@pytest.mark.parametrize("recycle", [False, True], ids=["plan", "recycle"])
def test_preemption_in_the_pass_of_a_plan_or_a_recycle(world, reference, tokens, recycle, is_async):
    """The last request evicts in each pass, until those before it have grown so far that its blocks are taken."""
    settings = {**SETTINGS, "kv_budget": 70, "recycle": recycle}
    with world(settings, num_blocks=17, async_scheduling=is_async) as engine:
        for length in (100, 64, 80):
            engine.submit(tokens(length), 120, vtoken_off=1)
        engine.submit(tokens(110), 100)
        engine.run()
        assert engine.counts["preempted recycles" if recycle else "preempted plans"] > 0
        assert engine.counts["moves"] > 0
        engine.assert_exact(reference)
        engine.assert_nothing_left()


@pytest.mark.parametrize("is_async", [False, True], ids=["in step", "async"])
@pytest.mark.parametrize("recycle", [False, True], ids=["plan", "recycle"])
def test_abort_in_the_step_of_a_plan_or_a_recycle(world, reference, tokens, recycle, is_async):
    """The abort comes while the step runs: vLLM frees the blocks before it reads the step's result."""
    with world({**SETTINGS, "recycle": recycle}, async_scheduling=is_async) as engine:
        aborted = []

        def abort_one(output):
            record = output.vtoken_record
            for req_id in record.recycles if recycle else record.block_ids:
                if len(aborted) < 2 and output.num_scheduled_tokens.get(req_id) == 1:
                    aborted.append(int(req_id.split("-")[0]))
                    engine.outcomes[aborted[-1]].aborted = True
                    engine.engine.output_processor.abort_requests([req_id], internal=True)
                    engine.core.aborts_queue.put_nowait([req_id])
                    return

        _watch(engine, after=abort_one)
        for length in (150, 90, 160, 70):
            engine.submit(tokens(length), 40)
        engine.run()
        assert len(aborted) == 2
        engine.assert_exact(reference)
        engine.assert_nothing_left()


def test_a_stall_is_noticed(world, tokens):
    with world(SETTINGS) as engine:
        engine.submit(tokens(40), 5)
        engine.scheduler.max_num_scheduled_tokens = 0
        with pytest.raises(AssertionError, match="no token in 150 steps"):
            engine.run()
