"""The site: it builds without a warning, needs nothing from elsewhere, and its links lead somewhere."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.pages import ROOT

FETCHED = {
    ("script", "src"), ("link", "href"), ("img", "src"), ("img", "srcset"), ("iframe", "src"), ("source", "src"),
    ("source", "srcset"), ("object", "data"), ("embed", "src"), ("video", "src"), ("audio", "src"), ("track", "src"),
    ("use", "href"), ("image", "href"),
}  # fmt: skip

DOCS_LINE = re.compile(r"^(WARNING|ERROR|CRITICAL)", re.MULTILINE)


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config), "--site-dir", str(site)],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


class Page(HTMLParser):
    """What a browser would fetch, where links go, what they can go to, and the words outside of code."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.classes: set[str] = set()
        self.words: list[str] = []
        self._skipped = 0
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"code", "pre", "script", "style", "textarea"}:
            self._skipped += 1
        for name, value in attrs:
            if (tag, name) in FETCHED and value is not None:
                self.fetched.append(value)
            elif tag == "a" and name == "href" and value is not None:
                self.links.append(value)
            elif name in {"id", "name"} and value is not None:
                self.anchors.add(value)
            elif name == "class" and value is not None:
                self.classes |= set(value.split())

    def handle_endtag(self, tag: str) -> None:
        if tag in {"code", "pre", "script", "style", "textarea"}:
            self._skipped -= 1

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self.words.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0 and not DOCS_LINE.search(done.stderr), done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    found = {path: Page(path) for path in site.rglob("*.html")}
    assert len(found) > 20
    return found


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert page.fetched
        for target in page.fetched:
            parts = urlsplit(target)
            if parts.scheme == "data":
                continue
            assert not parts.scheme and not parts.netloc, f"{path}: {target}"
            if path.name != "404.html":  # its paths begin at the root of wherever the site is
                assert not target.startswith("/"), f"{path}: {target}"
                assert (path.parent / unquote(parts.path)).exists(), f"{path}: {target}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\(\s*['\"]?(?:https?:)?//", sheet.read_text()), sheet


def test_no_page_makes_the_theme_fetch_something(pages: dict[Path, Page]) -> None:
    """Material's script loads these from a CDN, or asks a code host, where a page or the configuration wants it."""
    config = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in config and "repo_url" not in config and "analytics" not in config
    for path, page in pages.items():
        assert not page.classes & {"mermaid", "arithmatex"}, path


def test_every_link_and_anchor_is_there(site: Path, pages: dict[Path, Page]) -> None:
    num_links = num_anchors = 0
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in {"http", "https", "mailto"} or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file() and target.is_relative_to(site), f"{path}: {link}"
            num_links += 1
            if parts.fragment and target.suffix == ".html":
                assert unquote(parts.fragment) in pages[target].anchors, f"{path}: {link}"
                num_anchors += 1
    assert num_links > 500 and num_anchors > 100


def test_no_markdown_is_left(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        text = "".join(page.words)
        for remains in ("```", "|---", "](", "<!--", "run by:"):
            assert remains not in text, f"{path}: {remains}: {text[max(0, text.find(remains) - 80) :][:160]!r}"


def test_files_of_the_repository_are_in_the_site_as_they_are(site: Path) -> None:
    page = site / "repository" / "examples" / "tensor_api.py" / "index.html"
    assert "def compute_cache" in re.sub(r"<[^>]+>", "", page.read_text())
    assert (site / "repository" / "CHANGELOG" / "index.html").is_file()


def build_page(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A site of one page, with our settings."""
    config = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[0]
    config = config.replace("docs_dir: docs", f"docs_dir: {folder}/docs")
    config = config.replace("examples/setup/", f"{ROOT}/examples/setup/")
    (folder / "docs").mkdir()
    (folder / "docs" / "index.md").write_text(f"# Title\n\n{text}\n")
    (folder / "mkdocs.yml").write_text(config)
    return build(folder / "mkdocs.yml", folder / "site")


def test_dead_links_stop_the_build(tmp_path: Path) -> None:
    dead = ["other.md", "#nowhere", "../no/such/file.py", "../CHANGELOG.md#not-there", "/absolute.md", "no-picture.svg"]
    done = build_page("\n\n".join(f"[a]({link})" for link in dead), tmp_path)
    assert done.returncode != 0
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    found = [link for link in dead if any(link.rpartition("#")[2].removeprefix("../") in line for line in warnings)]
    assert found == dead, done.stderr


def test_links_into_the_repository_and_code_are_let_through(tmp_path: Path) -> None:
    good = "[b](../LICENSE) [c](../examples/proxy.py) [d](../examples/setup/) [e](#title) [f](../CHANGELOG.md)"
    done = build_page(f"```text\n[a](other.md)\n```\n\n`[a](other.md)` {good}", tmp_path)
    assert done.returncode == 0, done.stderr
    page = Page(tmp_path / "site" / "index.html")
    assert {link for link in page.links if link.startswith("repository/")} == {
        "repository/LICENSE/", "repository/examples/proxy.py/", "repository/examples/setup/", "repository/CHANGELOG/",
    }  # fmt: skip


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "assets").glob("*.svg")), ids=lambda path: path.name)
def test_a_diagram_stands_alone_and_is_readable_in_light_and_dark(path: Path) -> None:
    text = path.read_text()
    root = ET.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    assert root.find(f"{space}title") is not None and root.find(f"{space}desc") is not None
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"(?:href|src)=|@import|url\((?!#)", text)
    paper = root.find(f"{space}rect")
    assert paper is not None and paper.get("class") == "paper", "a background of its own"
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    assert width <= 900
    for shape in root.iter(f"{space}rect"):
        x, y, w, h = (float(shape.get(name, 0)) for name in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= width and y + h <= height
