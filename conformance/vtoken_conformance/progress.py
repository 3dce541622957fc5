"""Progress bars of the commands."""

from rich.console import Console
from rich.progress import Progress, ProgressColumn

__all__ = ["progress_bar"]


def progress_bar(*columns: str | ProgressColumn) -> Progress:
    """A bar on stderr that goes when its work is done; nothing at all, not even a line end, if stderr is piped."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
