import re
from dataclasses import replace

import pytest

from vtoken.errors import PoolExhausted, SpecError
from vtoken.executor import Attention, Executor
from vtoken.reclamation import get_planner
from vtoken.reference import ReferenceExecutor
from vtoken_conformance.bits import make_queries, make_token
from vtoken_conformance.checked import CheckedExecutor
from vtoken_conformance.mismatch import Mismatch


def kv(spec, num_tokens, start=0, bits="finite"):
    return b"".join(make_token(spec, bits, "t", position) for position in range(start, start + num_tokens))


def watch(inner, spec, **options):
    executor = CheckedExecutor(inner, **options)
    executor.allocate(spec)
    return executor


def begin(inner, spec, num_tokens, **options):
    """Watched, with a request "a" of so many tokens."""
    executor = watch(inner, spec, **options)
    executor.admit("a")
    executor.append("a", num_tokens, kv(spec, num_tokens))
    return executor


def test_it_is_an_executor_itself(checked, spec):
    as_executor: Executor = checked
    assert (as_executor.name, as_executor.spec) == ("reference", spec)


def test_a_right_executor_runs_through_as_if_nobody_watched(checked, spec):
    plain = ReferenceExecutor()
    plain.allocate(spec)
    for executor in (checked, plain):
        executor.admit("a")
        executor.append("a", 9, kv(spec, 9))
        executor.doom("a", [2])
        assert executor.kill("a", iter([1, 3, 1])) == [1, 3]
        executor.recycle("a", kv(spec, 1, start=9))
        plan = get_planner("fill").plan(executor.table_view("a"), executor.pool_view())
        executor.launch(plan)
        executor.advance()
        assert executor.reap() == []
    assert checked.observe() == plain.observe()
    assert checked.fingerprint("a") == plain.fingerprint("a")


def test_what_both_refuse_reaches_the_caller(checked, spec):
    checked.admit("a")
    checked.append("a", 4, kv(spec, 4))
    before = checked.observe()
    with pytest.raises(PoolExhausted, match="blocks are needed"):
        checked.append("a", 99, kv(spec, 99, start=4))
    with pytest.raises(SpecError, match="position 4"):
        checked.kill("a", [4])
    assert checked.observe() == before


def test_a_call_that_must_be_refused_and_goes_through_is_a_mismatch(spec):
    class Lenient(ReferenceExecutor):
        def admit(self, req_id):
            if req_id not in self.tables:
                super().admit(req_id)

    executor = watch(Lenient(), spec)
    executor.admit("a")
    with pytest.raises(Mismatch) as caught:
        executor.admit("a")
    assert (caught.value.rule, caught.value.expected, caught.value.got) == ("T-8", "SpecError", "it went through")


def test_the_wrong_kind_of_error_is_a_mismatch(spec):
    class Vague(ReferenceExecutor):
        def append(self, req_id, num_tokens, kv):
            try:
                super().append(req_id, num_tokens, kv)
            except PoolExhausted as error:
                raise SpecError(str(error)) from None

    executor = watch(Vague(), spec)
    executor.admit("a")
    with pytest.raises(Mismatch, match="Q-5: error of append: expected PoolExhausted"):
        executor.append("a", 99, kv(spec, 99))


def test_a_legal_call_that_is_refused_is_a_mismatch(spec):
    class Strict(ReferenceExecutor):
        def doom(self, req_id, positions):
            raise SpecError("not today")

    executor = begin(Strict(), spec, 2)
    with pytest.raises(Mismatch, match=r"T-1: doom is legal here: .* got SpecError: not today"):
        executor.doom("a", [0])


def test_an_error_of_the_executor_itself_passes_through(spec):
    class Crashing(ReferenceExecutor):
        def kill(self, req_id, positions):
            raise ZeroDivisionError

    executor = begin(Crashing(), spec, 2)
    with pytest.raises(ZeroDivisionError):
        executor.kill("a", [0])


