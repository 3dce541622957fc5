from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_world import prompt, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from vtoken.serving.protocol import SamplingParams
from vtoken_torch.engine import TorchEngine
from vtoken_torch.hf.runner import HFRunner

WAITING = {"_local_scalar_dense", "nonzero", "masked_select"}
"""Operations that wait for a CUDA device: numbers that are read, and shapes that depend on numbers."""


class Waits(TorchDispatchMode):
    """Counts what would wait for a CUDA device. ``tolist`` and ``torch.tensor`` do it unseen, so they are wrapped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        for owner, name in ((torch.Tensor, "tolist"), (torch, "tensor")):
            monkeypatch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.seen[name] += 1
            return function(*args, **kwargs)

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
        if name in WAITING or any(index is not None and index.dtype == torch.bool for index in indices):
            self.seen[name] += 1
        return func(*args, **kwargs or {})


def test_the_count_sees_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(4)
    with Waits(monkeypatch) as waits:
        torch.tensor([1])
        values[values > 2], int(values[0]), values.tolist(), values.nonzero()
    assert set(waits.seen) == {"tensor", "index", "_local_scalar_dense", "tolist", "nonzero"}


@pytest.mark.parametrize("decode_kernel", [True, False])
@pytest.mark.parametrize("policy", ["h2o", "scissorhands"])
def test_a_step_waits_for_its_tokens_and_a_choice_for_its_victims_alone(
    policy: str, decode_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if decode_kernel:  # what it computes is of no interest here
        module = pytest.importorskip("vtoken_torch.hf.kernel_segment")
        monkeypatch.setattr(module, "paged_decode", lambda *args, out, **kwargs: out.zero_())
        monkeypatch.setattr(module, "token_mass", lambda logits, lse, num_blocks, mass, **kwargs: mass.add_(0.5))
    runner = HFRunner(tiny_model("llama"), decode_kernel)
    own, choices = runner.lowest, Counter[str]()
    monkeypatch.setattr(runner, "lowest", lambda *args: choices.update(["made"]) or own(*args))
    settings = {"kv_budget": 12, "interval": 3, "when": "always", "block_size": 4, "chunk_tokens": 16}
    engine = TorchEngine(runner, policy=policy, max_model_len=64, **settings)
    requests = [engine.submit(prompt(length), SamplingParams(max_tokens=12)) for length in (9, 37)]
    num_sampling = 0
    with Waits(monkeypatch) as waits:
        while not engine.loop.is_idle:
            before = sum(len(request.output) for request in requests)
            engine.step()
            num_sampling += sum(len(request.output) for request in requests) > before
    assert engine.counters.num_evicted_tokens > 0
    assert waits.seen == {"tolist": num_sampling + choices["made"]}
