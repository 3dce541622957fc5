import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # hf_world, hf_reference

from hf_world import tiny_model


@pytest.fixture(scope="session")
def llama() -> Any:
    return tiny_model("llama")