def test_a_mismatch_tells_the_number_of_the_call_and_what_differs(spec):
    class Forgetful(ReferenceExecutor):
        def kill(self, req_id, positions):
            super().kill(req_id, positions)
            return []

    executor = begin(Forgetful(), spec, 2)
    with pytest.raises(Mismatch) as caught:
        executor.kill("a", [0])
    assert caught.value.step == 3
    assert str(caught.value) == "T-3: positions of request 'a' that kill changed: expected [0], got []"


def test_versions_must_move_with_their_cause(spec):
    class Restless(ReferenceExecutor):
        def advance(self):
            super().advance()
            self.tables["a"].layout_version += 1

    class Stuck(ReferenceExecutor):
        def kill(self, req_id, positions):
            killed = super().kill(req_id, positions)
            self.tables[req_id].liveness_version = 0
            return killed

    restless, stuck = watch(Restless(), spec), watch(Stuck(), spec)
    for executor in (restless, stuck):
        executor.admit("a")
        executor.append("a", 2, kv(spec, 2))
    with pytest.raises(Mismatch, match="T-6: layout_version of request 'a': expected stays, got changes"):
        restless.advance()
    with pytest.raises(Mismatch, match="T-6: liveness_version of request 'a': expected changes, got stays"):
        stuck.kill("a", [0])


class _WrongBytes(ReferenceExecutor):
    """Flips a bit of the first token as the third call comes."""

    def doom(self, req_id, positions):
        super().doom(req_id, positions)
        slot = self.tables[req_id].slot_at(0)
        self.store.kv[slot] = bytes([self.store.kv[slot][0] ^ 1]) + self.store.kv[slot][1:]


def test_bytes_are_compared_every_nth_call_and_counts_always(spec):
    for check_every, step in ((1, 3), (4, 4), (5, 5)):
        executor = begin(_WrongBytes(), spec, 2, check_every=check_every)
        with pytest.raises(Mismatch, match="KV bytes of position 0") as caught:
            executor.doom("a", [1]) or executor.advance() or executor.advance()
        assert caught.value.step == step


def test_counts_are_compared_even_between_the_full_checks(spec):
    class Miscounting(ReferenceExecutor):
        def doom(self, req_id, positions):
            super().doom(req_id, positions)
            self.tables[req_id].num_live_tokens -= 1

    executor = begin(Miscounting(), spec, 2, check_every=1000)
    with pytest.raises(Mismatch, match="T-1: live tokens of request 'a': expected 2, got 1"):
        executor.doom("a", [1])


def test_check_every_must_be_positive():
    with pytest.raises(SpecError, match="check_every=0: give at least 1"):
        CheckedExecutor(ReferenceExecutor(), check_every=0)


def test_a_plan_that_no_planner_would_make_is_a_mismatch(checked, spec):
    checked.admit("a")
    checked.append("a", 12, kv(spec, 12))
    checked.kill("a", range(6))
    plan = get_planner("fill").plan(checked.table_view("a"), checked.pool_view())
    swapped = [
        first._replace(dst_slot=second.dst_slot) for first, second in zip(plan.moves, plan.moves[::-1], strict=True)
    ]
    with pytest.raises(Mismatch, match="R-5: plan of fill"):
        checked.launch(replace(plan, moves=tuple(swapped)))


@pytest.mark.parametrize("planner", ["release", "fill", "evacuate"])
def test_a_missing_plan_is_a_mismatch(checked, spec, planner):
    checked.admit("a")
    checked.append("a", 13, kv(spec, 13))
    checked.kill("a", range(8))
    with pytest.raises(Mismatch, match=rf"R-[456]: plan of {planner} .*, got no plan"):
        checked.check_plan("a", planner, None)


