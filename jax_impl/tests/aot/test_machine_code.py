import pytest

from vtoken.errors import InvariantError
from vtoken_jax.aot.machine_code import Dump, MachineCode, join_codes, read_listings

USAGE = """\
ptxas info    : Compiling entry function 'paged_logits' for 'sm_90a'
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 62 registers, used 2 barriers, 1 bytes smem
"""
PTX = """\
.visible .entry paged_logits()
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f2};
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1}, %rd1, %rd2;
fma.rn.f32 %f1, %f2, %f3, %f4; // comma.sync is not one
"""


def test_registers_spills_shared_memory_and_matrix_instructions_are_read():
    assert read_listings(PTX, USAGE, 12_288) == MachineCode(62, 20, 12_289, 2)


def test_static_shared_memory_may_be_missing():
    assert read_listings("", USAGE.replace(", 1 bytes smem", ""), 0).shared_bytes == 0


def test_an_assembler_that_says_nothing_is_not_taken_for_a_good_kernel():
    with pytest.raises(InvariantError, match="no kernel in what ptxas says"):
        read_listings(PTX, "ptxas info    : 0 bytes gmem", 0)


def test_a_program_is_as_bad_as_its_worst_kernel():
    codes = {"a": MachineCode(10, 4, 100, 1), "b": MachineCode(20, 0, 50, 2)}
    assert join_codes(codes) == MachineCode(20, 4, 100, 3)
    assert join_codes({}) == MachineCode(0, 0, 0, 0)


def test_a_dump_is_read_once_and_two_kernels_in_one_file_are_refused(tmp_path):
    dump = Dump(tmp_path)
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "constants.ptx").write_text(".global .align 128 .b8 buffer[4];")
    assert dump.read() == {}
    (tmp_path / "module.ptx").write_text(".visible .entry a()\n.visible .entry b()\n")
    with pytest.raises(InvariantError, match=r"module\.ptx has 2 kernels"):
        dump.read()
    assert dump.read() == {}
