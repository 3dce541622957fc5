"""Benchmarks, the capacity simulation and the demo. Needs the extra ``bench``."""

from vtoken.plugins import require_extra

require_extra(__name__, "bench", "numpy", "rich", "matplotlib")
