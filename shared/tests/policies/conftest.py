from collections.abc import Callable, Sequence
from typing import Any

import pytest

from vtoken.config import VTokenConfig
from vtoken.policies import RequestView


@pytest.fixture
def make_view() -> Callable[..., RequestView]:
    """A view of tokens 0..computed-1, all live unless said otherwise; further keywords go to the config."""

    def make(
        computed: int,
        *,
        live: Sequence[int] | None = None,
        mass: Sequence[float] = (),
        rows: Sequence[Sequence[float]] = (),
        prompt_len: int = 0,
        **config: Any,
    ) -> RequestView:
        options = VTokenConfig(**{"policy": "any", "num_sinks": 0, **config})
        return RequestView(computed, prompt_len, list(range(computed)) if live is None else live, options, mass, rows)

    return make
