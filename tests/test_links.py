"""Links of README and docs/ lead somewhere, and the documentation's site has every page; `make docs` builds it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MADE = {"index.md", "reference.md", "commands.md", "settings.md"}  # by docs/site/hooks.py, when the site is built


def anchors(page: Path) -> set[str]:
    """Give each heading's anchor as GitHub and mkdocs make it."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {text.strip().replace(" ", "-") for text in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_the_page_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name} links to {target}; headings: {sorted(anchors(file))}"


def test_the_site_has_every_page() -> None:
    text = re.sub(r"^hooks:.*$", "", (ROOT / "mkdocs.yml").read_text(), flags=re.M)
    listed = {
        name for part in yaml.safe_load(text)["nav"] for names in part.values() for name in names if names != "results"
    }
    assert listed - MADE == {path.name for path in (ROOT / "docs").glob("*.md")}
