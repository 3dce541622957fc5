from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from vtoken_jax.aot.cases import Case, cases
from vtoken_jax.aot.gate import Figures, Verdict, figures, reasons
from vtoken_jax.aot.machine_code import MachineCode
from vtoken_jax.compaction import move_tokens
from vtoken_jax.kv_cache import make_cache

CASE = Case(
    "move",
    "small",
    lambda target: None,
    max_temp_bytes=100,
    num_aliases=3,
    plane=(8, 4),
    tensor_core=True,
    call="mosaic",
)
GOOD = Figures(MachineCode(64, 0, 1000, 2), temp_bytes=100, aliases=3, plane_copies=0, calls=("mosaic_gpu_v2",))


def test_good_figures_are_held_against_nobody():
    assert list(reasons(CASE, GOOD)) == []
    assert Verdict(CASE, GOOD, ()).passed


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"code": MachineCode(0, 0, 0, 2)}, "no machine code was written down"),
        ({"code": MachineCode(64, 8, 0, 2)}, "8 bytes of spills"),
        ({"code": MachineCode(256, 0, 0, 2)}, "256 registers, at most 255"),
        ({"code": MachineCode(64, 0, 300_000, 2)}, "300000 bytes of shared memory, at most 232448"),
        ({"code": MachineCode(64, 0, 0, 0)}, "no tensor-core instructions"),
        ({"temp_bytes": 101}, "101 bytes of temporary memory, at most 100"),
        ({"aliases": 2}, "2 aliases, expected 3"),
        ({"calls": ("cublas",)}, "no call of mosaic among cublas"),
        ({"plane_copies": 1}, "1 copies of a whole KV array"),
    ],
)
def test_each_missed_bound_is_named(changes, reason):
    assert list(reasons(CASE, replace(GOOD, **changes))) == [reason]


def test_a_control_passes_when_it_is_refused_for_its_own_reason():
    control = replace(CASE, breaks="spills")
    assert Verdict(control, GOOD, ("8 bytes of spills",)).passed
    assert not Verdict(control, GOOD, ("2 aliases, expected 3",)).passed
    assert not Verdict(control, GOOD, ()).passed


def test_a_program_that_does_not_compile_has_a_row_without_figures():
    row = Verdict(CASE, None, ("does not compile: out of shared memory",)).row()
    assert (row["registers"], row["temp_bytes"], row["passed"]) == (None, None, False)


def text_of(function, spec, **jit):
    cache, slots = jax.eval_shape(lambda: make_cache(spec)), jax.ShapeDtypeStruct((4,), jnp.int32)
    return jax.jit(function, **jit).lower(cache, slots, slots).compile().as_text()


def test_aliases_and_copies_of_whole_arrays_are_found_in_real_programs(make_spec):
    spec = make_spec()
    plane = spec.num_slots, spec.num_kv_heads * spec.head_size
    code, num_planes = GOOD.code, 2 * spec.num_layers

    donated = figures(text_of(move_tokens.__wrapped__, spec, donate_argnums=0), 0, code, plane)
    copied = figures(text_of(move_tokens.__wrapped__, spec), 0, code, plane)

    assert (donated.aliases, donated.plane_copies) == (num_planes + 1, 0)
    assert (copied.aliases, copied.plane_copies) == (0, num_planes)


def test_every_kind_of_check_has_a_control():
    controls = {case.breaks for case in cases() if case.breaks}
    assert controls == {
        "aliases",
        "temporary memory",
        "of a whole KV array",
        "spill",
        "does not compile",
        "tensor-core",
    }
    names = [f"{case.kernel}: {case.shape}" for case in cases()]
    assert len(names) == len(set(names))
