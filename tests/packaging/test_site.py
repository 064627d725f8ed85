"""The documentation site: it has every page as GitHub shows it, loads nothing from other hosts, and fits a phone."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from html.parser import HTMLParser
from pathlib import Path

import pytest
from aiohttp import web
from chromium import chromium
from markdown_it import MarkdownIt  # rich depends on it

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS) for path in DOCS.rglob("*.md"))
STRUCTURE = {"h1", "h2", "h3", "h4", "table", "tr", "th", "td", "ul", "ol", "li", "pre", "blockquote", "em", "strong"}


def build(root: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a checkout with the environment of this one. Skips the test without it."""
    programs = subprocess.run([ROOT / "tools" / "docs", "path"], capture_output=True, text=True, check=False)
    if programs.returncode:
        pytest.skip("mkdocs-material is not installed here: tools/docs install")
    environment = {**os.environ, "RLCTL_DOCS_VENV": str(Path(programs.stdout.strip()).parent)}
    command = [root / "tools" / "docs", "build", directory]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    built = build(ROOT, directory)
    assert built.returncode == 0, built.stdout + built.stderr
    return directory


def html(page: Path) -> Path:
    """The file of a page of docs/ in the site."""
    return page.with_name("index.html") if page.name == "README.md" else page.with_suffix(".html")


class Elements(HTMLParser):
    """Counts of elements, in the whole text or in its article; addresses that the text loads."""

    def __init__(self, text: str, *, article: bool = False) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.loaded: list[str] = []
        self._article = article
        self._counting = not article
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._counting |= tag == "article"
        if self._counting and tag in STRUCTURE:
            self.counts[tag] += 1
        if tag not in ("a", "form"):
            self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]

    def handle_endtag(self, tag: str) -> None:
        self._counting &= not (self._article and tag == "article")


def test_every_page_has_the_elements_that_github_shows(site: Path) -> None:
    """A list that mkdocs does not recognise needs an empty line before it, or four spaces if it is in another list."""
    assert len(PAGES) > 100
    markdown = MarkdownIt("commonmark").enable("table")
    different: dict[str, Mapping[str, int]] = {}
    for page in PAGES:
        expected = Elements(markdown.render((DOCS / page).read_text())).counts
        counts = Elements((site / html(page)).read_text(), article=True).counts
        if counts != expected:
            different[str(page)] = {tag: counts[tag] - expected[tag] for tag in {*counts, *expected}}
    assert different == {}


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    for path in site.rglob("*.html"):
        loaded = Elements(path.read_text()).loaded
        assert len(loaded) > 3
        assert [address for address in loaded if re.match(r"(\w+:)?//", address)] == [], path
    for path in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(\w+:)?//", path.read_text()), path


def test_links_that_leave_the_documents_are_paths(site: Path) -> None:
    text = (site / "index.html").read_text()
    assert "<code>RELEASES.md</code> defines" in text
    assert 'href="../' not in text


def test_broken_links_and_unlisted_pages_fail(tmp_path: Path) -> None:
    for path in ROOT.iterdir():
        if path != DOCS:
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "docs").mkdir()
    for path in DOCS.iterdir():
        (tmp_path / "docs" / path.name).symlink_to(path)
    broken = "# New\n\n[a](none.md) [b](glossary.md#none) [c](../none.py)\n"
    (tmp_path / "docs" / "new.md").write_text(broken)
    failed = build(tmp_path, tmp_path / ".new-site")
    assert failed.returncode == 1
    for missing in ("none.md", "glossary.md#none", "../none.py"):
        assert re.search(rf"new\.md.*{re.escape(missing)}", failed.stderr), failed.stderr
    assert re.search(r"not included in the \"nav\".*\n.*new\.md", failed.stderr), failed.stderr


def test_other_directories_are_not_overwritten(site: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = build(ROOT, tmp_path)
    assert (refused.returncode, (tmp_path / "file").exists()) == (1, True)
    assert "has other files" in refused.stderr


@contextlib.asynccontextmanager
async def served(site: Path) -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_static("/", site)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


NO_OVERFLOW = """
document.documentElement.scrollWidth <= innerWidth
&& [...document.querySelectorAll('article > *')].every(part => part.getBoundingClientRect().right <= innerWidth + 1)
"""
DRAWER = "document.querySelector('.md-nav--primary').getBoundingClientRect().left >= 0"
TABS = "document.querySelector('.md-tabs').checkVisibility()"


async def test_a_browser_shows_the_site_on_a_phone_and_on_a_desk(site: Path, tmp_path: Path) -> None:
    async with chromium(tmp_path) as page, served(site) as url:
        for name in ("index.html", "guides/operator.html", "reference/verbs.html"):
            await page.open(f"{url}/{name}", 1280, f"document.querySelector('.md-typeset__table') && {TABS}")
            assert await page.value(NO_OVERFLOW), name
            await page.open(f"{url}/{name}", 390, "document.querySelector('.md-typeset__table')")
            assert await page.value(NO_OVERFLOW), name
            assert not await page.value(DRAWER), name
            opened = f"new Promise(done => {{ setInterval(() => {{ if ({DRAWER}) done(true) }}, 20) }})"
            await page.value(f"document.querySelector('label[for=__drawer]').click(); {opened}")
        await page.open(f"{url}/index.html?q=quorum", 1280, "document.querySelector('.md-search-result__item')")
        assert {each for each in page.urls if not each.startswith((url, "data:"))} <= {"about:blank"}
    assert not page.complaints
