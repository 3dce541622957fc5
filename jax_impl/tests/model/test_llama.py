import numpy as np
import pytest

from vtoken_jax.model.config import ModelConfig
from vtoken_jax.model.llama import _frequencies

LLAMA_31_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(("rope", "bands"), [(LLAMA_31, (29, 6, 29)), (LINEAR, (0, 0, 64))])
def test_rotary_frequencies_are_those_of_transformers(rope, bands) -> None:
    """``bands``: frequencies that are kept, blended, and divided by the factor."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = transformers.LlamaConfig(**LLAMA_31_8B, max_position_embeddings=131072, rope_parameters=dict(rope))
    expected, attention_scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, "cpu")

    found = _frequencies(ModelConfig.from_mapping(theirs.to_dict()))

    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)
    assert attention_scale == 1
    stretch = rope["rope_theta"] ** -(np.arange(64) / 64) / found
    is_kept, is_divided = np.isclose(stretch, 1), np.isclose(stretch, rope["factor"])
    assert (is_kept.sum(), (~is_kept & ~is_divided).sum(), is_divided.sum()) == bands
