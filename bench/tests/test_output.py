import errno
from collections import namedtuple
from pathlib import Path

import pytest

from vtoken.errors import SpecError
from vtoken_bench import models
from vtoken_bench.demo import output
from vtoken_bench.demo.output import staged


def test_files_appear_when_the_block_ends_and_not_before(tmp_path: Path) -> None:
    out = tmp_path / "new" / "results"
    with staged(out) as staging:
        (staging / "a.txt").write_text("a")
        assert not out.exists()

    assert [path.name for path in out.iterdir()] == ["a.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_older_files_are_replaced_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    (tmp_path / "mine.txt").write_text("mine")
    with staged(tmp_path) as staging:
        (staging / "a.txt").write_text("new")

    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.txt": "new", "mine.txt": "mine"}


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(28, "No space left on device"), SpecError("no")])
def test_a_block_that_stops_leaves_everything_as_it_was(tmp_path: Path, stop: BaseException) -> None:
    def write_and_stop(out: Path) -> None:
        with staged(out) as staging:
            (staging / "a.txt").write_text("new")
            raise stop

    (tmp_path / "a.txt").write_text("old")
    for out in (tmp_path, tmp_path / "new" / "results"):
        with pytest.raises(type(stop)):
            write_and_stop(out)

    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.txt": "old"}


@pytest.mark.parametrize("beneath", ["", "results"])
def test_a_file_in_the_way_is_named_before_any_work(tmp_path: Path, beneath: str) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(SpecError, match=r"--out .*: .*file is a file: name a folder"),
        staged(tmp_path / "file" / beneath),
    ):
        pytest.fail("the block must not run")


def test_a_full_disk_is_told_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(models.shutil, "disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(SpecError, match="no room for the report"), staged(tmp_path / "results"):
        pytest.fail("the block must not run")

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_files_is_named_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(output, "TemporaryDirectory", refuse)
    with (
        pytest.raises(SpecError, match=r"--out .*new: .* takes no files \(Read-only file system\): give another --out"),
        staged(tmp_path / "new"),
    ):
        pytest.fail("the block ran")


def test_a_file_that_cannot_be_written_is_named_where_it_was_to_be(tmp_path: Path) -> None:
    out = tmp_path / "new"
    with pytest.raises(FileNotFoundError) as gone, staged(out) as staging:
        (staging / "gone.txt").read_text()
    assert gone.value.filename == str(out / "gone.txt")

    with pytest.raises(FileNotFoundError) as other, staged(out):
        (tmp_path / "other.txt").read_text()
    assert other.value.filename == str(tmp_path / "other.txt")
