import errno
import json
import os
from pathlib import Path

import pytest

from vtoken import report
from vtoken.errors import SpecError
from vtoken.report import check_output, environment, write_bytes, write_json


def test_the_environment_names_what_a_figure_depends_on_and_is_json() -> None:
    record = environment()

    assert {"python", "platform", "cpu", "packages", "git_commit"} <= record.keys()
    assert record["cpu"]
    assert json.loads(json.dumps(record)) == record


def test_no_git_means_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")

    assert environment()["git_commit"] is None


def test_a_checkout_that_does_not_track_this_package_gives_no_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report._git("init", str(tmp_path))
    monkeypatch.setattr(report, "__file__", str(tmp_path / "report.py"))

    assert environment()["git_commit"] is None


def test_a_record_is_written_whole_and_ends_in_a_newline(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"rows": [1, 2.5, None]})

    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == {"rows": [1, 2.5, None]}
    assert text.endswith("}\n")


@pytest.mark.parametrize("record", [{"value": float("nan")}, {"value": object()}])
def test_a_record_that_is_no_json_leaves_the_old_file_and_nothing_else(tmp_path: Path, record: object) -> None:
    write_json(tmp_path / "a.json", "old")

    with pytest.raises((TypeError, ValueError)):
        write_json(tmp_path / "a.json", record)

    assert json.loads((tmp_path / "a.json").read_text()) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bytes(tmp_path / "a", b"old")

    def interrupt(_: Path, __: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_bytes(tmp_path / "a", b"new")

    assert (tmp_path / "a").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_symlink_stays_and_what_it_points_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/a")
    for data in (b"old", b"new"):  # it points to nothing, then to a file
        check_output(tmp_path / "link")
        write_bytes(tmp_path / "link", data)

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "a").read_bytes() == b"new"
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["a"]


@pytest.mark.parametrize("name", ["fifo", "link"])
def test_a_fifo_is_written_straight_to_and_stays(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    check_output(tmp_path / name)  # no reader yet: it must not wait for one
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_bytes(tmp_path / name, b"whole")
        assert os.read(reader, 100) == b"whole"
    finally:
        os.close(reader)

    assert (tmp_path / "fifo").is_fifo()
    assert (tmp_path / "link").is_symlink()


def test_a_write_that_fails_names_the_path_that_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError) as gone:
        write_bytes(tmp_path / "gone" / "a", b"")
    assert gone.value.filename == str(tmp_path / "gone" / "a")

    def full(_: Path, __: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/a'") as filled:
        write_bytes(tmp_path / "a", b"")
    assert filled.value.errno == errno.ENOSPC


def test_a_check_leaves_everything_as_it_is_and_no_output_is_fine(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("old")
    check_output(tmp_path / "a.json", tmp_path / "b.json", None)

    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.json": "old"}


def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(SpecError, match="is a folder: name a file"):
        check_output(tmp_path)
    with pytest.raises(SpecError, match="lies beneath a file"):
        check_output(tmp_path / "file" / "a.json")
    with pytest.raises(SpecError, match=r"new/deep/a\.json: no such folder .*new/deep: make it, or name another"):
        check_output(tmp_path / "new" / "deep" / "a.json")
    with pytest.raises(SpecError, match=r"^\. is a folder \(as an empty name is\): name a file"):
        check_output(Path())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_takes_no_files_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(
        SpecError, match=r"/a\.json cannot be written \(Read-only file system\): name a file in another"
    ):
        check_output(tmp_path / "a.json")
