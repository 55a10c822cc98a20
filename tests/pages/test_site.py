"""The site has every page, is strict, needs no network, and looks as the repository does where it is browsed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import markdown
import pytest
import yaml
from headless_chromium import BROWSER, DESK, Chromium
from markdown_it import MarkdownIt

import mod_export
import mod_models
from mod_export import errors

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
CONFIG: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), yaml.BaseLoader)


def listed(nav: Any) -> Iterator[str]:
    """Pages of the navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from listed(item)


def test_navigation_has_every_page() -> None:
    found = list(listed(CONFIG["nav"]))
    outside = ["index.md", "contributing.md", "changelog.md"]
    notebooks = [path.relative_to(DOCS).with_suffix(".md").as_posix() for path in DOCS.rglob("*.ipynb")]
    assert sorted(found) == sorted([*(path.relative_to(DOCS).as_posix() for path in PAGES), *outside, *notebooks])


def test_every_broken_link_is_an_error() -> None:
    assert CONFIG["strict"] == "true"
    assert {kind: set(level.values()) for kind, level in CONFIG["validation"].items()} == {
        "nav": {"warn"},
        "links": {"warn"},
    }
    assert set(CONFIG["validation"]["links"]) >= {"anchors", "not_found", "unrecognized_links", "absolute_links"}


def test_api_reference_has_every_public_name() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    named = set(re.findall(r"^::: (\S+)", text, re.MULTILINE))
    public = [f"mod_export.{name}" for name in mod_export.__all__ if name not in ("__version__", "ModExportError")]
    public += [f"mod_models.{name}" for name in mod_models.__all__]
    assert set(public) <= named
    assert set(re.findall(r"^        - (\w+)", text, re.MULTILINE)) == {*errors.__all__, "UnverifiedWarning"}


class Outline(HTMLParser):
    """Headings, lists, tables, code and text of a page, each with the depth of the list that holds it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[int, str]] = []
        self._lists = self._code = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._lists += tag == "li"
        self._code += tag == "pre"
        if tag in ("ul", "ol", "li", "table", "tr", "pre", "h1", "h2", "h3", "h4"):
            self.found.append((self._lists, tag))

    def handle_endtag(self, tag: str) -> None:
        self._lists -= tag == "li"
        self._code -= tag == "pre"

    def handle_data(self, data: str) -> None:
        if data.strip() and not self._code:
            self.found.append((self._lists, " ".join(data.split())))


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.stem
)
def test_pages_have_the_same_outline_everywhere(page: Path) -> None:
    """The site's Markdown wants four spaces before what belongs to a list item, CommonMark two."""
    text = page.read_text(encoding="utf-8")
    extensions = [next(iter(item)) if isinstance(item, dict) else item for item in CONFIG["markdown_extensions"]]
    here = Outline(markdown.markdown(text, extensions=[name for name in extensions if name != "toc"]))
    there = Outline(MarkdownIt("commonmark", {"html": True}).enable("table").render(text))
    assert here.found == there.found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


class References(HTMLParser):
    """Addresses of a page that it loads, addresses that it links, and its anchors."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for value in (values.get("id"), values.get("name")) if value}
        if tag == "a":
            self.links += [values["href"]] if values.get("href") else []
        elif tag != "link" or values.get("rel") != "canonical":
            self.loads += [value for name in ("src", "href") if (value := values.get(name))]


@pytest.mark.slow
def test_every_reference_of_the_site_leads_somewhere(site: Path) -> None:
    pages = {path: References(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > len(PAGES)
    wrong = []
    for path, page in pages.items():
        assert [address for address in page.loads if "//" in address] == []
        for address in page.loads + page.links:
            if re.match(r"[a-z]+:", address):
                continue
            name, _, anchor = address.partition("#")
            target = (path.parent / name).resolve() if name else path
            if not target.is_file() or (anchor and anchor not in pages[target].anchors):
                wrong.append(f"{path.relative_to(site)}: {address}")
    assert wrong == []
    api = "".join(path.read_text(encoding="utf-8") for path in (site / "api").glob("*.html"))
    assert all(f'id="mod_export.{name}"' in api for name in ("build", "load", "Generator.stream", "mark_selection"))
    assert "Keyword Args" not in api
    assert 'id="route-a-block"' in (site / "notebooks" / "own_module.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs a browser")
def test_pages_from_disk_search_and_ask_nobody(site: Path, tmp_path: Path) -> None:
    with Chromium(tmp_path) as browser:
        browser.attach()
        browser.open(site / "quickstart.html", DESK, "light")
        browser.evaluate("document.querySelector('[data-md-toggle=search]').click()")
        browser.evaluate(
            "{const field = document.querySelector('[data-md-component=search-query]'); field.focus(); "
            "field.value = 'near-tie'; field.dispatchEvent(new Event('keyup', {bubbles: true}))}"
        )
        found = browser(
            "Runtime.evaluate",
            expression="new Promise(done => {const look = () => {"
            "const first = document.querySelector('.md-search-result__link'); "
            "first ? done(first.href) : setTimeout(look, 50)}; look()})",
            awaitPromise=True,
            timeout=20_000,
        )
        assert found["result"]["value"].startswith(site.as_uri())
        assert [url for url in browser.requests() if not url.startswith(("file:", "about:"))] == []
        assert browser.complaints() == []
