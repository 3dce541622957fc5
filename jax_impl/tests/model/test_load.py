import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from vtoken.errors import SpecError
from vtoken_jax.model.config import ModelConfig
from vtoken_jax.model.load import load_checkpoint, load_weights, save_checkpoint


def weights(folder, dtype="float32"):
    return load_weights(folder, ModelConfig.from_folder(folder), dtype)[1]


def test_many_files_with_an_index_are_the_same_weights(hf_models, tmp_path) -> None:
    model, whole = hf_models("qwen2")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    same = jax.tree.map(np.array_equal, weights(whole), weights(tmp_path))
    assert all(jax.tree.leaves(same))


def test_weights_are_cast_and_nothing_is_left_at_its_first_value(model_folders) -> None:
    leaves = jax.tree.leaves(weights(model_folders("llama"), "bfloat16"))
    assert {str(leaf.dtype) for leaf in leaves} == {"bfloat16"}
    assert all(len(np.unique(np.asarray(leaf))) > 1 for leaf in leaves)


@pytest.mark.parametrize(("family", "is_tied"), [("qwen2", True), ("llama", False)])
def test_matrices_that_multiply_come_in_tiles_when_asked(model_folders, family, is_tied) -> None:
    config = ModelConfig.from_folder(model_folders(family))
    state = nnx.to_flat_state(load_weights(model_folders(family), config, "float32", in_tiles=True)[1])
    flat = {path for path, leaf in state if leaf.ndim == 2}
    assert flat == (set() if is_tied else {("embedding",)})


@pytest.fixture
def folder(model_folders, tmp_path):
    return shutil.copytree(model_folders("llama"), tmp_path / "copy")


def test_a_truncated_file_is_refused_by_name(folder) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(SpecError, match=r"model\.safetensors does not open: .*: download it again"):
        weights(folder)
    path.unlink()
    with pytest.raises(SpecError, match=r"model\.safetensors does not open"):
        weights(folder)


def test_weights_that_do_not_fit_the_configuration_are_refused_by_name(folder) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"vocab_size": 97}))
    with pytest.raises(SpecError, match=r"embed_tokens.weight has shape \[96, 32\], config.json says \[97, 32\]"):
        weights(folder)
    path.write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(SpecError, match=r"lacks the weight model\.layers\.2\."):
        weights(folder)


def test_a_damaged_index_is_refused(folder) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(SpecError, match="is no index of safetensors files"):
        weights(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_restores_every_bit(model_folders, tmp_path, dtype) -> None:
    source = model_folders("llama")
    config, state = ModelConfig.from_folder(source), weights(source, dtype)
    save_checkpoint(tmp_path / "weights", config, dtype, state)

    restored = load_checkpoint(tmp_path / "weights", config, dtype)[1]

    assert {str(leaf.dtype) for leaf in jax.tree.leaves(restored)} == {dtype}
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, restored, state)))


def test_a_checkpoint_of_another_model_or_a_torn_one_is_refused(model_folders, tmp_path) -> None:
    source = model_folders("llama")
    config, state = ModelConfig.from_folder(source), weights(source)
    save_checkpoint(tmp_path / "weights", config, "float32", state)
    with pytest.raises(SpecError, match="holds another model"):
        load_checkpoint(tmp_path / "weights", config, "bfloat16")
    other = ModelConfig.from_folder(model_folders("mistral"))
    with pytest.raises(SpecError, match="holds another model"):
        load_checkpoint(tmp_path / "weights", other, "float32")
    (tmp_path / "weights" / "files.json").unlink()
    with pytest.raises(SpecError, match="is torn"):
        load_checkpoint(tmp_path / "weights", config, "float32")
    with pytest.raises(SpecError, match="nothing holds no weights: give a folder that was saved"):
        load_checkpoint(tmp_path / "nothing", config, "float32")
    with pytest.raises(SpecError, match="exists: give a new folder"):
        save_checkpoint(tmp_path / "weights", config, "float32", state)
