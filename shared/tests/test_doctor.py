import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vtoken import doctor
from vtoken.cli import main
from vtoken.errors import SpecError


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A world without device probes whose plugin groups all hold what the test puts in."""
    states: dict[str, Any] = {}

    def load(_: str) -> tuple[dict[str, Any], dict[str, Any]]:
        failed = {name: state for name, state in states.items() if isinstance(state, Exception)}
        return {name: state for name, state in states.items() if name not in failed}, failed

    monkeypatch.setattr(doctor, "load_plugins", load)
    monkeypatch.setattr(doctor, "_DEVICE_PROBES", {})
    return states


def failure(cause: Exception) -> SpecError:
    error = SpecError(str(cause))
    error.__cause__ = cause
    return error


def test_a_plugin_that_is_broken_is_named_with_its_reason_and_fails_the_check(plugins: dict[str, Any]) -> None:
    plugins.update(good=object(), broken=failure(RuntimeError("no luck")))

    record = doctor.examine()

    assert record["plugins"]["vtoken.executors"] == {"broken": "failed: no luck", "good": "ok"}
    assert record["ok"] is False
    assert "  broken failed: no luck" in doctor.render(record).splitlines()


def test_a_plugin_whose_extra_is_not_installed_is_no_fault(plugins: dict[str, Any]) -> None:
    plugins.update(torch=failure(ModuleNotFoundError("vtoken_torch needs torch", name="torch")))

    record = doctor.examine()

    assert record["plugins"]["vtoken.executors"] == {"torch": "not installed: vtoken_torch needs torch"}
    assert record["ok"] is True


def test_a_library_that_is_not_installed_names_its_extra(
    plugins: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(doctor._LIBRARIES, "torch", ("no-such-distribution",))

    record = doctor.examine()

    assert record["libraries"]["torch"] is None
    assert record["missing_extras"]["torch"] == "torch"
    assert "no torch: pip install 'vtoken[torch]'" in doctor.render(record).splitlines()


def test_a_library_that_crashes_on_import_is_told_and_not_fatal(
    plugins: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_DEVICE_PROBES", {"numpy": "raise SystemError('driver too old')"})

    record = doctor.examine()

    assert record["devices"] == {"numpy": "failed: SystemError: driver too old (exit 1)"}
    assert record["ok"] is False


def test_a_library_that_hangs_on_import_is_told_and_not_fatal(
    plugins: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 120)

    monkeypatch.setattr(doctor, "_DEVICE_PROBES", {"numpy": "pass"})
    monkeypatch.setattr(doctor.subprocess, "run", hang)

    assert doctor.examine()["devices"] == {"numpy": "failed: no answer within 120 s"}


def compiler_line(record: dict[str, Any]) -> str:
    (told,) = [line for line in doctor.render(record).splitlines() if line.startswith("c++")]
    return told


def test_the_compiler_is_named_as_a_shell_takes_it(plugins: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "compiler", lambda: ["/opt/my tools/g++", "-O3"])

    record = doctor.examine()

    assert record["compiler"] == ["/opt/my tools/g++", "-O3"]
    assert compiler_line(record) == "c++           '/opt/my tools/g++' -O3"


@pytest.mark.parametrize(
    ("cxx", "reason"),
    [("", "no C++ compiler (c++, g++, clang++)"), ("/no/such/g++", "CXX=/no/such/g++ is no command")],
)
def test_without_a_compiler_reason_cost_and_remedy_are_told(
    plugins: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cxx: str, reason: str
) -> None:
    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setenv("PATH", str(tmp_path))

    record = doctor.examine()

    cost = "without a C++ compiler host moves, and JAX's appends, take about twice as long"
    assert record["compiler"] is None
    assert compiler_line(record).startswith(f"c++           {reason}; {cost}: install one")
    assert record["ok"] is True


def test_the_json_file_holds_what_is_printed(
    plugins: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins.update(good=object())
    target = tmp_path / "doctor.json"

    assert main(["doctor", "--json", str(target)]) == 0

    record = json.loads(target.read_text())
    assert record["schema"] == "vtoken/doctor/1"
    assert record["python"] == sys.version.split()[0]
    assert record["libraries"]["vtoken"] == "0.1.0"
    assert capsys.readouterr().out == doctor.render(record) + "\n"


def test_a_json_file_that_cannot_be_is_refused_before_anything_is_looked_at(
    plugins: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json", str(tmp_path / "gone" / "doctor.json")]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert "no such folder" in err
    assert list(tmp_path.iterdir()) == []


def test_something_broken_ends_with_1(plugins: dict[str, Any]) -> None:
    plugins.update(broken=failure(RuntimeError("no luck")))

    assert main(["doctor"]) == 1


@pytest.mark.parametrize("library", sorted(doctor._DEVICE_PROBES))
def test_the_device_probe_of_each_library_answers_here(library: str) -> None:
    pytest.importorskip(library)

    assert not doctor._device(library).startswith("failed")
