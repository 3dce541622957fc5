"""Links between the repository's texts lead somewhere."""

import re
from pathlib import Path

import pytest
from check_wheel import ROOT

TEXTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("shared/*.md")])
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def anchors(text: str) -> set[str]:
    """Headings as GitHub names them, and ids given by hand."""
    headings = (line.lstrip("#").strip().lower() for line in text.splitlines() if line.startswith("#"))
    made = {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([^"]+)">', text))


def dead_links(file: Path) -> list[str]:
    dead = []
    for link in _LINK.findall(_CODE.sub("", file.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = file.parent / path if path else file
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            dead.append(link)
    return dead


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(file: Path) -> None:
    assert dead_links(file) == []


def test_dead_links_are_found(tmp_path: Path) -> None:
    text = tmp_path / "text.md"
    text.write_text("# A head, of two\n[a](#a-head-of-two) [b](#b) [c](text.md#a) [d](no.md) [e](https://x) `[f](g)`\n")
    assert dead_links(text) == ["#b", "text.md#a", "no.md"]
