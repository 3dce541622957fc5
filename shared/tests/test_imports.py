import ast
import sys
from pathlib import Path

import pytest

import vtoken

PACKAGE = Path(vtoken.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


def imported_packages(source: str) -> set[str]:
    """Top-level names of all imports in a module, those inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_vtoken_imports_the_standard_library_alone(path: Path) -> None:
    assert imported_packages(path.read_text()) - sys.stdlib_module_names - {"vtoken"} == set()


def test_the_check_sees_an_import_inside_a_function() -> None:
    assert imported_packages("def f():\n    import numpy.linalg\n    from torch.cuda import Event") == {
        "numpy",
        "torch",
    }