def test_evacuation_is_judged_by_the_share_that_the_driver_uses(spec):
    executor = begin(ReferenceExecutor(), spec, 13, source_utilization=0.25)
    executor.kill("a", [0, 1, 2, 4, 5])
    planner = get_planner("evacuate")
    plan = planner.plan(executor.table_view("a"), executor.pool_view())
    with pytest.raises(Mismatch, match="R-6"):
        executor.launch(plan)


def test_blocks_that_never_come_back_are_a_mismatch(spec):
    class Hoarding(ReferenceExecutor):
        def reap(self):
            return []

    executor = begin(Hoarding(), replace(spec, regime="fenced"), 6)
    executor.kill("a", range(4))
    executor.launch(get_planner("release").plan(executor.table_view("a"), executor.pool_view()))
    with pytest.raises(Mismatch, match=re.escape("R-7: blocks in flight after 64 steps: expected none, got [1]")):
        executor.settle()


def test_a_late_reap_is_allowed_until_the_executor_has_settled(spec):
    class Slow(ReferenceExecutor):
        num_reaps = 0

        def reap(self):
            self.num_reaps += 1
            return super().reap() if self.num_reaps % 3 == 0 else []

    executor = begin(Slow(), replace(spec, regime="fenced"), 6)
    executor.kill("a", range(4))
    executor.launch(get_planner("release").plan(executor.table_view("a"), executor.pool_view()))
    executor.settle()
    assert executor.pool_view().num_free == 15


@pytest.mark.parametrize("name", ["out", "mass", "positions"])
def test_attention_is_compared_when_asked_for_and_of_its_own_accord(spec, name):
    class Skewed(ReferenceExecutor):
        def attend(self, req_id, q, num_queries=1):
            seen = super().attend(req_id, q, num_queries)
            parts = {"out": seen.out, "positions": seen.positions, "mass": seen.mass}
            parts[name] = parts[name][1:] + parts[name][:1]
            return Attention(**parts)

    executor = watch(Skewed(), spec)
    executor.admit("a")
    with pytest.raises(Mismatch, match=r"A-[13]"):
        executor.append("a", 5, kv(spec, 5))
    asked = watch(Skewed(), spec, attend=False)
    asked.admit("a")
    asked.append("a", 5, kv(spec, 5))
    with pytest.raises(Mismatch, match=r"A-[13]"):
        asked.attend("a", make_queries(spec, "q", 2), 2)


def test_attention_over_bits_that_are_no_numbers_is_not_judged(checked, spec):
    checked.admit("a")
    checked.append("a", 4, kv(spec, 4, bits="special"))
    assert checked.num_attention_checks == 0
    checked.kill("a", [3])
    assert checked.num_attention_checks == 1


def test_the_fingerprint_so_far_follows_the_bytes_and_the_calls(spec):
    digests = []
    for bits in ("finite", "finite", "random"):
        executor = watch(ReferenceExecutor(), spec)
        executor.admit("a")
        executor.append("a", 2, kv(spec, 2, bits=bits))
        digests.append(executor.fingerprint_so_far)
    assert digests[0] == digests[1] != digests[2]
    assert re.fullmatch("[0-9a-f]{16}", digests[0])


def test_a_fingerprint_is_compared_when_asked_for(checked, spec, monkeypatch):
    checked.admit("a")
    checked.append("a", 2, kv(spec, 2))
    assert checked.fingerprint("a") == checked.observe().requests["a"].fingerprint
    with pytest.raises(SpecError, match="'x'"):
        checked.fingerprint("x")
    monkeypatch.setattr(checked.inner, "fingerprint", lambda req_id: "0" * 16)
    with pytest.raises(Mismatch, match="H-2: fingerprint of request 'a'"):
        checked.fingerprint("a")


def test_verify_compares_everything_between_the_full_checks(spec):
    executor = begin(_WrongBytes(), spec, 2, check_every=1000)
    executor.verify()
    executor.doom("a", [1])
    with pytest.raises(Mismatch, match="INV-1: KV bytes of position 0"):
        executor.verify()
