from pathlib import Path

import pytest

pytest.importorskip("triton")

import sys

from hf_world import World, prompt

sys.path.append(str(Path(__file__).parents[1] / "kernels"))

from triton_interpreter import interpreted

from vtoken_torch.kernels import decode


@pytest.fixture(autouse=True)
def in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("split_kernel", "reduce_kernel", "mass_kernel"):
        monkeypatch.setattr(decode, name, interpreted(getattr(decode, name)))


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_decoding_through_the_triton_kernel_equals_a_masked_run(mode: str) -> None:
    lazy = {"low_watermark": 1.0, "cooldown_steps": 1, "theta_fragmentation": 0.1}
    settings = {"policy": "h2o", "kv_budget": 8, "interval": 2, "when": "always", "max_num_seqs": 2}
    world = World(decode_kernel=True, mode=mode, **settings | (lazy if mode == "lazy" else {}))
    outputs = world.generate([prompt(9), prompt(11, 1)], max_tokens=6)
    assert world.engine.counters.num_evicted_tokens > 0
    world.check(outputs)
