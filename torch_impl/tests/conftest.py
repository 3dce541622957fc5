from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from vtoken.executor import KVSpec

_DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Two OpenMP threads on busy cores spin-wait: many times slower than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=_DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(scope="session")
def make_spec() -> Callable[..., KVSpec]:
    """The small default world; name what a test is about."""
    return partial(
        KVSpec,
        num_layers=2,
        num_kv_heads=2,
        num_query_heads=4,
        head_size=8,
        dtype="float32",
        block_size=4,
        num_blocks=9,
        max_num_reqs=4,
    )
