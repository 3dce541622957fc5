"""The demo's first table: native, naive and vToken inside real vLLM, under one small pool.

``vtoken bench pressure`` does the work, in a process of its own: vLLM wants its environment before it is imported.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vtoken.errors import SpecError

__all__ = ["POLICY", "has_vllm", "pressure_record"]

POLICY = "random"
"""Takes single tokens here and there, as scores do, and costs nothing to ask."""

_LOAD = {
    "--policy": POLICY,
    "--requests": 12,
    "--prompt": 256,
    "--output": 128,
    "--blocks": 50,
    "--kv-budget": 127,
    "--repeats": 1,
}


def has_vllm() -> bool:
    """Whether vLLM can be imported, found without importing it."""
    return find_spec("vllm") is not None


def pressure_record(model: Path | None, **load: int | str) -> dict[str, Any]:
    """The benchmark's record (``pressure_report``).

    Args:
        model: a Llama-family folder, or None for SmolLM2-135M.
        load: options of the benchmark in place of the demo's, such as ``requests=4``.

    Raises:
        SpecError: vLLM is not installed, refuses the model, or does not start with it; carries its last line.
    """
    options = {**_LOAD, **{f"--{key.replace('_', '-')}": value for key, value in load.items()}}
    if model is not None:
        options["--model"] = str(model)
    with TemporaryDirectory(prefix="vtoken-pressure-") as folder:
        out = Path(folder) / "pressure.json"
        words = [str(word) for option in options.items() for word in option]
        done = subprocess.run(
            [sys.executable, "-m", "vtoken", "bench", "pressure", *words, "--json", str(out)],
            stdout=subprocess.DEVNULL,
            stderr=None if sys.stderr.isatty() else subprocess.PIPE,  # its bar belongs on the terminal
            text=True,
            check=False,
        )
        if not out.exists():
            raise SpecError(f"no comparison inside vLLM: {_last_line(done)}")
        record: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return record


def _last_line(done: "subprocess.CompletedProcess[str]") -> str:
    lines = [line for line in (done.stderr or "").splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit code {done.returncode}, see above"
