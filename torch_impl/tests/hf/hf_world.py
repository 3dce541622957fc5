"""Tiny models, an engine that records what it does, and the check against transformers alone."""

import copy
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from hf_reference import Replay, Step, replay

from vtoken.policies import MassNeed
from vtoken.serving.engine import StepReport
from vtoken.serving.front import Output
from vtoken.serving.protocol import SamplingParams, StepRow
from vtoken_torch.engine import TorchEngine
from vtoken_torch.hf.runner import HFRunner

VOCABULARY = 256
TOLERANCE = 1e-4

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # smaller, and every context would give the same tokens
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def family(name: str, **changes: Any) -> Any:
    """A configuration of a model family, tiny."""
    from transformers import AutoConfig

    extra = {"sliding_window": None} if name == "mistral" else {}
    return AutoConfig.for_model(name, **SHAPE | extra | changes)


def build(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).float().eval()


@cache
def tiny_model(name: str) -> Any:
    return build(family(name))


@cache
def eager_model(name: str) -> Any:
    """The same weights, attended to by transformers itself."""
    model = copy.deepcopy(build(family(name)))
    model.set_attn_implementation("eager")
    return model


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Watched(HFRunner):
    """Before each step, everything that is not alive becomes NaN: dead slots, free blocks, the null block."""

    def __init__(self, model: Any, decode_kernel: bool | None = None) -> None:
        super().__init__(model, decode_kernel)
        self.last_logits = torch.empty(0)

    def logits(self, rows: Sequence[StepRow]) -> torch.Tensor:
        store = self.store
        is_dead = torch.ones(store.spec.num_slots, dtype=torch.bool)
        is_dead[store._src] = False  # tokens that are about to be moved
        for row in range(store.spec.max_num_reqs):
            is_dead[store.tables.live_slots(row)] = False
        store.cache.bits.view(torch.float32)[:, is_dead] = torch.nan
        self.last_logits = super().logits(rows)
        return self.last_logits


class World:
    """An engine over a tiny model; ``check`` compares all that it did with transformers."""

    def __init__(self, name: str = "llama", decode_kernel: bool | None = None, **settings: Any) -> None:
        self.name = name
        runner = Watched(tiny_model(name), decode_kernel)
        defaults = {"block_size": 4, "num_blocks": 65, "max_num_seqs": 4, "chunk_tokens": 16, "max_model_len": 256}
        self.engine = TorchEngine(runner, on_step=self._note, **defaults | settings)
        self.runner = runner
        self.steps: dict[int, list[Step]] = defaultdict(list)
        self.is_sampled: dict[int, list[bool]] = defaultdict(list)
        self.logits: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.reports: list[StepReport] = []

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int = 10) -> list[Output]:
        return self.engine.generate(prompts, SamplingParams(max_tokens=max_tokens), progress=False)

    def replay(self, index: int, tokens: Sequence[int], need: MassNeed | None = None) -> Replay:
        events = self.engine.trace.events.get(index, [])
        return replay(eager_model(self.name), tokens, self.steps[index], events, self.is_sampled[index], need)

    def check(self, outputs: Sequence[Output]) -> None:
        """Tokens and logits of all requests equal those of the masked run."""
        for index, output in enumerate(outputs):
            got = self.replay(index, [*output.prompt_token_ids, *output.token_ids])
            assert got.tokens == list(output.token_ids), (index, got.tokens, output)
            difference = (torch.stack(self.logits[index]) - got.logits).abs().max().item()
            assert difference <= TOLERANCE, (index, difference)

    def _note(self, report: StepReport) -> None:
        self.reports.append(report)
        sampled = iter(self.runner.last_logits)
        for index, row in report.rows:
            self.steps[index].append((row.start, row.start + len(row.token_ids)))
            self.is_sampled[index].append(row.sampling is not None)
            if row.sampling is not None:
                self.logits[index].append(next(sampled))
