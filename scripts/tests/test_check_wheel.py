from pathlib import Path

import pytest
from check_wheel import ROOT, entry_point_modules, problems, source_files

PACKAGES = ["shared/vtoken", "conformance/vtoken_conformance"]
GOOD = {
    "vtoken/__init__.py",
    "vtoken/py.typed",
    "vtoken/cli.py",
    "vtoken_conformance/__init__.py",
    "vtoken_conformance/py.typed",
    "vtoken_conformance/cases/table/append.json",
}
WHEEL = GOOD | {"vtoken-0.1.0.dist-info/METADATA", "vtoken-0.1.0.dist-info/licenses/LICENSE"}
MODULES = {"console script: vtoken": "vtoken.cli", "vtoken.commands: conformance": "vtoken_conformance"}


def faults(names: set[str], expected: set[str] = GOOD, modules: dict[str, str] = MODULES) -> list[str]:
    return problems(names, expected, PACKAGES, modules)


def test_a_good_wheel_has_no_faults() -> None:
    assert faults(WHEEL) == []


@pytest.mark.parametrize("lost", sorted(GOOD))
def test_each_file_that_is_lost_is_named(lost: str) -> None:
    assert f"missing: {lost}" in faults(WHEEL - {lost})


def test_a_case_that_an_ignore_rule_dropped_is_named() -> None:
    case = "vtoken_conformance/cases/table/evict.json"

    assert faults(WHEEL, GOOD | {case}) == [f"missing: {case}"]


def test_a_wheel_without_any_case_is_refused_even_if_the_folder_has_none() -> None:
    rest = {name for name in WHEEL if "cases" not in name}

    assert faults(rest, GOOD & rest) == ["missing: any case under vtoken_conformance/cases/"]


def test_a_package_without_its_typing_marker_is_refused_even_if_the_folder_has_none() -> None:
    assert faults(WHEEL - {"vtoken/py.typed"}, GOOD - {"vtoken/py.typed"}) == ["missing: vtoken/py.typed"]


def test_a_wheel_without_licence_is_refused() -> None:
    assert faults(WHEEL - {"vtoken-0.1.0.dist-info/licenses/LICENSE"}) == ["missing: LICENSE"]


@pytest.mark.parametrize(
    "stray", ["vtoken/tests/test_cli.py", "tests/test_cli.py", "vtoken/__pycache__/cli.pyc", "scripts/check_wheel.py"]
)
def test_what_does_not_belong_is_named(stray: str) -> None:
    assert faults(WHEEL | {stray}) == [f"does not belong: {stray}"]


def test_an_entry_point_without_its_module_is_named() -> None:
    modules = {"vtoken.commands: demo": "vtoken_bench.demo.cli"}

    assert faults(WHEEL, modules=modules) == [
        "entry point vtoken.commands: demo names vtoken_bench.demo.cli, which is not in the wheel"
    ]


def test_entry_points_of_scripts_and_groups_are_read() -> None:
    project = {"scripts": {"vtoken": "vtoken.cli:main"}, "entry-points": {"g": {"a": "b.c:d"}}}

    assert entry_point_modules(project) == {"console script: vtoken": "vtoken.cli", "g: a": "b.c"}


def test_the_expectation_comes_from_the_disk_without_caches(tmp_path: Path) -> None:
    for name in ("shared/vtoken/a.py", "shared/vtoken/cases/x.json", "shared/vtoken/__pycache__/a.pyc", "shared/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")

    assert source_files(tmp_path, ["shared/vtoken"]) == {"vtoken/a.py", "vtoken/cases/x.json"}


def test_the_expectation_for_this_repository_holds_its_core() -> None:
    assert {"vtoken/__init__.py", "vtoken/py.typed", "vtoken/cli.py"} <= source_files(ROOT, ["shared/vtoken"])
