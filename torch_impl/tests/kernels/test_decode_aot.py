"""What the AOT gate compiles is what is launched; that it compiles well is the gate's own test."""

from typing import Any

import pytest
import torch

from vtoken_torch.kernels import decode, decode_kernels
from vtoken_torch.kernels.decode_aot import AOT_CASES
from vtoken_torch.kernels.decode_tile import Tile, choose_tile
from vtoken_torch.kernels.decode_workspace import DecodeWorkspace

META = torch.device("meta")  # shapes and strides without memory
DTYPES = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32, "*i32": torch.int32}
KERNELS = ("split_kernel", "reduce_kernel", "mass_kernel")
LAYOUTS = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3)}
MAX_BLOCKS = 16
GOOD_CASES = [case for case in AOT_CASES if case.breaks is None]


class Recorder:
    """Stands where a kernel stands, and keeps the arguments of its last launch by name."""

    def __init__(self, kernel: Any) -> None:
        self._names = kernel.arg_names
        self.launch: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.launch = dict(zip(self._names, args, strict=False)) | kwargs

        return launch


@pytest.fixture
def recorders(monkeypatch):
    doubles = {name: Recorder(getattr(decode_kernels, name)) for name in KERNELS}
    for name, double in doubles.items():
        monkeypatch.setattr(decode, name, double)
    return doubles


def launch(dtype, num_query_heads, num_kv_heads, head_size, block_size, layout, with_logits):
    """A call at a model's shape, as an executor makes it."""
    max_tokens = MAX_BLOCKS * block_size
    heads = (num_query_heads, num_kv_heads, head_size)
    workspace = DecodeWorkspace(4, *heads, max_tokens, META, with_logits=True, num_splits=64)
    sizes = (8, block_size, num_kv_heads, 2 * head_size)
    axes = LAYOUTS[layout]
    pool = torch.empty([sizes[axis] for axis in axes], dtype=dtype, device=META).permute(axes)
    integers = {"dtype": torch.int32, "device": META}
    q = torch.empty(4, num_query_heads, head_size, dtype=dtype, device=META)
    num_blocks = torch.empty(4, **integers)
    decode.paged_decode(
        q,
        pool[..., :head_size],
        pool[..., head_size:],
        torch.empty(4, MAX_BLOCKS, **integers),
        num_blocks,
        torch.empty(4, MAX_BLOCKS, (block_size + 31) // 32, **integers),
        scale=1.0,
        out=torch.empty_like(q),
        workspace=workspace,
        logits=workspace.logits if with_logits else None,
    )
    mass = torch.empty(4, max_tokens, device=META)
    decode.token_mass(workspace.logits, workspace.lse, num_blocks, mass, block_size=block_size)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", GOOD_CASES, ids=lambda case: f"{case.name}-{case.shape}")
def test_the_gate_compiles_what_is_launched(case, layout, recorders):
    constants = case.constexprs
    query_heads = constants.get("num_query_heads") or constants["num_kv_heads"] * constants["group_size"]
    launch(
        DTYPES[case.signature.get("q") or case.signature.get("out") or "*bf16"],
        query_heads,
        constants.get("num_kv_heads", 1),
        constants.get("head_size", 64),
        constants.get("block_size", 16),
        layout,
        constants.get("write_logits", True),
    )
    launched = recorders[case.name].launch
    assert {name: launched[name] for name in constants} == dict(constants)
    assert (launched.get("num_warps", 4), launched.get("num_stages", 3)) == (case.num_warps, case.num_stages)
    for name, type_name in case.signature.items():
        if type_name.startswith("*"):
            assert launched[name].dtype == DTYPES[type_name]
        elif name in case.divisible_by_16:
            assert launched[name] % 16 == 0, name
    assert set(case.signature) | set(constants) == set(case.kernel.arg_names)


def test_each_kernel_has_cases_and_the_split_kernel_its_controls():
    assert {case.name for case in GOOD_CASES} == set(KERNELS)
    assert {case.name for case in AOT_CASES if case.breaks} == {"split_kernel"}


@pytest.mark.parametrize(
    ("head_size", "item_bytes", "num_tokens"),
    [(128, 2, 64), (64, 2, 64), (80, 2, 64), (256, 2, 32), (128, 4, 32), (64, 4, 64), (256, 4, 16), (8, 2, 64)],
)
def test_tiles_hold_as_many_tokens_as_compile_without_spills(head_size, item_bytes, num_tokens):
    assert choose_tile(head_size, item_bytes) == Tile(num_tokens, num_warps=4, num_stages=3)
