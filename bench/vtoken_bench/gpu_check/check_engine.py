"""``TorchEngine`` on the GPU beside the same engine on the CPU: tokens under the same victims, and attention mass."""

from typing import Any, Final

import numpy as np
import torch

from vtoken.serving.protocol import SamplingParams
from vtoken_bench.gpu_check.ground import Ground, worst
from vtoken_bench.tiny_model import VOCABULARY, tiny_llama
from vtoken_torch.engine import TorchEngine
from vtoken_torch.hf.runner import HFRunner

__all__ = ["check_engine"]

_EVICTING: Final = {"policy": "h2o", "kv_budget": 12, "interval": 4, "when": "always"}
_LAZY: Final = {"mode": "lazy", "low_watermark": 1.0, "cooldown_steps": 1, "theta_fragmentation": 0.1}
_MODES: Final[dict[str, dict[str, Any]]] = {
    "fill alone, fenced": {"recycle": False, "regime": "fenced"},
    "eager": {},
    "lazy, fenced": _LAZY | {"regime": "fenced"},
    "naive": {"variant": "naive"},
}
_MASS_TOLERANCE: Final = 1e-4  # of the largest: two devices sum in two orders, layer upon layer


def check_engine(ground: Ground) -> None:
    """Decoding goes through the Triton kernel, prompts through PyTorch; all in float32."""
    lengths, max_tokens = ((30,), 3) if ground.is_dry else ((150, 37, 80, 5), 40)
    draw = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, VOCABULARY, (length,), generator=draw).tolist() for length in lengths]
    sampling = SamplingParams(max_tokens=max_tokens)
    ours = _engine("cpu", False, **_EVICTING)
    expected = [output.token_ids for output in ours.generate(prompts, sampling, progress=False)]
    for name, mode in list(_MODES.items())[: 1 if ground.is_dry else None]:
        engine = _engine(ground.device, True, **_EVICTING | mode, trace=ours.trace)
        got = [output.token_ids for output in engine.generate(prompts, sampling, progress=False)]
        ground.check(f"{name}: the CPU's tokens", got == expected, f"{got} for {expected}")
        evicted, wanted = engine.counters.num_evicted_tokens, ours.counters.num_evicted_tokens
        ground.check(f"{name}: as many evicted", evicted == wanted > 0, f"{evicted} of {wanted}")
        moved = engine.counters.num_moved_tokens
        ground.check(f"{name}: tokens moved, or not", (moved > 0) == (name != "naive"), str(moved))
    _check_mass(ground, prompts[0], max_tokens)


def _check_mass(ground: Ground, prompt: list[int], num_tokens: int) -> None:
    """Of a request that loses nothing, after some steps."""
    masses = []
    for device, kernel in (("cpu", False), (ground.device, True)):
        engine = _engine(device, kernel, policy="h2o", kv_budget=200, when="always")
        request = engine.submit(prompt)
        while len(request.output) < num_tokens:
            engine.step()
        mass, _ = engine.runner.scores(engine.loop.pool.row_of(request.req_id), range(request.computed))
        masses.append(np.array(mass))
    error = worst(masses[1], masses[0])
    ground.check("attention mass is the CPU's", error <= _MASS_TOLERANCE, f"{error:.1e}")


def _engine(device: str, decode_kernel: bool, **settings: Any) -> TorchEngine:
    model = tiny_llama(16, 512).to(device)
    return TorchEngine(HFRunner(model, decode_kernel), block_size=16, max_model_len=256, max_num_seqs=4, **settings)
