"""Pictures as bytes: what a report embeds, or a file takes whole."""

import io
from collections.abc import Mapping, Sequence

from vtoken.errors import SpecError

__all__ = ["FORMATS", "line_plot"]

FORMATS = ("png", "svg")


def line_plot(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    image_format: str,
    dashed: frozenset[str] = frozenset(),
) -> bytes:
    """Draws curves (label -> xs, ys of one length); the y axis begins at zero, since blocks are counted from there.

    Raises:
        SpecError: the format is neither png nor svg.
    """
    if image_format not in FORMATS:
        raise SpecError(f"image format {image_format!r}: choose one of {', '.join(FORMATS)}")
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for label, (xs, ys) in curves.items():
        axes.plot(xs, ys, label=label, linewidth=1.6, linestyle="--" if label in dashed else "-")
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format=image_format, dpi=150, metadata={"Date": None} if image_format == "svg" else None)
    return picture.getvalue()
