import subprocess
import sys
from importlib import resources


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_without_jax_the_import_fails_with_one_line_that_names_the_extra() -> None:
    done = run("import sys; sys.modules['jax'] = None; import vtoken_jax.executor")

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: vtoken_jax needs jax: pip install 'vtoken[jax]'"


def test_the_import_changes_no_setting_of_jax_and_starts_no_device() -> None:
    done = run(
        "import jax; before = dict(jax.config.values); import vtoken_jax.executor;"
        "import jax._src.xla_bridge as bridge;"
        "assert jax.config.values == before; assert not bridge._backends; print('ok')"
    )

    assert done.stdout == "ok\n", done.stderr


def test_types_are_published() -> None:
    assert resources.files("vtoken_jax").joinpath("py.typed").is_file()
