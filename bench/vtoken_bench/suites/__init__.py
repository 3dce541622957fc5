"""Benchmark suites: each module of this package is one, named after its file; its ``command`` is a ``Command``.

The modules are imported for ``vtoken bench --help``, so they import heavy packages inside ``run`` only.
"""

import importlib
import pkgutil

from vtoken.cli import Command

__all__ = ["suites"]


def suites() -> dict[str, Command]:
    """All suites by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}").command for name in names}
