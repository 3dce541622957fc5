"""The gate compiles for real where a test needs machine code; what it makes of it is tested on made-up code."""

import importlib
import pkgutil
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="PyTorch's builds for CPUs leave Triton out")

from triton.runtime.jit import JITFunction
from triton_interpreter import interpreted

from vtoken.errors import InvariantError
from vtoken_torch import kernels
from vtoken_torch.kernels import aot, move
from vtoken_torch.kernels.aot import MachineCode, Verdict
from vtoken_torch.kernels.planes import KVPlanes

CASE = replace(move._EIGHT_HEADS, tensor_core=True, max_shared_bytes=9000)
GOOD = MachineCode(64, 0, 0, 9000, 1, 1, 0, 1)

LISTING = """
Resource usage:
 Function move_kernel:
  REG:24 STACK:16 SHARED:0 LOCAL:0 CONSTANT[0]:416 TEXTURE:0 SURFACE:0 SAMPLER:0
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;        /* 0x00000a00ff017624 */
        /*0010*/                   LDG.E R2, [R2.64] ;                            /* 0x0000000000000000 */
        /*0020*/              @!P0 LDG.E.128 R4, [R2.64] ;                        /* 0x0000000000000000 */
        /*0030*/             @!UP1 LDGSTS.E.BYPASS.128 [R1], [R2.64], P0 ;        /* 0x0000000000000000 */
        /*0040*/               @P1 LDG.E.U16 R4, [R2.64] ;                        /* 0x0000000000000000 */
        /*0050*/                   STG.E.128 [R2.64], R4 ;                        /* 0x0000000000000000 */
        /*0060*/                   STG.E.U8 [R2.64], R4 ;                         /* 0x0000000000000000 */
        /*0070*/                   STL.64 [R1], R4 ;                              /* 0x0000000000000000 */
        /*0080*/                   LDL R4, [R1] ;                                 /* 0x0000000000000000 */
        /*0090*/                   LDS.128 R4, [R1] ;                             /* 0x0000000000000000 */
        /*00a0*/                   HMMA.16816.F32.BF16 R4, R4, R8, R4 ;           /* 0x0000000000000000 */
        /*00b0*/                   UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8] ;    /* 0x0000000000000000 */
"""


def test_a_listing_is_counted():
    code = aot.read_code(LISTING, shared_bytes=77)
    assert code == MachineCode(24, 16, 2, 77, wide_loads=2, wide_stores=1, narrow=2, tensor_core=2)


def test_a_listing_of_nothing_is_a_bug_not_a_good_kernel():
    with pytest.raises(InvariantError, match="lists no kernel"):
        aot.read_code("\nfatal: no such file", 0)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"registers": 65}, "65 registers, at most 64"),
        ({"spills": 3}, "3 spills, 0 bytes of stack"),
        ({"stack_bytes": 8}, "0 spills, 8 bytes of stack"),
        ({"shared_bytes": 9001}, "9001 bytes of shared memory, at most 9000"),
        ({"wide_loads": 0}, "no 128-bit loads"),
        ({"wide_stores": 0}, "no 128-bit stores"),
        ({"narrow": 1}, "1 narrow accesses, at most 0"),
        ({"tensor_core": 0}, "no tensor-core instructions"),
    ],
    ids=str,
)
def test_each_bound_is_held(changed, reason):
    assert list(aot.reasons(CASE, 90, GOOD)) == []
    assert list(aot.reasons(CASE, 90, replace(GOOD, **changed))) == [reason]


@pytest.mark.parametrize("arch", aot.ARCHITECTURES)
def test_shared_memory_is_the_architecture_s(arch):
    case, limit = replace(CASE, max_shared_bytes=None), aot.ARCHITECTURES[arch]
    assert list(aot.reasons(case, arch, replace(GOOD, shared_bytes=limit))) == []
    assert len(list(aot.reasons(case, arch, replace(GOOD, shared_bytes=limit + 1)))) == 1


def test_what_a_case_does_not_ask_for_is_not_held_against_it():
    case = replace(CASE, wide_loads=False, wide_stores=False, tensor_core=False, narrow_limit=None)
    assert list(aot.reasons(case, 80, MachineCode(64, 0, 0, 0, 0, 0, 99, 0))) == []


@pytest.mark.parametrize(
    ("reasons", "control", "passed"),
    [
        ((), None, True),
        (("2 spills",), None, False),
        ((), "spills", False),
        (("no 128-bit loads",), "spills", False),
        (("no 128-bit loads", "2 spills"), "spills", True),
    ],
)
def test_a_control_has_to_be_refused_for_its_own_reason(reasons, control, passed):
    assert Verdict("kernel", "shape", 90, GOOD, reasons, control).passed == passed


def test_a_kernel_passes_its_control_does_not_and_the_interpreter_leaves_no_trace():
    planes = KVPlanes.of([torch.zeros(2, 4, 1, 16)])
    plan = [torch.tensor([slot], dtype=torch.int32) for slot in (1, 6, 1)]
    form = {**planes.arguments(4), "group": 1, "tile": 16}
    interpreted(move.move_kernel)[1, 1](planes.table, *plan, **form)

    good = aot.judge(move._EIGHT_HEADS, 90)
    assert good.passed
    assert good.code is not None
    assert good.code.wide_loads == good.code.wide_stores == 2  # 1024 words, 128 threads, 4 words each
    control = next(case for case in move.AOT_CASES if case.shape == "strides of 4 bytes")
    refused = aot.judge(control, 90)
    assert refused.passed
    assert "no 128-bit stores" in refused.reasons


def test_what_does_not_compile_is_refused_by_name():
    verdict = aot.judge(move._EIGHT_HEADS.control("no power of two", "does not compile", tile=1000), 90)
    assert verdict.code is None
    assert verdict.passed


def test_every_kernel_of_the_package_has_a_case_and_is_named_once():
    modules = [
        importlib.import_module(info.name) for info in pkgutil.iter_modules(kernels.__path__, "vtoken_torch.kernels.")
    ]
    there = {
        value.fn.__name__
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    }
    cases = aot.aot_cases().values()
    assert {case.name for case in cases if case.breaks is None} == there
    assert any("spills" in (case.breaks or "") for case in cases)
    assert any("narrow" in (case.breaks or "") for case in cases)


@pytest.mark.parametrize("case", aot.aot_cases().values(), ids=aot.aot_cases().keys())
def test_a_case_says_all_that_its_kernel_takes(case):
    names = case.kernel.arg_names
    assert set(names) == set(case.constexprs) | set(case.signature)
    assert set(case.divisible_by_16) <= set(names) - set(case.constexprs)
    assert len(case.shape) <= 24


def test_two_cases_of_one_name_are_refused(monkeypatch):
    monkeypatch.setattr(move, "AOT_CASES", (*move.AOT_CASES, move.AOT_CASES[0]))
    with pytest.raises(InvariantError, match="two AOT cases are called 'move_kernel: NHD 8x512 B BS16'"):
        aot.aot_cases()
