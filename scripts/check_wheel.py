"""Builds the wheel and checks what is in it: every file of every package, the licence, each entry point; nothing else.

The build obeys .gitignore, so one careless rule there drops the conformance cases without a word. This tells.
"""

import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CASES = "vtoken_conformance/cases/"


def source_files(root: Path, packages: Iterable[str]) -> set[str]:
    """Wheel paths that the packages on disk ask for, such as ``vtoken/types.py``."""
    found = set()
    for package in packages:
        folder = root / package
        for path in folder.rglob("*"):
            relative = path.relative_to(folder.parent)
            if path.is_file() and "__pycache__" not in relative.parts:
                found.add(relative.as_posix())
    return found


def entry_point_modules(project: Mapping[str, Any]) -> dict[str, str]:
    """Module by entry point, such as ``{"vtoken.commands: bench": "vtoken_bench.cli"}``."""
    groups = {"console script": project.get("scripts", {}), **project.get("entry-points", {})}
    return {
        f"{group}: {name}": value.partition(":")[0]
        for group, points in groups.items()
        for name, value in points.items()
    }


def problems(names: set[str], expected: set[str], packages: Iterable[str], modules: Mapping[str, str]) -> list[str]:
    """What is wrong with a wheel that holds ``names``; empty if all is well."""
    tops = {PurePosixPath(package).name for package in packages}
    found = [f"missing: {name}" for name in sorted(expected - names)]
    found += [
        f"missing: {top}/{file}"
        for top in sorted(tops)
        for file in ("__init__.py", "py.typed")
        if f"{top}/{file}" not in expected | names
    ]
    if not any(name.startswith(CASES) for name in names):
        found.append(f"missing: any case under {CASES}")
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        found.append("missing: LICENSE")
    for name in sorted(names):
        parts = PurePosixPath(name).parts
        if {"tests", "__pycache__"} & set(parts) or (parts[0] not in tops and not parts[0].endswith(".dist-info")):
            found.append(f"does not belong: {name}")
    for point, module in modules.items():
        path = module.replace(".", "/")
        if not {f"{path}.py", f"{path}/__init__.py"} & names:
            found.append(f"entry point {point} names {module}, which is not in the wheel")
    return found


def build(root: Path, target: Path) -> Path:
    """Builds the wheel of ``root`` into ``target`` with the tools of this environment."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"wheel: the build failed:\n{done.stdout}{done.stderr}")
    (wheel,) = target.glob("*.whl")
    return wheel


def main() -> int:
    """Returns 0 if the wheel is as it should be, else 1 with one line for each fault."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(ROOT, Path(folder))
        with zipfile.ZipFile(wheel) as archive:
            names = {name for name in archive.namelist() if not name.endswith("/")}
    found = problems(names, source_files(ROOT, packages), packages, entry_point_modules(settings["project"]))
    for line in found:
        print(f"wheel: {line}", file=sys.stderr)
    num_cases = sum(name.startswith(CASES) for name in names)
    print(f"wheel: {wheel.name}: {len(names)} files, {num_cases} cases, {len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
