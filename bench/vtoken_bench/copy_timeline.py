"""A picture of token copies beside decode steps, drawn from the record of the copy engine's fake device.

``python -m vtoken_bench.copy_timeline FILE.svg``. Durations are made up; order and waits are those of the real engine.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtoken_bench.plot import FORMATS

if TYPE_CHECKING:
    from vtoken_torch.copy_engine.fake_device import Span, Wait

__all__ = ["copy_timeline", "draw_timeline", "record_timeline"]

_LANES = {"host": "host", "prefill": "prefill stream", "compute": "compute stream", "copy": "copy stream"}
_FENCED = "blocks behind a fence"
_COLOURS = {"attention": "#8fb4d9", "append": "#3b6ea5", "move": "#d9822b", "upload plan": "#f2c14e"}
_OTHER = "#c9ced6"
_SEED, _FIRST_STEP, _NUM_STEPS = 6, 8, 4


def copy_timeline(image_format: str) -> bytes:
    """The picture of a few steps in which tokens move."""
    return draw_timeline(*record_timeline(), image_format)


def record_timeline() -> "tuple[list[Span], list[Wait], list[Span]]":
    """Some steps of a small serving loop over the copy engine.

    Returns:
        What streams and host were busy with, who was held back, and from when to when blocks were behind a fence.
    """
    from vtoken_torch.copy_engine.cuda import CUDACopyEngine
    from vtoken_torch.copy_engine.fake_device import Durations, FakeDevice, Span
    from vtoken_torch.copy_engine.rehearsal import Rehearsal

    device = FakeDevice(lag=None, durations=Durations(upload=0.35, move=0.5, per_token=0.12))
    fences: dict[int, Span] = {}

    class Watched(CUDACopyEngine):
        def fence(self) -> int:
            number = super().fence()
            fences[number] = Span(_FENCED, device.now, device.now, "")
            return number

        def passed(self) -> int:
            number = super().passed()
            for open_fence in [each for each in fences if each <= number and fences[each].end == fences[each].start]:
                fences[open_fence] = fences[open_fence]._replace(end=device.now)
            return number

    loop = Rehearsal(device, _SEED, Watched)
    start = 0.0
    for step in range(_FIRST_STEP + _NUM_STEPS):
        if step == _FIRST_STEP:
            start = device.now
        loop.step()
        sampled = device.make_event()
        sampled.record(device.compute)
        sampled.synchronize()  # the host needs the tokens
    end = device.now
    loop.reap()
    spans = [span for span in device.spans if start <= span.start < end]
    waits = [wait for wait in device.waits if start <= wait.event_time < end]
    return spans, waits, [span for span in fences.values() if start <= span.start < end]


def draw_timeline(
    spans: "Sequence[Span]", waits: "Sequence[Wait]", fences: "Sequence[Span]", image_format: str
) -> bytes:
    """One lane for each stream; an arrow from each event to the stream that waited for it.

    Raises:
        SpecError: the format is neither png nor svg.
    """
    import io

    from vtoken.errors import SpecError

    if image_format not in FORMATS:
        raise SpecError(f"image format {image_format!r}: choose one of {', '.join(FORMATS)}")
    import matplotlib as mpl
    from matplotlib.figure import Figure  # takes a second to import

    busy = {_FENCED, *(span.stream for span in spans)}
    lanes = {name: height for height, name in enumerate(name for name in (_FENCED, *reversed(_LANES)) if name in busy)}
    zero = min(span.start for span in spans)
    with mpl.rc_context({"svg.hashsalt": "vtoken", "font.size": 9}):
        figure = Figure(figsize=(11, 4), layout="constrained")
        axes = figure.add_subplot()
        for span in spans:
            _draw_span(axes, span, lanes[span.stream], zero)
        for number, fence in enumerate(fences):
            height = lanes[_FENCED] + 0.18 * (number % 3 - 1)
            axes.plot([fence.start - zero, fence.end - zero], [height, height], "|-", color="#7a5195", linewidth=2)
        for wait in waits:
            later = [span.start for span in spans if span.stream == wait.stream and span.start >= wait.event_time]
            if later:
                _draw_wait(axes, wait, min(later), lanes, zero)
        axes.set(xlabel="simulated time", title="Token copies beside decode steps", ylim=(-0.5, len(lanes) - 0.5))
        axes.set_yticks([*lanes.values()], [_LANES.get(name, name) for name in lanes])
        axes.spines[["top", "right"]].set_visible(False)
        picture = io.BytesIO()
        metadata = {"Date": None} if image_format == "svg" else None
        figure.savefig(picture, format=image_format, dpi=150, metadata=metadata)
    return picture.getvalue()


def _draw_span(axes: Any, span: "Span", height: int, zero: float) -> None:
    kind = "move" if span.what.startswith("move") else span.what
    length = span.end - span.start
    axes.broken_barh([(span.start - zero, length)], (height - 0.3, 0.6), color=_COLOURS.get(kind, _OTHER), ec="white")
    if length > 0.3:
        is_narrow = length < 1.5
        text = kind.partition(" ")[0].strip(",") if is_narrow else span.what
        axes.text(
            (span.start + span.end) / 2 - zero,
            height,
            text,
            ha="center",
            va="center",
            rotation=90 if is_narrow else 0,
            fontsize=6 if is_narrow else 8,
        )


def _draw_wait(axes: Any, wait: "Wait", resumed: float, lanes: dict[str, int], zero: float) -> None:
    """From the event to what comes behind it."""
    source, target = lanes[wait.event_stream], lanes[wait.stream]
    edge = 0.3 if target > source else -0.3
    tip = (resumed - zero, target - edge)
    tail = (wait.event_time - zero, source + edge)
    axes.annotate("", tip, tail, arrowprops={"arrowstyle": "->", "color": "#b0413e", "linewidth": 1.3})


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_bytes(copy_timeline(path.suffix.removeprefix(".")))
