import jax
import numpy as np
import pytest

from vtoken.executor import KVSpec

_COMPILED: list[str] = []


def _on_event(event: str, duration: float, **_: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _COMPILED.append(event)


jax.monitoring.register_event_duration_secs_listener(_on_event)


@pytest.fixture
def num_compiles():
    """Counts compilations of this process; a function that was compiled before is not counted again."""
    return lambda: len(_COMPILED)


@pytest.fixture
def make_spec():
    """A small pool; keywords replace its numbers."""

    def make(**changes: object) -> KVSpec:
        small: dict[str, object] = {
            "num_layers": 2,
            "num_kv_heads": 2,
            "num_query_heads": 4,
            "head_size": 8,
            "dtype": "float32",
            "block_size": 4,
            "num_blocks": 24,
            "max_num_reqs": 4,
        }
        return KVSpec(**(small | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture
def any_bits(rng):
    """Tokens of arbitrary bits, NaN of every payload among them."""
    return lambda spec, num_tokens: rng.bytes(num_tokens * spec.token_bytes)
