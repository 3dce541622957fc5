from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import sys

from hf_world import World, prompt

sys.path.append(str(Path(__file__).parents[1] / "kernels"))

from triton_interpreter import interpreted

from vtoken_torch.hf import kernel_segment
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


def test_logits_are_kept_for_the_longest_request_there_is_not_for_the_longest_there_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_segment, "paged_decode", lambda *args, out, **kwargs: out.zero_())
    monkeypatch.setattr(kernel_segment, "token_mass", lambda *args, **kwargs: None)
    world = World(decode_kernel=True, policy="h2o", kv_budget=200, when="always", max_model_len=256, num_blocks=257)
    request = world.engine.submit(prompt(9))
    widths = []
    while len(request.output) < 18:
        world.engine.step()
        widths.append(scratch_of(world))
    assert [width for width in dict.fromkeys(widths) if width] == [24, 56]


def scratch_of(world: World) -> int:
    """Tokens that its logits have room for."""
    make: Any = world.runner._make_decode
    workspace = make.keywords["scratch"]._workspace
    return 0 if workspace is None else int(workspace.logits.shape[2])
