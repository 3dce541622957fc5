"""Held blocks over decode steps, one panel a policy: as SVG that takes the page's text colour, or as PNG."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from vtoken.types import cdiv
from vtoken_bench.demo.compare import NATIVE, Comparison, Row
from vtoken_bench.demo.recording import Recording

__all__ = ["draw", "inline_svg"]

_STYLES: Mapping[str, dict[str, Any]] = {  # after Okabe and Ito: told apart by colour-blind eyes, on white and black
    "native": {"color": "#8c8c8c", "linewidth": 1.6, "label": "native: no eviction"},
    "naive": {"color": "#d55e00", "linewidth": 1.6, "label": "naive: empty blocks only"},
    "lazy": {"color": "#1f86c9", "linewidth": 1.6, "label": "vToken lazy"},
    "eager": {"color": "#009e73", "linewidth": 2.4, "label": "vToken eager"},
}
_TITLES = {"h2o": "H2O", "streaming_llm": "StreamingLLM", "random": "Random", "tova": "TOVA", "snapkv": "SnapKV"}
_MAX_COLUMNS = 3
_TEXT = "#123456"  # stands for currentColor in the SVG: matplotlib knows no such colour


def draw(comparison: Comparison, recording: Recording, image_format: Literal["png", "svg"]) -> bytes:
    """Draws the comparison. A PNG has a white ground; an SVG none, and ``_TEXT`` for its text."""
    import matplotlib as mpl  # takes a second to import

    is_svg = image_format == "svg"
    text = _TEXT if is_svg else "#222222"
    colours = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), text)
    with mpl.rc_context({**colours, "svg.hashsalt": "vtoken", "font.size": 10}):
        picture = io.BytesIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type")) if is_svg else None
        figure = _figure(comparison, recording, text)
        figure.savefig(picture, format=image_format, dpi=160, metadata=metadata, transparent=is_svg)
    return picture.getvalue()


def inline_svg(svg: bytes) -> str:
    """An SVG file as an element of an HTML page: no prologue, no namespaces, its width the page's."""
    text = svg.decode()
    text = text[text.index("<svg") :]
    text = re.sub(r' (xmlns(:\w+)?|version|width|height)="[^"]*"', "", text[: (end := text.index(">"))]) + text[end:]
    return text.replace("xlink:href", "href").replace(_TEXT, "currentColor")


def _figure(comparison: Comparison, recording: Recording, text: str) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    policies = list(comparison.traces)
    columns, rows = min(len(policies), _MAX_COLUMNS), cdiv(len(policies), _MAX_COLUMNS)
    size = (max(3.6 * columns, 5.4), 0.7 + 3.4 * rows)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(wspace=0.05))
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    for axes, policy in zip(panels, policies, strict=False):
        shown = [row for row in comparison.rows if row.policy in (policy, "")]
        _panel(axes, shown, recording, text, _TITLES.get(policy, policy))
    for axes in panels[len(policies) :]:
        axes.set_visible(False)
    figure.supxlabel("decode step", size="medium")
    figure.supylabel(f"held blocks of {comparison.native.block_size} tokens", size="medium")
    legend_columns = {1: 2, 2: 3}.get(columns, 5)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=legend_columns, frameon=False)
    return figure


def _panel(axes: Any, rows: Sequence[Row], recording: Recording, text: str, title: str) -> None:
    first = next(index for index, step in enumerate(recording.steps) if not step.is_chunk)
    steps = range(1, len(recording.steps) - first + 1)
    for row in rows:
        axes.plot(steps, row.blocks.held[first:], **_STYLES[row.variant])
    evicting = next(row for row in rows if row.variant != NATIVE)
    ideal = {"color": text, "linewidth": 1.0, "linestyle": (0, (2, 2)), "label": "ideal: no holes"}
    axes.plot(steps, evicting.ideal[first:], **ideal)
    axes.set_title(title, size="medium", weight="bold")
    axes.set_ylim(0, 1.06 * max(max(row.blocks.held[first:]) for row in rows))
    axes.set_xlim(0, len(steps))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
