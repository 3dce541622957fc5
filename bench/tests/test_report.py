import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from vtoken.config import VTokenConfig
from vtoken.reference import ReferenceExecutor
from vtoken_bench.demo.compare import Comparison, compare
from vtoken_bench.demo.plot import draw, inline_svg
from vtoken_bench.demo.recording import Recording
from vtoken_bench.demo.report import Story, make_record, render_html
from vtoken_conformance.mutants import MUTANTS

STORY = Story(
    model="tiny <llama>",
    prompt="heapq.py",
    prompt_tail="def heap",
    continuation='push(): return "<b>&"',
    missing={"jax": "No module named 'jax': pip install 'vtoken[jax]'"},
    seconds={"recording": 1.234},
)
CONFIGS = [
    VTokenConfig(policy=policy, eviction_ratio=0.5, interval=4, when="always")
    for policy in ("h2o", "streaming_llm", "random")
]


@pytest.fixture(scope="module")
def recording(make_recording: Callable[..., Recording]) -> Recording:
    return make_recording(prompt=40, chunk=16, decoded=20)


@pytest.fixture(scope="module")
def comparison(recording: Recording) -> Comparison:
    return compare(recording, CONFIGS, {"reference": ReferenceExecutor()}, block_size=4)


@pytest.fixture(scope="module")
def record(comparison: Comparison, recording: Recording) -> dict[str, Any]:
    return make_record(comparison, recording, CONFIGS[0], STORY)


class Outside(HTMLParser):
    """Collects what a browser would fetch or follow, and what it would run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "iframe", "img", "object", "embed", "base"):
            self.found.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "xlink:href", "data", "action") and not str(value).startswith("#"):
                self.found.append(f"{name}={value}")
            self.found += [url for url in re.findall(r"url\(([^)]*)\)", value or "") if not url.startswith("#")]


def test_the_record_is_json_and_says_what_was_run(record: dict[str, Any]) -> None:
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["schema"] == "vtoken/demo/1"
    assert record["model"]["kv_bytes_per_token"] == 2 * 2 * 2 * 4 * 4
    assert (record["run"]["prompt_tokens"], record["run"]["chunks"], record["run"]["decoded_tokens"]) == (40, 3, 20)
    assert record["settings"]["pool_blocks"] == 15
    assert record["missing_executors"] == STORY.missing
    assert record["environment"]["python"]


def test_there_is_one_native_row_and_three_a_policy(record: dict[str, Any]) -> None:
    assert [(row["policy"], row["variant"]) for row in record["rows"]] == [
        (None, "native"),
        *((policy, variant) for policy in ("h2o", "streaming_llm", "random") for variant in ("naive", "lazy", "eager")),
    ]


def test_rows_series_and_summary_agree(record: dict[str, Any]) -> None:
    series, summary = record["series"], record["summary"]

    assert series["computed_tokens"] == [16, 32, *range(40, 61)]
    for row in record["rows"]:
        held = series["held_blocks"][row["policy"] or "none"][row["variant"]]
        assert len(held) == len(series["computed_tokens"])
        assert (held[-1], max(held)) == (row["held_blocks_end"], row["held_blocks_peak"])
        if row["policy"]:
            assert summary["saved_blocks"][row["policy"]][row["variant"]] == 15 - held[-1]
    assert (summary["same_bytes"], summary["num_replays"], summary["differences"]) == (True, 10, [])
    assert summary["num_checks"] == sum(row["executors"]["reference"]["num_checks"] for row in record["rows"])


def test_the_page_fetches_nothing_and_runs_nothing(
    record: dict[str, Any], comparison: Comparison, recording: Recording
) -> None:
    page = render_html(record, comparison, recording)
    outside = Outside()
    outside.feed(page)

    assert outside.found == []
    assert "http://" not in page
    assert "https://" not in page
    assert "@import" not in page


def test_the_page_shows_text_as_text_and_names_who_is_missing(
    record: dict[str, Any], comparison: Comparison, recording: Recording
) -> None:
    page = render_html(record, comparison, recording)

    assert "tiny &lt;llama&gt;" in page
    assert "push(): return &#34;&lt;b&gt;&amp;&#34;" in page
    assert "Executor jax took no part: No module named &#39;jax&#39;" in page
    assert page.count('class="mark good"') == 10
    assert "Same bytes: 10 replays" in page
    assert "prefers-color-scheme: dark" in page


def test_a_difference_is_in_the_record_and_on_the_page(recording: Recording) -> None:
    comparison = compare(recording, CONFIGS[2:], {"torch": MUTANTS["FirstLayerMoved"]()}, block_size=4)
    record = make_record(comparison, recording, CONFIGS[2], STORY)
    page = render_html(record, comparison, recording)

    assert record["summary"]["same_bytes"] is False
    assert any(line.startswith("random, eager, torch: step ") for line in record["summary"]["differences"])
    assert "Not the same bytes" in page
    assert "Same bytes:" not in page
    assert 'class="mark bad"' in page


def test_the_picture_takes_the_pages_colour_and_has_a_panel_for_each_policy(
    comparison: Comparison, recording: Recording
) -> None:
    svg = inline_svg(draw(comparison, recording, "svg"))
    ids = {element.get("id") for element in ElementTree.fromstring(svg).iter()}

    assert {"axes_1", "axes_2", "axes_3"} <= ids
    assert "axes_4" not in ids
    assert "currentColor" in svg
    assert "#123456" not in svg
    assert re.match(r'<svg viewBox="[\d. ]+">', svg)


def test_the_same_comparison_is_drawn_alike(comparison: Comparison, recording: Recording) -> None:
    assert draw(comparison, recording, "svg") == draw(comparison, recording, "svg")
    assert draw(comparison, recording, "png").startswith(b"\x89PNG")


def test_the_page_shows_what_vllm_served(
    comparison: Comparison, recording: Recording, pressure_record: dict[str, Any]
) -> None:
    story = replace(STORY, serving=pressure_record)

    page = render_html(make_record(comparison, recording, CONFIGS[0], story), comparison, recording)

    assert "Inside vLLM" in page
    assert all(f"<td>{cell}</td>" in page for cell in ("2,800", "7.1", "123,456", "1704.5", "105.0"))
    assert pressure_record["about_naive"].replace("'", "&#39;") in page
    assert "<b>3.6 → 7.1</b> requests at once" in page
    assert '<p class="good">Every block is back in the pool.</p>' in page


def test_without_vllm_the_page_says_nothing_of_it(
    record: dict[str, Any], comparison: Comparison, recording: Recording
) -> None:
    assert "Inside vLLM" not in render_html(record, comparison, recording)
