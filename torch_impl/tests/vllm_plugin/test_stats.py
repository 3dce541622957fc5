"""``vtoken stats`` against a small server: what it prints, what it writes, and how it says that there is nothing."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("rich")

from prometheus_client import CollectorRegistry, generate_latest

from vtoken.cli import main
from vtoken.errors import SpecError
from vtoken_torch.vllm_plugin.metrics.exposition import ProcessMetrics
from vtoken_torch.vllm_plugin.metrics.names import METRICS
from vtoken_torch.vllm_plugin.stats import metrics_url, parse

FOREIGN = '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 3.0\n'
VALUES = {
    metric.name: {"no target free": 7, "too few sources": 2} if metric.label else 1000 + number
    for number, metric in enumerate(METRICS)
} | {"fragmentation": 0.125, "policy_seconds": 1.5}


@pytest.fixture
def server():
    """Answers with ``pages`` one after another, the last one again and again; None is a 404."""
    pages = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            page = pages.pop(0) if len(pages) > 1 else pages[0]
            self.send_response(200 if page is not None and self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(page.encode() if page else b"")

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"127.0.0.1:{http.server_port}", pages
        http.shutdown()
        thread.join()


def page(*steps, engines=("0",)):
    """What ``/metrics`` shows after engines wrote these values in turn."""
    registry = CollectorRegistry()
    first = ProcessMetrics(("a/model", engines[0]), registry)
    for values in steps:
        first.write(values)
    return FOREIGN + generate_latest(registry).decode()


def test_every_metric_is_printed_and_written(server, capsys, tmp_path):
    url, pages = server
    pages.append(page(VALUES))
    out = tmp_path / "stats.json"
    assert main(["stats", url, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    for metric in METRICS:
        assert metric.name.replace("_", " ") in printed
    assert "a/model" in printed
    assert "12.5%" in printed
    assert "1,001" in printed
    assert "plans refused: no target free" in printed
    record = json.loads(out.read_text())
    assert record["schema"] == "vtoken/stats/1"
    assert record["url"] == f"http://{url}/metrics"
    assert record["engines"] == [{"model_name": "a/model", "engine": "0", **VALUES}]


def test_watching_shows_rates_until_the_server_is_gone(server, capsys):
    url, pages = server
    later = {**VALUES, "evicted_tokens": VALUES["evicted_tokens"] + 500, "held_blocks": 3}
    pages += [page(VALUES), page(VALUES, later), None]
    assert main(["stats", url, "--watch", "0.01"]) == 2
    captured = capsys.readouterr()
    first, second = captured.out.split("metric", 1)[1].split("metric", 1)
    assert "/s)" not in first
    (evicted,) = (line for line in second.splitlines() if line.lstrip().startswith("evicted tokens"))
    assert "/s)" in evicted
    (held,) = (line for line in second.splitlines() if line.lstrip().startswith("held blocks"))
    assert held.split()[-1] == "3"
    assert captured.err == f"vtoken stats: http://{url}/metrics: it answers 404 Not Found: is a vLLM server there?\n"


def test_a_server_without_vtoken_is_told_apart_from_none(server, capsys, tmp_path):
    url, pages = server
    pages.append(FOREIGN)
    out = tmp_path / "stats.json"
    assert main(["stats", url, "--json", str(out)]) == 1
    assert "shows no vToken metrics: start the server with `vtoken serve`" in capsys.readouterr().out
    assert not out.exists()
    pages[:] = ["<html>\n{ not a metric"]
    assert main(["stats", url]) == 2
    assert "not in Prometheus' text format" in capsys.readouterr().err
    assert main(["stats", "127.0.0.1:1"]) == 2
    assert "is a vLLM server there?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "http://", "ftp://host", "http://host:port", "host:99999", "two words", "http://[::1"]
)
def test_no_address(text, capsys):
    assert main(["stats", text]) == 2
    assert "give one like http://localhost:8000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:8000", "http://localhost:8000/metrics"),
        ("http://h:1/", "http://h:1/metrics"),
        ("http://h:1/v1", "http://h:1/metrics"),
        ("https://h/prefix/metrics", "https://h/prefix/metrics"),
    ],
)
def test_addresses(text, url):
    assert metrics_url(text) == url


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "x"])
def test_a_watch_needs_a_time(seconds, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["stats", "localhost", "--watch", seconds])
    assert "--watch" in capsys.readouterr().err


def test_totals_that_fall_back_are_not_taken_off_a_counter():
    fallen = {**VALUES, "recycled_slots": VALUES["recycled_slots"] - 1}
    risen = {**VALUES, "recycled_slots": VALUES["recycled_slots"] + 5}
    (engine,) = parse(page(VALUES, fallen, risen))
    assert engine.values["recycled_slots"] == risen["recycled_slots"]


def test_a_second_engine_of_a_process_counts_on():
    registry = CollectorRegistry()
    for _ in range(2):
        ProcessMetrics(("a/model", "0"), registry).write(VALUES)
    (engine,) = parse(generate_latest(registry).decode())
    assert engine.values["held_blocks"] == VALUES["held_blocks"]
    assert engine.values["moved_tokens"] == 2 * VALUES["moved_tokens"]


def test_a_page_of_nonsense_is_refused():
    with pytest.raises(SpecError, match="Prometheus"):
        parse("{}{}{}\n")
