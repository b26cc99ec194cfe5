"""The built site: links lead somewhere, nothing comes from elsewhere, and a browser shows it."""

from __future__ import annotations

import functools
import gc
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import browser
import pytest

from website import dialect, reference
from website.draw_method import FIGURES, draw_all

pytestmark = pytest.mark.heavy  # the site is built

ROOT = Path(__file__).parents[2]
LOADING = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Page(HTMLParser):
    """The anchors, links and loaded files of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.anchors |= {named[name] or "" for name in ("id", "name") if name in named}
        if tag == "a" and named.get("href"):
            self.links.append(named["href"] or "")
        if (source := named.get(LOADING.get(tag, ""))) and named.get("rel") != "canonical":
            self.loaded.append(source)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the site, built once, with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    """Return all pages by their files, except the one for errors, whose links are absolute."""
    files = [path for path in site.rglob("*.html") if path.name != "404.html"]
    return {path: Page(path.read_text("utf-8")) for path in files}


def test_links_and_anchors_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        for link in {*page.links, *page.loaded}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            is_known = target in pages and (
                not parts.fragment or unquote(parts.fragment) in pages[target].anchors
            )
            if not is_known and (target in pages or not target.is_file()):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert not [each for each in page.loaded if urlsplit(each).netloc], path
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//", path.read_text("utf-8")), path


def test_every_document_and_public_name_has_a_page(pages: dict[Path, Page], site: Path) -> None:
    documents = {
        path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        for path in (ROOT / "docs").rglob("*.md")
    }
    names = {
        each.page.removesuffix(".md") for names in reference.list_names().values() for each in names
    }
    built = {path.parent.relative_to(site).as_posix() for path in pages}
    assert {each.removesuffix("index").rstrip("/") or "." for each in documents} <= built
    assert names <= built
    for name in names:
        text = (site / name / "index.html").read_text("utf-8")
        title = name.rpartition("/")[2].rpartition(".")[2]
        assert re.search(rf'class="doc doc-heading">.*?\b{title}\b', text, re.DOTALL), name


# In a browser


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def site_url(site: Path) -> Iterator[str]:
    """Yield the address of the site on a plain file server."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # Playwright's pipe
def test_the_site_works_in_a_browser(site_url: str) -> None:
    """Search, dark mode and a phone, without an error or a request to another host."""
    from playwright.sync_api import sync_playwright

    chromium = browser.find_or_skip()
    problems: list[str] = []
    with (
        sync_playwright() as driver,
        driver.chromium.launch(
            executable_path=chromium.program, env=chromium.environment
        ) as opened,
    ):
        shown = opened.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        shown.set_default_timeout(60_000)
        shown.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
        shown.on("pageerror", lambda error: problems.append(str(error)))
        shown.on(
            "request",
            lambda request: (
                None if request.url.startswith(site_url) else problems.append(request.url)
            ),
        )
        shown.goto(f"{site_url}/")
        shown.locator("input.md-search__input").click()
        shown.keyboard.type("certified")
        found = shown.locator(".md-search-result__link").first
        found.wait_for()
        assert "certified" in found.inner_text().lower()

        shown.goto(f"{site_url}/method/")
        light = shown.evaluate("getComputedStyle(document.querySelector('svg.drawing')).color")
        shown.locator("label[for=__palette_1]").click()
        scheme = "document.body.getAttribute('data-md-color-scheme')"
        shown.wait_for_function(f"{scheme} === 'slate'")
        dark = shown.evaluate("getComputedStyle(document.querySelector('svg.drawing')).color")
        assert light != dark
        assert shown.locator("math").count() >= 8

        shown.set_viewport_size({"width": 360, "height": 740})
        for name in (
            "",
            "method/",
            "experiments/",
            "reference/mbpa/MbPA/",
            "tutorials/",
            "serving/",
        ):
            shown.goto(f"{site_url}/{name}")
            width = shown.evaluate("document.documentElement.scrollWidth")
            assert width <= 360, f"{name} is {width} pixels wide on a phone of 360"
        shown.close()
    gc.collect()  # here, where what is left open is no error
    assert not problems


# What the site is made of


def test_the_drawings_are_those_of_the_run() -> None:
    """Numbers may differ by what other processors round, everything else is the same."""
    drawn = draw_all()
    assert {path.name for path in FIGURES.glob("method-*.svg")} == set(drawn)
    for name, drawing in drawn.items():
        kept = (FIGURES / name).read_text("utf-8")
        assert NUMBER.sub("#", kept) == NUMBER.sub("#", drawing), name
        pairs = zip(NUMBER.findall(kept), NUMBER.findall(drawing), strict=True)
        assert all(abs(float(one) - float(two)) <= 2 for one, two in pairs), name


def test_code_on_the_page_of_the_method_is_in_the_library() -> None:
    text = (ROOT / "docs" / "method.md").read_text("utf-8")
    quoted = re.findall(r'^```py title="([^"]+)"\n(.*?)^```$', text, re.DOTALL | re.MULTILINE)
    assert len(quoted) >= 6
    for name, block in quoted:
        source = {line.strip() for line in (ROOT / name).read_text("utf-8").splitlines()}
        for line in block.splitlines():
            assert line.strip() in source, f"{name}: {line}"


def test_lists_are_indented_for_python_markdown() -> None:
    text = "Before:\n- one\n  more\n\n  ```py\n  x\n  ```\n- two\n  1. inner\n     rest\n\nend"
    expected = (
        "Before:\n\n- one\n    more\n\n    ```py\n    x\n    ```\n- two\n    1. inner\n"
        "        rest\n\nend"
    )
    assert dialect.translate(text) == expected


def test_formulas_become_mathml_except_in_code() -> None:
    assert "<math" in dialect.translate("the head $`g_\\theta`$")
    assert dialect.translate("```console\n$ echo $`x`$\n```") == "```console\n$ echo $`x`$\n```"
