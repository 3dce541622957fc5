"""Another device than the default one: the second of two CPU devices, which tests/conftest.py asks for."""

import jax
import numpy as np
import pytest

from vtoken.errors import SpecError
from vtoken.reclamation.fill import FillPlanner
from vtoken.serving.protocol import SamplingParams
from vtoken_jax.engine import JaxEngine
from vtoken_jax.executor import JaxExecutor
from vtoken_jax.kernels.decode import choose
from vtoken_jax.runner import JaxRunner


@pytest.fixture
def second():
    assert len(jax.devices()) == 2
    return jax.devices()[1]


def devices(*trees):
    return {device for leaf in jax.tree.leaves(trees) for device in leaf.devices()}


def drive(executor, spec, kv, q):
    executor.allocate(spec)
    executor.admit("a")
    executor.append("a", 11, kv)
    executor.kill("a", [0, 3, 4])
    executor.launch(FillPlanner().plan(executor.table_view("a"), executor.pool_view()))
    return executor.attend("a", q, 2)


def test_an_executor_computes_on_its_device_what_the_default_one_does(make_spec, rng, second):
    spec = make_spec()
    kv = rng.standard_normal(11 * spec.token_elements).astype(np.float32).tobytes()
    q = rng.standard_normal(2 * spec.query_elements).astype(np.float32).tobytes()
    executor, default = JaxExecutor(second), JaxExecutor()

    assert drive(executor, spec, kv, q) == drive(default, spec, kv, q)

    assert executor.observe() == default.observe()
    assert devices(executor.store.cache, executor.store.tables) == {second}
    assert devices(default.store.cache, default.store.tables) == {jax.devices()[0]}


def state(engine):
    return engine.runner.weights, engine.runner.masses, engine.runner.store.cache, engine.runner.store.tables


def test_an_engine_serves_and_is_restored_on_its_device(model_folders, tmp_path, second):
    def make(device):
        options = {"policy": "h2o", "kv_budget": 16, "interval": 6, "when": "always", "num_sinks": 2}
        small = {"block_size": 4, "num_blocks": 60, "max_num_seqs": 2, "max_model_len": 200, "chunk_tokens": 16}
        engine = JaxEngine(model_folders("llama"), device=device, **options, **small)
        engine.submit(range(9, 39), SamplingParams(max_tokens=12))
        return engine

    engine, default, restored = make(second), make(None), make(second)
    for _ in range(6):
        engine.step()
    engine.save_snapshot(tmp_path / "snapshot")
    restored.load_snapshot(tmp_path / "snapshot")

    expected = [(each.token_ids, each.num_evicted) for each in default.resume()]

    assert expected[0][1] > 10
    for each in (engine, restored):
        assert [(output.token_ids, output.num_evicted) for output in each.resume()] == expected
        assert devices(state(each)) == {second}
    assert devices(state(default)) == {jax.devices()[0]}


@pytest.mark.parametrize("device", ["cuda:1", 1])
def test_what_is_no_device_is_refused_with_the_remedy(model_folders, device):
    message = rf"device={device!r} is no device of JAX: give one of jax\.devices\(\)"
    with pytest.raises(SpecError, match=message):
        JaxExecutor(device)
    with pytest.raises(SpecError, match=message):
        JaxRunner.from_folder(model_folders("llama"), "float32", device=device)


def test_the_kernel_is_chosen_for_the_device_and_not_for_the_default_backend(monkeypatch, model_folders, second):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    runner = JaxRunner.from_folder(model_folders("llama"), "float32", device=second)
    assert {weight.ndim for weight in runner.weights} == {1, 2, 3}  # in a CPU's tiles
    runner.make_store(runner.config.kv_spec(dtype="float32", block_size=16, num_blocks=4, max_num_reqs=1))
    assert runner.kernel == "xla"
    assert choose("auto", kv_dtype="float32", head_size=64, block_size=16) != "xla"
