import re
from pathlib import Path

import vtoken_jax
from vtoken_jax import compat


def test_the_gpu_interpreter_is_there_from_0_11_1_on():
    """Tests of the Mosaic kernel are skipped without it; where it must be, they may not be."""
    assert (compat.mosaic_interpreter() is not None) == (compat.VERSION >= (0, 11, 1))


def test_no_other_module_asks_for_a_version():
    package = Path(vtoken_jax.__file__).parent
    asking = {path.name for path in package.rglob("*.py") if re.search(r"__version_info__|VERSION", path.read_text())}
    assert asking == {"compat.py"}
