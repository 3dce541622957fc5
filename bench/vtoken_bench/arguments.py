"""Types of command-line arguments."""

import argparse

__all__ = ["positive"]


def positive(text: str) -> int:
    """A whole number of at least 1; argparse shows what is said of any other."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)
