import argparse
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib import metadata

import pytest

from vtoken import cli
from vtoken.cli import Command, main
from vtoken.errors import SpecError

Capture = pytest.CaptureFixture[str]
Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Replaces the installed commands; an exception in the place of a plugin stands for its failed import."""

    def put(**commands: object) -> None:
        def get(_: str, name: str) -> object:
            if name not in commands:
                raise SpecError(f"unknown command {name!r}")
            if isinstance(commands[name], Exception):
                raise SpecError(f"command {name!r} does not load: {commands[name]}")
            return commands[name]

        good = {name: plugin for name, plugin in commands.items() if not isinstance(plugin, Exception)}
        bad = {name: SpecError(str(plugin)) for name, plugin in commands.items() if isinstance(plugin, Exception)}
        monkeypatch.setattr(cli, "plugin_names", lambda _: sorted(commands))
        monkeypatch.setattr(cli, "get_plugin", get)
        monkeypatch.setattr(cli, "load_plugins", lambda _: (good, bad))

    return put


def command(run: Callable[[argparse.Namespace], int], text: str = "does a thing") -> Command:
    return Command(help=text, add_arguments=lambda parser: parser.add_argument("--number", type=int) and None, run=run)


def raiser(error: BaseException) -> Command:
    def run(_: argparse.Namespace) -> int:
        raise error

    return command(run)


def exit_code(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


def test_help_lists_every_command_with_its_line(install: Install, capsys: Capture) -> None:
    install(bake=command(lambda _: 0, "bakes bread"), boil=command(lambda _: 0, "boils water"))

    assert exit_code(["--help"]) == 0

    out, err = capsys.readouterr()
    listed = [line.split(maxsplit=1) for line in out.splitlines() if line.startswith("    b")]
    assert listed == [["bake", "bakes bread"], ["boil", "boils water"]]
    assert err == ""


def test_help_survives_a_broken_command_and_names_it_in_one_line(install: Install, capsys: Capture) -> None:
    install(bake=command(lambda _: 0, "bakes bread"), burnt=RuntimeError("smoke"), odd="not a command")

    assert exit_code(["--help"]) == 0

    out, err = capsys.readouterr()
    assert "bakes bread" in out
    assert err.splitlines() == [
        "vtoken: command 'burnt' is not available: smoke",
        "vtoken: command 'odd' is not available: the entry point 'odd' is a str: make it a vtoken.cli.Command",
    ]


def test_a_command_runs_beside_a_broken_one_without_a_word_about_it(install: Install, capsys: Capture) -> None:
    install(bake=command(lambda parsed: parsed.number), burnt=RuntimeError("smoke"))

    assert main(["bake", "--number", "1"]) == 1
    assert capsys.readouterr().err == ""


def test_running_a_broken_command_says_why_in_one_line(install: Install, capsys: Capture) -> None:
    install(burnt=RuntimeError("smoke"))

    assert main(["burnt"]) == 2
    assert capsys.readouterr().err == "vtoken burnt: command 'burnt' does not load: smoke\n"


def test_a_command_whose_arguments_are_broken_does_not_break_the_list(install: Install, capsys: Capture) -> None:
    def broken(_: argparse.ArgumentParser) -> None:
        raise RuntimeError("smoke")

    install(bake=command(lambda _: 0), burnt=Command("burns", broken, lambda _: 0))

    assert exit_code(["--help"]) == 0
    assert "burns" in capsys.readouterr().out


def test_the_exit_code_is_the_commands(install: Install) -> None:
    install(good=command(lambda _: 0), bad=command(lambda _: 1))

    assert [main(["good"]), main(["bad"])] == [0, 1]


def test_a_command_may_take_what_it_does_not_know(install: Install) -> None:
    seen: list[tuple[str, list[str]]] = []

    def run(arguments: argparse.Namespace) -> int:
        seen.append((arguments.colour, arguments.rest))
        return 0

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--colour")

    install(wide=Command("takes all", add, run, takes_rest=True), narrow=Command("takes its own", add, run))
    words = ["A", "--port", "80", "--col", "x", "-tp=2", "--", "--colour", "blue"]
    assert main(["wide", *words[:3], "--colour", "red", *words[3:]]) == 0
    assert seen == [("red", words)]
    assert exit_code(["narrow", "--colour", "red", "--port", "80"]) == 2


def test_bad_usage_ends_with_2(install: Install, capsys: Capture) -> None:
    install(bake=command(lambda _: 0))

    assert [exit_code([]), exit_code(["bake", "--what"]), exit_code(["bake", "--number", "x"])] == [2, 2, 2]
    assert "--number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (SpecError("flour=-1: give at least 0"), 2, "vtoken bake: flour=-1: give at least 0"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (FileNotFoundError(2, "No such file", "x.json"), 2, "vtoken bake: [Errno 2] No such file: 'x.json'"),
        (OSError("\nno such model\nmore talk"), 2, "vtoken bake: no such model"),
        (MemoryError(), 2, "vtoken bake: out of memory: ask for smaller sizes"),
    ],
)
def test_an_expected_error_is_one_line(
    install: Install, capsys: Capture, error: Exception, code: int, line: str
) -> None:
    install(bake=raiser(error))

    assert main(["bake"]) == code
    assert capsys.readouterr().err == line + "\n"


def test_a_package_missing_at_run_time_names_the_extra(install: Install, capsys: Capture) -> None:
    install(bake=raiser(ModuleNotFoundError("No module named 'gguf'", name="gguf")))

    assert main(["bake"]) == 2
    assert capsys.readouterr().err == "vtoken bake: No module named 'gguf': pip install 'vtoken[bench]'\n"


def test_a_bug_of_ours_keeps_its_traceback(install: Install) -> None:
    install(bake=raiser(ModuleNotFoundError("No module named 'vtoken.nowhere'", name="vtoken.nowhere")))
    with pytest.raises(ModuleNotFoundError):
        main(["bake"])

    install(bake=raiser(RuntimeError("INV-2")))
    with pytest.raises(RuntimeError):
        main(["bake"])


def test_an_unknown_command_suggests_the_closest(capsys: Capture) -> None:
    assert main(["conformence"]) == 2
    assert capsys.readouterr().err == "vtoken: unknown command 'conformence': did you mean 'conformance'?\n"


def test_version_is_the_distributions_and_loads_no_command(install: Install, capsys: Capture) -> None:
    install(burnt=RuntimeError("smoke"))

    assert exit_code(["--version"]) == 0

    assert tuple(capsys.readouterr()) == (f"vtoken {metadata.version('vtoken')}\n", "")


def test_help_imports_no_heavy_package() -> None:
    program = (
        "import sys\n"
        "from vtoken.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "print('heavy:', sorted({'torch', 'jax', 'flax', 'transformers', 'matplotlib', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "heavy: []"


def program_of(run: str) -> list[str]:
    """A process whose only command runs these lines."""
    program = (
        "import sys; from vtoken import cli\n"
        f"def run(_):\n{textwrap.indent(run, '    ')}\n"
        "cli.get_plugin = lambda *_: cli.Command('writes', lambda _: None, run)\n"
        "sys.exit(cli.main(['writes']))"
    )
    return [sys.executable, "-c", program]


def test_a_small_output_that_nobody_reads_leaves_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(program_of("print('x')\nreturn 0"), stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)

    assert (done.returncode, done.stderr) == (141, b"")


def test_an_ascii_terminal_shows_a_question_mark_for_what_it_lacks() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(program_of("print('caf\\xe9')\nreturn 0"), capture_output=True, check=False, env=environment)

    assert (done.returncode, done.stdout, done.stderr) == (0, b"caf?\n", b"")


@pytest.mark.parametrize(
    "run",
    [
        "while True: print('x' * 1000)",
        "from rich.console import Console\nwhile True: Console().print('x' * 1000)",
    ],
)
def test_a_reader_that_closes_early_leaves_no_traceback(run: str) -> None:
    if "rich" in run:
        pytest.importorskip("rich")
    writer = subprocess.Popen(program_of(run), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with writer:
        assert writer.stdout is not None
        assert writer.stderr is not None
        writer.stdout.readline()
        writer.stdout.close()
        errors = writer.stderr.read()

    assert (writer.returncode, errors) == (141, b"")
