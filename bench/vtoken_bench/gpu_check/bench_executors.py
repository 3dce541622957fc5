"""``vtoken bench executors`` on the GPU: a suite of its own, which checks before it times."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vtoken.cli import main
from vtoken_bench.gpu_check.ground import Ground, LeftOut
from vtoken_bench.suites import suites
from vtoken_bench.timing import Spread

__all__ = ["bench_executors"]


def bench_executors(ground: Ground) -> None:
    """Runs the suite at one shape, as far as the step's time goes, and keeps its rows."""
    if "executors" not in suites():
        raise LeftOut("there is no suite 'executors' here")
    if ground.is_dry:
        raise LeftOut("not rehearsed: the suite's own tests do that")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "executors.json"
        shape = ("--batch", "8", "--live", "512", "--dtype", "bf16", "--repeats", "3")
        code = main(["bench", "executors", "--device", ground.device, *shape, "--json", str(path)])
        ground.check("vtoken bench executors", code == 0, f"exit code {code}")
        for row in json.loads(path.read_text())["rows"] if path.exists() else ():
            _keep(ground, row)


def _keep(ground: Ground, row: dict[str, Any]) -> None:
    value = row["value"]
    low, high = row.get("spread") or (value, value)
    ground.figure(row["name"], row["unit"], Spread(value, low, high), **row.get("params", {}))
