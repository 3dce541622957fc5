import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vtoken.policies.random import RandomPolicy
from vtoken.trace import VictimTrace

sys.path.append(str(Path(__file__).parent))  # scheduler_world


@pytest.fixture(scope="session")
def recorded(make_world: Callable[..., Any]) -> tuple[VictimTrace, Any]:
    """The trace of a random policy, and what its own run saw."""
    from scheduler_world import run

    trace = VictimTrace()
    return trace, run(make_world, RandomPolicy(), {}, on_event=trace.add).seen
