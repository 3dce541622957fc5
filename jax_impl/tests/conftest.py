import json
import os
import sys
from pathlib import Path

# Tests compile far more than they run; one asks for a second device. Read when JAX first asks for a device.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0 --xla_force_host_platform_device_count=2"
)

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parent))  # for jax_dense_llama, under importlib mode

from jax_dense_llama import DenseLlama

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
    "llama": {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 16, "sliding_window": None, "rms_norm_eps": 1e-3},
    "qwen2": {"tie_word_embeddings": True},
}


def _shapes(family, config):
    """Name to shape of each weight, as in a Hugging Face folder."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    wide, narrow = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    matrices = {
        "self_attn.q_proj": (wide, hidden, family != "mistral"),
        "self_attn.k_proj": (narrow, hidden, family != "mistral"),
        "self_attn.v_proj": (narrow, hidden, family != "mistral"),
        "self_attn.o_proj": (hidden, wide, family == "llama"),
        "mlp.gate_proj": (inner, hidden, family == "llama"),
        "mlp.up_proj": (inner, hidden, family == "llama"),
        "mlp.down_proj": (hidden, inner, family == "llama"),
    }
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in (f"model.layers.{index}" for index in range(config["num_hidden_layers"])):
        shapes |= {f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        for name, (num_out, num_in, has_bias) in matrices.items():
            shapes |= {f"{layer}.{name}.weight": (num_out, num_in)}
            shapes |= {f"{layer}.{name}.bias": (num_out,)} if has_bias else {}
    is_tied = config.get("tie_word_embeddings", False)
    return shapes if is_tied else shapes | {"lm_head.weight": shapes["model.embed_tokens.weight"]}


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory):
    """Family to a folder as Hugging Face has it, made without PyTorch; every weight is random, biases and norms too."""
    made = {}

    def make(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp("models") / family
            made[family].mkdir()
            config, rng = SMALL | FAMILIES[family] | {"model_type": family}, np.random.default_rng(3)
            (made[family] / "config.json").write_text(json.dumps(config))
            weights = {
                name: ((0.2 if len(shape) > 1 else 0.3) * rng.standard_normal(shape) + name.endswith("norm.weight"))
                for name, shape in _shapes(family, config).items()
            }
            save_file(
                {name: weight.astype(np.float32) for name, weight in weights.items()},
                made[family] / "model.safetensors",
                metadata={"format": "pt"},
            )
        return made[family]

    return make


@pytest.fixture(scope="session")
def dense_llama(model_folders):
    """The tiny Llama as an oracle."""
    return DenseLlama(model_folders("llama"))


@pytest.fixture(scope="session")
def hf_models(model_folders):
    """Family to Hugging Face's model of the folder, and the folder."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    made = {}

    def make(family):
        folder = model_folders(family)
        if family not in made:
            load = transformers.AutoModelForCausalLM.from_pretrained
            made[family], info = load(folder, dtype=torch.float32, output_loading_info=True)
            assert not any(info.values()), info
        return made[family], folder

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
