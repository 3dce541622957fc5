"""``vtoken bench SUITE``: what things cost."""

import argparse

from vtoken.cli import Command
from vtoken.help_text import HelpFormatter
from vtoken_bench.suites import suites

__all__ = ["command"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(title="suites", metavar="SUITE", required=True)
    for name, suite in suites().items():
        subparser = subparsers.add_parser(
            name,
            help=suite.help,
            description=suite.description or suite.help,
            epilog=suite.epilog,
            formatter_class=HelpFormatter,
        )
        suite.add_arguments(subparser)
        subparser.set_defaults(run_suite=suite.run)


def _run(arguments: argparse.Namespace) -> int:
    code: int = arguments.run_suite(arguments)
    return code


command = Command(help="measures costs, one suite at a time", add_arguments=_add_arguments, run=_run)
