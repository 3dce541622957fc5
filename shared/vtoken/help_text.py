"""Help texts of commands, filled to the width of the terminal."""

import argparse
import re
import textwrap
from collections.abc import Iterator

__all__ = ["HelpFormatter"]

_WIDEST = 118
_LEAST_COLUMN = 24
_TWO_COLUMNS = re.compile(r"( *)(\S.*?)  +(?=\S)")


class HelpFormatter(argparse.HelpFormatter):
    """Lines at the margin make paragraphs, to be filled anew; an indented line stays a line of its own.

    Of an indented line with two columns, two or more spaces between them, the second is wrapped, below the first where
    little room is left beside it. One without is never broken: a command is to be copied.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in _filled(text, min(width, _WIDEST) - len(indent)))


def _filled(text: str, width: int) -> Iterator[str]:
    paragraph: list[str] = []
    for line in text.rstrip().splitlines():
        if line and not line.startswith(" "):
            paragraph.append(line)
            continue
        yield from textwrap.wrap(" ".join(paragraph), width, break_on_hyphens=False)
        paragraph.clear()
        yield from _indented(line, width)
    yield from textwrap.wrap(" ".join(paragraph), width, break_on_hyphens=False)


def _indented(line: str, width: int) -> list[str]:
    columns = _TWO_COLUMNS.match(line)
    if columns is None or len(line) <= width:
        return [line]
    start, first, second = columns[0], columns[1] + columns[2], line[columns.end() :]
    if width - len(start) >= _LEAST_COLUMN:
        return textwrap.wrap(second, width, initial_indent=start, subsequent_indent=" " * len(start))
    deeper = columns[1] + "    "
    return [first, *textwrap.wrap(second, width, initial_indent=deeper, subsequent_indent=deeper)]
