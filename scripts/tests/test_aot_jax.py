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
    *) echo "ERROR: {pip_says}" && exit 1 ;;
esac
"""


def run(folder: Path, python: str) -> tuple[int, str]:
    """The script in a tree of its own, where it may make its environment."""
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "aot_jax.sh", folder / "scripts")
    (folder / "pyproject.toml").write_text("")
    command = ["bash", str(folder / "scripts" / "aot_jax.sh")]
    environment = os.environ | {"VTOKEN_AOT_PYTHON": python}
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
    python = tmp_path / "python3.13"
    python.write_text(FAKE_PYTHON.format(pip_says=pip_says))
    python.chmod(0o755)
    found, said = run(tmp_path, str(python))
    assert found == code
    assert says in said
