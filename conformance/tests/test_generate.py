from collections import Counter

import pytest

from vtoken.reference import ReferenceExecutor
from vtoken_conformance.generate import CROWD_NAMES, NUM_STEPS, generate, generate_crowd
from vtoken_conformance.run import ProgramJob, run_job
from vtoken_conformance.shapes import SPECS

PROGRAMS = [generate(seed) for seed in range(60)]


def test_the_same_seed_gives_the_same_program():
    assert generate(7) == generate(7)
    assert generate(7).steps != generate(8).steps


def test_programs_are_long_enough_and_of_known_shapes():
    assert all(len(program.steps) >= NUM_STEPS for program in PROGRAMS)
    assert {program.spec for program in PROGRAMS} == set(SPECS)
    assert {program.bits for program in PROGRAMS} == {"finite", "special", "random"}


def test_programs_do_everything_often():
    steps = [step for seed in range(200) for step in generate(seed).steps]
    done = Counter(step.op for step in steps if step.error is None)
    refused = Counter((step.op, step.error) for step in steps if step.error)
    planners = Counter(step.args["planner"] for step in steps if step.op == "launch")
    for op in ("admit", "append", "doom", "kill", "recycle", "advance", "reap", "settle", "fork", "preempt", "finish"):
        assert done[op] >= 50, op
    assert min(planners[name] for name in ("release", "fill", "evacuate")) >= 200
    assert refused["append", "PoolExhausted"] >= 20
    assert refused["recycle", "SpecError"] >= 20


def test_programs_launch_plans_that_move_share_and_wait():
    moved = fenced = copied_out = 0

    class Counting(ReferenceExecutor):
        def launch(self, plan):
            nonlocal moved, fenced, copied_out
            shared = [block for block in plan.freed_block_ids if self.pool.ref_cnt(block) > 1]
            ticket = super().launch(plan)
            moved += len(plan.moves)
            fenced += len(ticket.fenced_block_ids)
            copied_out += len(shared)
            return ticket

    for program in PROGRAMS:
        run_job(ProgramJob(program), "counting", Counting())
    assert moved > 200
    assert fenced > 20
    assert copied_out > 10


def test_every_executor_passes_random_programs(any_executor):
    failures = [run_job(ProgramJob(program), any_executor.name, any_executor)[1] for program in PROGRAMS]
    assert [failure for failure in failures if failure] == []


@pytest.mark.parametrize("name", CROWD_NAMES)
def test_every_executor_passes_a_program_of_64_requests(any_executor, name):
    program = generate_crowd(name)
    done = Counter(step.op for step in program.steps if step.error is None)
    assert program.spec.block_size == int(name.removeprefix("crowd/"))
    assert done["admit"] >= 64
    assert done["fork"]
    assert min(done[op] for op in ("kill", "recycle", "launch")) >= 5
    assert run_job(ProgramJob(program), any_executor.name, any_executor)[1] is None


@pytest.mark.parametrize("seed", [0, 17, 33])
def test_a_program_runs_twice_with_one_fingerprint(seed):
    rows = [run_job(ProgramJob(generate(seed)), "reference", ReferenceExecutor())[0] for _ in range(2)]
    assert rows[0] == rows[1]
