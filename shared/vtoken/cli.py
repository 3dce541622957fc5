"""The one command ``vtoken``. Its subcommands are the plugins of the entry-point group ``vtoken.commands``."""

import argparse
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from vtoken.errors import SpecError
from vtoken.help_text import HelpFormatter
from vtoken.plugins import COMMANDS, first_line, get_plugin, load_plugins, missing_extra, plugin_names

__all__ = ["Command", "main"]

USAGE, INTERRUPTED, PIPE_CLOSED = 2, 130, 141

_DESCRIPTION = "A policy decides which tokens are dead; vToken decides when and how their memory comes back."
_EPILOG = "`vtoken COMMAND --help` tells a command's options. Exit codes: 0 good, 1 a check failed, 2 bad usage."


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand; its name is the entry point's name.

    The module that holds it is imported for ``vtoken --help``, so it imports heavy packages inside ``run`` only.

    Attributes:
        help: one line for the list of commands.
        add_arguments: adds the command's arguments to its own parser.
        run: does the work; returns 0 (good), 1 (a check failed) or 2 (bad usage). A SpecError becomes one line and 2.
        description: what the command's own help says above its options; ``help`` if empty; see ``help_text``.
        epilog: what it says below them, examples for instance.
        takes_rest: arguments that it does not know are no error; ``run`` finds them as ``rest``, in their order, from a
            ``--`` on with what follows it.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    description: str = ""
    epilog: str = ""
    takes_rest: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``vtoken`` and returns the exit code; usage errors of argparse leave by SystemExit(2)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in arguments if not word.startswith("-")), "")
    label = f"vtoken {name}" if name in plugin_names(COMMANDS) else "vtoken"
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII terminal shows "?" for what it lacks
    try:
        code = _run(arguments, name)
        sys.stdout.flush()  # a reader that is gone is noticed here, not at exit
        return code
    except SpecError as error:
        return _stop(f"{label}: {error}", USAGE)
    except ModuleNotFoundError as error:
        remedy = missing_extra(error)
        if remedy is None:
            raise
        return _stop(f"{label}: {error}: {remedy}", USAGE)
    except KeyboardInterrupt:
        return _stop("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader is gone; without this the interpreter would fail once more while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich has done the same, and leaves by SystemExit(1)
            return PIPE_CLOSED
        raise
    except MemoryError:
        return _stop(f"{label}: out of memory: ask for smaller sizes", USAGE)
    except OSError as error:  # no such file, no room on the disk: the line says which
        return _stop(f"{label}: {first_line(error)}", USAGE)


def _run(arguments: list[str], name: str) -> int:
    if name:  # the others are not imported: a broken neighbour neither slows this command nor speaks up
        command = _checked(name, get_plugin(COMMANDS, name))
        parser = _parser({name: command}, complete=True)
        if not command.takes_rest:
            return command.run(parser.parse_args(arguments))
        known, rest = parser.parse_known_args(arguments)
        known.rest = rest
        return command.run(known)
    parser = _parser({} if "--version" in arguments else _available_commands())
    parser.parse_args(arguments)
    parser.print_help(sys.stderr)
    return USAGE


def _available_commands() -> dict[str, Command]:
    loaded, failed = load_plugins(COMMANDS)
    commands = {}
    for name, plugin in loaded.items():
        try:
            commands[name] = _checked(name, plugin)
        except SpecError as error:
            failed[name] = error
    for name, reason in sorted(failed.items()):
        print(f"vtoken: command {name!r} is not available: {reason}", file=sys.stderr)
    return commands


def _checked(name: str, plugin: object) -> Command:
    if not isinstance(plugin, Command):
        raise SpecError(f"the entry point {name!r} is a {type(plugin).__name__}: make it a vtoken.cli.Command")
    return plugin


def _parser(commands: Mapping[str, Command], complete: bool = False) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("vtoken", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=HelpFormatter)
    parser.add_argument("--version", action="version", version=f"vtoken {metadata.version('vtoken')}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in commands.items():
        description = command.description or command.help
        subparser = subparsers.add_parser(
            name,
            help=command.help,
            description=description,
            epilog=command.epilog,
            formatter_class=HelpFormatter,
            allow_abbrev=not command.takes_rest,  # what is not quite an option may be one of the rest
        )
        if complete:
            command.add_arguments(subparser)
    return parser


def _stop(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code
