import json
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


def test_missing_folders_of_an_output_are_made_and_no_output_is_fine(tmp_path: Path) -> None:
    check_output(tmp_path / "new" / "deep" / "a.json", None)

    assert (tmp_path / "new" / "deep").is_dir()


def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(SpecError, match="is a folder: name a file"):
        check_output(tmp_path)
    with pytest.raises(SpecError, match="lies beneath a file"):
        check_output(tmp_path / "file" / "a.json")
