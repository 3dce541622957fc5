import os

# Tests compile far more than they run. Read when JAX first asks for a device.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

import jax
import numpy as np
import pytest

from vtoken.executor import KVSpec
from vtoken.paged_executor import PagedExecutor
from vtoken.serving.protocol import SamplingParams, StepRow

_COMPILED: list[str] = []


def _on_event(event: str, duration: float, **about: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _COMPILED.append(str(about["fun_name"]))


jax.monitoring.register_event_duration_secs_listener(_on_event)


@pytest.fixture
def num_compiles():
    """Counts compilations of this process, of functions with ``part`` in their names; none is counted twice."""
    return lambda part="": sum(part in name for name in _COMPILED)


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


# -- tiny random models, and a driver that writes requests' tokens through a runner without a scheduler ---------------

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": ("Llama", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": None, "rms_norm_eps": 1e-3}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
}


@pytest.fixture(scope="session")
def hf_models(tmp_path_factory):
    """Family to its model and folder; every weight is random, biases and norms too, which HF would leave at 0 and 1."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    made = {}

    def make(family, max_shard_size="5GB"):
        if (family, max_shard_size) not in made:
            prefix, changes = FAMILIES[family]
            with torch.random.fork_rng():
                torch.manual_seed(3)
                config = getattr(transformers, f"{prefix}Config")(**SMALL | changes)
                model = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.3)
            folder = tmp_path_factory.mktemp("models") / family
            model.save_pretrained(folder, max_shard_size=max_shard_size)
            made[family, max_shard_size] = model, folder
        return made[family, max_shard_size]

    return make


class Driver(PagedExecutor):
    """Requests over a runner's store: appends register tokens, and the runner's forward writes them."""

    name = "driver"

    def __init__(self, runner, need=None, **spec):
        self.runner = runner
        self.allocate(runner.config.kv_spec(**{"dtype": "float32", "block_size": 4, "max_num_reqs": 4, **spec}))
        if need is not None:
            runner.collect_mass(need)

    def _make_store(self, spec):
        return self.runner.make_store(spec)

    def row(self, req_id, token_ids, sampling=None, num_sampled=0):
        table = self.tables[req_id]
        first, start = table.cursor, table.num_computed_tokens
        new_blocks = self.pool.allocate(table.num_blocks_needed(len(token_ids)))
        table.sync_new_tokens([*table.block_ids, *new_blocks], start + len(token_ids))
        self._sync_row(table)
        slots = [table.slot_at(index) for index in range(first, first + len(token_ids))]
        return StepRow(self._rows[req_id], token_ids, start, slots, sampling, num_sampled)

    def step(self, *asked, sampling=None):
        return self.runner.step([self.row(req_id, token_ids, sampling) for req_id, token_ids in asked])

    def greedy(self, req_id, prompt, count, chunk=None):
        """``count`` tokens after the prompt, which is written in chunks."""
        self.admit(req_id)
        params, size = SamplingParams(max_tokens=count), chunk or len(prompt)
        starts = range(0, len(prompt), size)
        for start in starts[:-1]:
            self.step((req_id, prompt[start : start + size]))
        tokens = self.step((req_id, prompt[starts[-1] :]), sampling=params)
        while len(tokens) < count:
            tokens += self.step((req_id, tokens[-1:]), sampling=params)
        return tokens


@pytest.fixture
def make_driver():
    return Driver
