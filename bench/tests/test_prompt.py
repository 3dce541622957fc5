import heapq
import inspect
from pathlib import Path

import pytest

from vtoken.errors import SpecError
from vtoken_bench.demo.prompt import encode_prompt, read_prompt
from vtoken_bench.models import LoadedModel, load_model


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> LoadedModel:
    return load_model(tiny_folder)


def test_the_built_in_prompt_is_pythons_own_source() -> None:
    assert read_prompt(None) == ("heapq.py", inspect.getsource(heapq))


def test_a_file_is_taken_whole_unless_it_is_cut(model: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "tale.txt").write_text("once upon a time")
    name, text = read_prompt(tmp_path / "tale.txt")

    assert name == "tale.txt"
    assert model.tokenizer.decode(encode_prompt(model, name, text, None, 5)) == "once upon a time"
    assert model.tokenizer.decode(encode_prompt(model, name, text, 4, 5)) == "once"


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "is empty"), (b" \n\t", "is empty"), (b"\xff\xfe\xfa", "is no UTF-8 text")]
)
def test_a_file_without_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(SpecError, match=message):
        read_prompt(tmp_path / "bad")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no such prompt file: .*gone\.txt"):
        read_prompt(tmp_path / "gone.txt")


def test_a_folder_is_no_prompt(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"prompt file .* cannot be read \(Is a directory\): give a text file"):
        read_prompt(tmp_path)


def test_a_prompt_may_fill_the_model_and_not_more(model: LoadedModel) -> None:
    assert len(encode_prompt(model, "p", "x" * 200, None, 56)) == 200
    with pytest.raises(SpecError, match=r"200 tokens and 57 are to follow.* 256 positions: --prompt-tokens 199"):
        encode_prompt(model, "p", "x" * 200, None, 57)
    with pytest.raises(SpecError, match="ask for fewer --tokens"):
        encode_prompt(model, "p", "x", None, 256)


def test_a_prompt_shorter_than_asked_for_is_refused(model: LoadedModel) -> None:
    with pytest.raises(SpecError, match="p has 3 tokens, not 4"):
        encode_prompt(model, "p", "xxx", 4, 1)
