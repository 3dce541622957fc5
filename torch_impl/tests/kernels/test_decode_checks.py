from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vtoken.errors import SpecError
from vtoken_torch.kernels import decode
from vtoken_torch.kernels.decode_workspace import DecodeWorkspace

KERNELS = ("split_kernel", "reduce_kernel", "mass_kernel")


class Recorder:
    """Stands where a kernel stands, and keeps grids."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *args, **kwargs: None


class NothingRuns(TorchDispatchMode):
    """Every operation on a tensor fails: reading a value, allocating, copying."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} in a launch")


@pytest.fixture
def recorders(monkeypatch):
    doubles = [Recorder() for _ in KERNELS]
    for name, double in zip(KERNELS, doubles, strict=True):
        monkeypatch.setattr(decode, name, double)
    return doubles


def arguments(num_reqs=3, **changes):
    """A call that is served: 4 query heads, 2 KV heads, head size 32, tables of 3 blocks of 16."""
    pool = torch.zeros(5, 16, 2, 32)
    workspace = DecodeWorkspace(4, 4, 2, 32, 48, torch.device("cpu"), with_logits=True, num_splits=2)
    call = {
        "q": torch.zeros(num_reqs, 4, 32),
        "keys": pool,
        "values": pool,
        "block_table": torch.zeros(4, 3, dtype=torch.int32),
        "num_blocks": torch.zeros(4, dtype=torch.int32),
        "live_words": torch.zeros(4, 3, 1, dtype=torch.int32),
        "scale": 1.0,
        "out": torch.zeros(num_reqs, 4, 32),
        "workspace": workspace,
        "logits": workspace.logits,
    }
    return call | changes


def mass_arguments(**changes):
    call = {
        "logits": torch.zeros(4, 4, 48),
        "lse": torch.zeros(4, 4),
        "num_blocks": torch.zeros(4, dtype=torch.int32),
        "mass": torch.zeros(3, 48),
        "block_size": 16,
    }
    return call | changes


REFUSED = {
    "float64": ({"q": torch.zeros(3, 4, 32).double()}, "torch.float64"),
    "fp8 pool": ({"keys": torch.zeros(5, 16, 2, 32).to(torch.float8_e4m3fn)}, "float8_e4m3fn"),
    "two dtypes": ({"q": torch.zeros(3, 4, 32).half()}, "q like keys and values"),
    "integers out": ({"out": torch.zeros(3, 4, 32, dtype=torch.int32)}, "torch.int32"),
    "shapes of keys and values": ({"values": torch.zeros(5, 16, 2, 16)}, r"values \(5, 16, 2, 16\)"),
    "shape of out": ({"out": torch.zeros(3, 2, 32)}, r"out \(3, 2, 32\)"),
    "strided head": ({"keys": torch.zeros(5, 16, 32, 2).transpose(2, 3)}, "keys has stride 2 in head_size"),
    "strided query": ({"q": torch.zeros(3, 32, 4).transpose(1, 2)}, "q has stride 4"),
    "another workspace": ({"q": torch.zeros(3, 2, 32), "out": torch.zeros(3, 2, 32)}, r"\(2, 2, 32\)"),
    "too many requests": (
        {"q": torch.zeros(5, 4, 32), "out": torch.zeros(5, 4, 32)},
        "5 requests .* in a workspace for 4",
    ),
    "int64 table": ({"block_table": torch.zeros(4, 3).long()}, "block_table is torch.int64"),
    "short counts": ({"num_blocks": torch.zeros(2, dtype=torch.int32)}, r"give torch.int32 \(3,\) or larger"),
    "two words a block": ({"live_words": torch.zeros(4, 3, 2, dtype=torch.int32)}, "side by side"),
    "narrow live words": ({"live_words": torch.zeros(4, 2, 1, dtype=torch.int32)}, "live_words is"),
    "wide table": (
        {
            "block_table": torch.zeros(4, 4, dtype=torch.int32),
            "live_words": torch.zeros(4, 4, 1, dtype=torch.int32),
            "logits": None,
        },
        "a table of 4 blocks of 16 .* max_tokens=48",
    ),
    "short logits": ({"logits": torch.zeros(4, 4, 47)}, r"logits is torch.float32 \(4, 4, 47\)"),
    "half logits": ({"logits": torch.zeros(4, 4, 48).half()}, "logits is torch.float16"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_not_served_is_refused_before_a_launch(fault, recorders):
    changes, message = REFUSED[fault]
    with pytest.raises(SpecError, match=message):
        decode.paged_decode(**arguments(**changes))
    assert not any(recorder.grids for recorder in recorders)


def test_a_head_size_above_the_limit_is_refused(recorders):
    pool, q = torch.zeros(5, 16, 2, 257), torch.zeros(3, 4, 257)
    workspace = DecodeWorkspace(4, 4, 2, 257, 48, torch.device("cpu"))
    with pytest.raises(SpecError, match="head_size=257: decode attention serves at most 256"):
        decode.paged_decode(**arguments(q=q, out=q, keys=pool, values=pool, workspace=workspace, logits=None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(4, 4, 40)}, "logits is"),
        ({"lse": torch.zeros(4, 4).half()}, "lse is torch.float16"),
        ({"mass": torch.zeros(3, 48).double()}, "mass is torch.float64"),
        ({"num_blocks": torch.zeros(4).long()}, "num_blocks is torch.int64"),
        ({"mass": torch.zeros(5, 48)}, "give torch.float32"),
    ],
)
def test_mass_of_wrong_tensors_is_refused(recorders, changes, message):
    with pytest.raises(SpecError, match=message):
        decode.token_mass(**mass_arguments(**changes))


def test_the_cpu_is_refused_where_kernels_are_compiled():
    for launch, call in ((decode.paged_decode, arguments()), (decode.token_mass, mass_arguments())):
        with pytest.raises(SpecError, match="call reference_decode"):
            launch(**call)


def test_a_launch_reads_no_tensor_and_allocates_none(recorders):
    """So that it neither waits for the device nor breaks a graph's capture."""
    call, mass_call = arguments(), mass_arguments()
    with NothingRuns():
        decode.paged_decode(**call)
        decode.token_mass(**mass_call)
    assert [recorder.grids for recorder in recorders] == [[(2, 2, 3)], [(4, 3)], [(1, 3)]]


def test_an_empty_batch_launches_nothing(recorders):
    decode.paged_decode(**arguments(num_reqs=0))
    decode.token_mass(**mass_arguments(mass=torch.zeros(0, 48)))
    assert not any(recorder.grids for recorder in recorders)
