from collections.abc import Callable

import numpy as np
import pytest

from vtoken.errors import SpecError
from vtoken.policies import MassNeed
from vtoken_bench.demo.recording import KEPT_ROWS, RecordedMass, Recording


def fed(recording: Recording, need: MassNeed) -> RecordedMass:
    mass = RecordedMass(need)
    for step in recording.steps:
        mass.feed(step)
    return mass


@pytest.fixture(scope="module")
def recording(make_recording: Callable[..., Recording]) -> Recording:
    return make_recording(prompt=50, chunk=40, decoded=6, attention=lambda query, key: 1.0 + (key * 7 + query) % 5)


def test_bytes_are_a_view_of_the_record(recording: Recording) -> None:
    data = recording.bytes_of(3, 5)

    assert np.shares_memory(np.frombuffer(data, np.uint8), recording.kv)
    np.testing.assert_array_equal(np.frombuffer(data, np.float32), recording.kv[3:5].ravel())
    assert len(data) == 2 * recording.spec(block_size=4, num_blocks=2).token_bytes


def test_the_pool_has_the_null_block_on_top(recording: Recording) -> None:
    spec = recording.spec(block_size=4, num_blocks=14)

    assert (spec.num_blocks, spec.num_layers, spec.num_kv_heads, spec.num_query_heads) == (15, 2, 2, 4)


def test_a_running_sum_adds_up_all_steps(recording: Recording) -> None:
    mass, rows = fed(recording, MassNeed())(0, range(recording.num_tokens))

    total = np.zeros(recording.num_tokens)
    for step in recording.steps:
        total[: step.end] += step.mass
    np.testing.assert_allclose(mass, total, rtol=1e-5)
    assert not rows


def test_a_window_sees_the_newest_queries_alone(recording: Recording) -> None:
    live = [0, 7, 44, 54]
    mass, rows = fed(recording, MassNeed(window=8, rows=True))(0, live)

    newest = [step.last_rows[0] for step in recording.steps[2:]]  # six decoded tokens, then two of the last chunk
    queries = [*recording.steps[1].last_rows[-2:], *newest]
    padded = np.array([np.pad(row, (0, recording.num_tokens - len(row))) for row in queries])
    np.testing.assert_allclose(mass, padded[:, live].sum(0), rtol=1e-5)
    np.testing.assert_allclose(rows[-1], padded[-1, live], rtol=1e-6)
    assert np.isnan(rows[0][-1])  # token 54 came after that query


def test_more_rows_than_were_kept_are_refused() -> None:
    with pytest.raises(SpecError, match=f"{KEPT_ROWS} are kept"):
        RecordedMass(MassNeed(window=KEPT_ROWS + 1))
