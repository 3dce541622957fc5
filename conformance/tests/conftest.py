import os
import sys
from itertools import count
from textwrap import dedent

import pytest
from hypothesis import settings

from vtoken.errors import SpecError
from vtoken.executor import KVSpec
from vtoken.plugins import EXECUTORS, get_plugin
from vtoken.reference import ReferenceExecutor
from vtoken_conformance.checked import CheckedExecutor

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("vtoken", deadline=None, derandomize=True)
settings.load_profile("vtoken")


@pytest.fixture(params=["reference", "torch", "jax"])
def any_executor(request):
    """A new executor of each kind; skipped with the reason where its extra is missing."""
    try:
        make = get_plugin(EXECUTORS, request.param)
    except SpecError as error:
        if isinstance(error.__cause__, SpecError) and isinstance(error.__cause__.__cause__, ModuleNotFoundError):
            pytest.skip(str(error))
        raise
    if request.param == "torch":
        import torch

        torch.set_num_threads(1)
    return make()


@pytest.fixture
def spec():
    """Two layers, two KV heads, four query heads, blocks of four slots."""
    return KVSpec(
        num_layers=2,
        num_kv_heads=2,
        num_query_heads=4,
        head_size=8,
        dtype="float32",
        block_size=4,
        num_blocks=17,
        max_num_reqs=4,
    )


@pytest.fixture
def checked(spec):
    """A checked reference executor with an empty pool."""
    executor = CheckedExecutor(ReferenceExecutor())
    executor.allocate(spec)
    return executor


_module_numbers = count()


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Writes a module into the current directory, a folder that ``sys.path`` does not name; gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(source):
        name = f"user_module_{next(_module_numbers)}"
        (tmp_path / f"{name}.py").write_text(dedent(source))
        return name

    return write
