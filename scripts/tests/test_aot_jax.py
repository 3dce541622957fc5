"""When the ahead-of-time checks of JAX are skipped, and when they fail."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from check_wheel import ROOT

FAKE_PYTHON = """\
#!/bin/sh
case "$*" in
    -c*) exit 0 ;;
    "-m venv"*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    --version) echo "Python 3.13.0" ;;
    *) {otherwise} ;;
esac
"""
REFUSES = 'echo "ERROR: {pip_says}" && exit 1'
TELLS = 'echo "ran $*"'


def fake(folder: Path, otherwise: str) -> str:
    """A Python that makes environments of itself, and does ``otherwise`` when it is to run a module."""
    python = folder / "python3.13"
    python.write_text(FAKE_PYTHON.format(otherwise=otherwise))
    python.chmod(0o755)
    return str(python)


def run(folder: Path, python: str, **variables: str) -> tuple[int, str]:
    """The script in a tree of its own, where it may make its environment."""
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "aot_jax.sh", folder / "scripts")
    (folder / "pyproject.toml").write_text("")
    command = ["bash", str(folder / "scripts" / "aot_jax.sh")]
    environment = os.environ | {"VTOKEN_AOT_PYTHON": python} | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout


def test_without_a_python_it_is_skipped_with_the_reason(tmp_path: Path) -> None:
    code, says = run(tmp_path, "/nowhere")
    assert code == 0
    assert "skipped: no Python 3.12 or newer with venv among: /nowhere" in says


@pytest.mark.parametrize(
    ("pip_says", "code", "says"),
    [
        ("No matching distribution found for jax==9", 0, "skipped: a package is not available: ERROR: No matching"),
        ("No space left on device", 1, "failed: .venv-aot is not made; the end of .venv-aot/setup.log: ERROR:"),
    ],
)
def test_packages_that_are_there_and_do_not_install_are_a_failure(
    tmp_path: Path, pip_says: str, code: int, says: str
) -> None:
    found, said = run(tmp_path, fake(tmp_path, REFUSES.format(pip_says=pip_says)))
    assert found == code
    assert says in said


def test_the_mosaic_kernel_runs_in_the_interpreter_in_any_case(tmp_path: Path) -> None:
    mosaic = "jax_impl/tests/test_compat.py", "jax_impl/tests/kernels/test_decode_mosaic.py"
    for chosen, tests in (("all", ("jax_impl/tests",)), ("mosaic", mosaic)):
        folder = tmp_path / chosen
        folder.mkdir()
        code, says = run(folder, fake(folder, TELLS), VTOKEN_AOT_TESTS=chosen)
        ran = [line for line in says.splitlines() if line.startswith("ran ")]
        assert code == 0
        assert ran[0] == "ran -m vtoken_jax.aot"
        assert ran[1].split()[:3] == ["ran", "-m", "pytest"]
        assert ran[1].endswith(f"worksteal {' '.join(tests)}")
        assert all((ROOT / path).exists() for path in tests)
    assert "VTOKEN_AOT_TESTS=mosaic" in (ROOT / ".ci" / "run").read_text()


def test_an_unknown_choice_of_tests_is_refused_with_the_remedy(tmp_path: Path) -> None:
    code, says = run(tmp_path, fake(tmp_path, TELLS), VTOKEN_AOT_TESTS="0")
    assert code == 2
    assert says == "aot-jax: failed: VTOKEN_AOT_TESTS=0: give all or mosaic\n"
