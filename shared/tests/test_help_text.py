import argparse

import pytest

from vtoken.help_text import HelpFormatter

TEXT = """\
A paragraph that was broken
where its author's line ended.

Kinds:
  short   stays
  first   has more to say than fits on one line of this terminal, and goes on below itself
examples:
  command --with a-long-option --and another-one --that should-be-copied --as-it-is
  command --another --with many-options --and-words     and what it does, told below it
exit codes: 0 good,
1 bad"""


def shown(width: int) -> list[str]:
    parser = argparse.ArgumentParser(
        "command", formatter_class=lambda prog: HelpFormatter(prog, width=width), epilog=TEXT, add_help=False
    )
    return parser.format_help().splitlines()[2:]


def test_paragraphs_are_filled_and_indented_lines_stay() -> None:
    assert shown(62) == [
        "A paragraph that was broken where its author's line ended.",
        "",
        "Kinds:",
        "  short   stays",
        "  first   has more to say than fits on one line of this",
        "          terminal, and goes on below itself",
        "examples:",
        "  command --with a-long-option --and another-one --that should-be-copied --as-it-is",
        "  command --another --with many-options --and-words",
        "      and what it does, told below it",
        "exit codes: 0 good, 1 bad",
    ]


@pytest.mark.parametrize("width", [100, 300])
def test_a_wide_terminal_has_every_line_whole_but_no_endless_paragraph(width: int) -> None:
    assert TEXT.splitlines()[5] in shown(width)
    long = argparse.ArgumentParser(
        "command", formatter_class=lambda prog: HelpFormatter(prog, width=300), description="word " * 80
    )
    assert max(map(len, long.format_help().splitlines())) <= 118
