"""``vtoken stats URL``: what a running server's engines evicted, moved and gave back, read from its ``/metrics``."""

import argparse
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vtoken.cli import Command
from vtoken.errors import SpecError
from vtoken.report import check_output, write_json
from vtoken_torch.vllm_plugin.metrics.names import LABELS, METRICS, Kind, Metric

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Engine", "command", "fetch", "metrics_url", "parse", "show"]

SCHEMA = "vtoken/stats/1"

_TIMEOUT_S = 30.0
_EPILOG = """\
examples:
  vtoken stats localhost:8000
  vtoken stats http://gpu7:8000 --watch 2
  vtoken stats https://llm.example.org/metrics --json stats.json
exit codes: 0 good, 1 the server shows no vToken metrics, 2 no answer from URL, or bad usage"""


@dataclass(frozen=True, slots=True)
class Engine:
    """Numbers of one engine; a metric with a label of its own has a dict, by the label's values."""

    model_name: str
    engine: str
    values: dict[str, Any] = field(default_factory=dict)


def metrics_url(text: str) -> str:
    """The address of a server's metrics. Without scheme it is http, without path ``/metrics``."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is no number, brackets that do not close
        is_good = False
    if not is_good or any(character.isspace() for character in url):
        raise SpecError(f"{text!r} is no address of a server: give one like http://localhost:8000")
    path = parts.path.rstrip("/").removesuffix("/v1").removesuffix("/metrics")
    return f"{parts.scheme}://{parts.netloc}{path}/metrics"


def fetch(url: str) -> str:
    """The page at ``url``. Raises SpecError that names the URL if there is no such page."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        reason = f"it answers {error.code} {error.reason}"
    except urllib.error.URLError as error:
        reason = str(error.reason)
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
        reason = str(error) or type(error).__name__
    raise SpecError(f"{url}: {reason}: is a vLLM server there?")


def parse(page: str) -> list[Engine]:
    """The engines on a page in Prometheus' text format. Raises SpecError if it is in another one."""
    from prometheus_client.parser import text_string_to_metric_families

    shown = {_sample_name(metric): metric for metric in METRICS}
    engines: dict[tuple[str, ...], Engine] = {}
    try:
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    except ValueError as error:
        raise SpecError(f"the page is not in Prometheus' text format ({error}): name a vLLM server") from None
    for sample in samples:
        metric = shown.get(sample.name)
        if metric is None:
            continue
        key = tuple(sample.labels.get(label, "") for label in LABELS)
        values = engines.setdefault(key, Engine(key[0], key[1])).values
        if metric.label:
            values.setdefault(metric.name, {})[sample.labels.get(metric.label, "")] = sample.value
        else:
            values[metric.name] = sample.value
    return [engines[key] for key in sorted(engines)]


def show(engines: Sequence[Engine], before: Sequence[Engine] = (), seconds: float = 0.0) -> "Table":
    """One row for each metric, one column for each engine.

    Args:
        engines: what the server shows.
        before: what it showed ``seconds`` ago; counters then tell their rate beside the total.
        seconds: time between the two.
    """
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False, title_justify="left")
    table.add_column("metric", no_wrap=True)
    for engine in engines:
        table.add_column(f"{engine.model_name}\nengine {engine.engine}", justify="right", overflow="fold")
    past = {(engine.model_name, engine.engine): engine.values for engine in before}
    for metric in METRICS:
        for heading, label in _rows(metric, engines):
            cells = [
                _cell(metric, engine.values, past.get((engine.model_name, engine.engine), {}), label, seconds)
                for engine in engines
            ]
            table.add_row(heading, *cells)
    return table


def _rows(metric: Metric, engines: Sequence[Engine]) -> Iterator[tuple[str, str | None]]:
    title = metric.name.replace("_", " ")
    if metric.label is None:
        yield title, None
        return
    labels = sorted({label for engine in engines for label in engine.values.get(metric.name, {})})
    yield from ((f"{title}: {label}", label) for label in labels)


def _cell(metric: Metric, values: dict[str, Any], past: dict[str, Any], label: str | None, seconds: float) -> str:
    value, old = _number(metric, values, label), _number(metric, past, label)
    if value is None:
        return "-"
    if metric.name == "fragmentation":
        return f"{value:.1%}"
    text = f"{value:,.3f}" if metric.name.endswith("_seconds") else f"{value:,.0f}"
    if metric.kind is Kind.COUNTER and old is not None and seconds > 0:
        text += f" ({(value - old) / seconds:+,.3g}/s)"
    return text


def _number(metric: Metric, values: dict[str, Any], label: str | None) -> float | None:
    value = values.get(metric.name)
    found: float | None = value.get(label) if isinstance(value, dict) else value
    return found


def _sample_name(metric: Metric) -> str:
    return metric.full_name + ("_total" if metric.kind is Kind.COUNTER else "")


def _record(url: str, engines: Sequence[Engine]) -> dict[str, Any]:
    shown = [{"model_name": each.model_name, "engine": each.engine, **each.values} for each in engines]
    return {"schema": SCHEMA, "url": url, "unix_time": time.time(), "engines": shown}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the server, for example http://localhost:8000")
    parser.add_argument("--watch", type=_seconds, metavar="SECONDS", help="show them again that often, with rates")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to FILE")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: give a number of seconds above 0")
    return seconds


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    console = Console()
    url = metrics_url(arguments.url)
    check_output(arguments.json)
    before: Sequence[Engine] = ()
    then = 0.0
    while True:
        engines, now = parse(fetch(url)), time.monotonic()
        if not engines:
            console.print(
                f"{url} shows no vToken metrics: start the server with `vtoken serve`, or with VTOKEN_VLLM=1 in its "
                "environment and without metrics=false",
                soft_wrap=True,
            )
            return 1
        if before and console.is_terminal:
            console.clear()
        console.print(show(engines, before, now - then))
        if arguments.json:
            write_json(arguments.json, _record(url, engines))
        if arguments.watch is None:
            return 0
        before, then = engines, now
        time.sleep(arguments.watch)


command = Command(
    help="what a running server's engines evicted, moved and gave back",
    add_arguments=_add_arguments,
    run=_run,
    epilog=_EPILOG,
)
