"""The page of a language run, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import browser
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from servers import running
from tiny_language_model import TEXT, make_model, make_tokenizer

from mbpa.language import MemoryLM
from mbpa.serve.language_app import create_language_app
from mbpa.serve.settings import LanguageSettings

SENTENCE = TEXT[:80]
expect.set_options(timeout=60_000)  # milliseconds; the first answer of a model may take a while


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    found = browser.find_or_skip()
    with sync_playwright() as driver:
        opened = driver.chromium.launch(
            executable_path=found.program, env=found.environment, args=["--no-sandbox"]
        )
        yield opened
        opened.close()


@pytest.fixture
def lm() -> MemoryLM:
    return MemoryLM(make_model(), make_tokenizer(), capacity=2000)


class Visit:
    """A visitor of the page, who notices errors and requests to other hosts."""

    def __init__(self, chromium: Browser, url: str, width: int = 1200) -> None:
        self.page: Page = chromium.new_page(viewport={"width": width, "height": 900})
        self.hosts: set[str] = set()
        self.troubles: list[str] = []
        self.page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.goto(url)

    def score(self, text: str) -> None:
        self.page.locator("#text").fill(text)
        self.page.get_by_role("button", name="Score", exact=True).click()
        expect(self.page.locator("#tokens [role=button]").first).to_be_visible()

    def add(self, name: str, text: str) -> None:
        self.page.get_by_text("Add a document").click()
        self.page.locator("#name").fill(name)
        self.page.locator("#document").fill(text)
        self.page.get_by_role("button", name="Read it").click()
        expect(self.page.locator("#documents .name", has_text=name)).to_be_visible()
        self.wait()

    def wait(self) -> None:
        expect(self.page.locator("#busy")).to_have_text("")

    def read_figures(self) -> list[str]:
        return self.page.locator("#figures tr").nth(1).locator("td").all_inner_texts()


@pytest.mark.heavy
def test_a_document_is_added_seen_and_forgotten(chromium: Browser, lm: MemoryLM) -> None:
    with running(create_language_app(lm)) as url:
        visit = Visit(chromium, url)
        page = visit.page
        expect(page.get_by_text("The memory is empty.")).to_be_visible()
        visit.score(SENTENCE)
        _, alone, with_memory = visit.read_figures()
        assert alone == with_memory
        assert page.locator("#tokens").inner_text() == SENTENCE
        assert not page.locator("#tokens .helped-2").count()

        visit.add("heron.md", TEXT)
        expect(page.locator("#tokens .helped-2").first).to_be_visible()
        _, again, better, before = visit.read_figures()
        assert again == before == alone
        assert float(better) < float(alone) / 2
        page.locator("#tokens [role=button]").nth(4).click()
        place = page.locator("#places li").first
        expect(place).to_contain_text("heron.md")
        assert (
            place.locator("mark").inner_text()
            == page.locator("#tokens [role=button]").nth(4).inner_text()
        )

        page.get_by_role("button", name="Forget heron.md").click()
        expect(page.get_by_text("The memory is empty.")).to_be_visible()
        visit.wait()
        assert visit.read_figures()[1:3] == [alone, alone]
        assert not page.locator("#tokens .helped-2").count()
        assert not lm.sources()
        assert visit.hosts == {url.removeprefix("http://")}
        assert not visit.troubles


def test_a_text_is_completed_with_the_origin_of_each_token(chromium: Browser, lm: MemoryLM) -> None:
    lm.read(TEXT, source="heron.md")
    with running(create_language_app(lm)) as url:
        visit = Visit(chromium, url, width=390)
        page = visit.page
        page.locator("#text").fill("The heron stands")
        page.locator("#count").fill("6")
        page.get_by_role("button", name="Complete").click()
        expect(page.locator("#tokens [role=button]")).to_have_count(6)
        written = lm.generate("The heron stands", max_new_tokens=6)
        shown = page.locator("#tokens").text_content()
        assert shown == "The heron stands" + "".join(token.text for token in written.tokens)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390  # fits on a phone
        assert not visit.troubles


def test_the_page_asks_for_the_token_and_shows_errors(chromium: Browser, lm: MemoryLM) -> None:
    settings: Any = {"token": "open sesame"}
    with running(create_language_app(lm, LanguageSettings(**settings))) as url:
        visit = Visit(chromium, url)
        page = visit.page
        expect(page.locator("#token")).to_be_visible()
        page.locator("#token").fill("open sesame")
        page.get_by_role("button", name="Continue").click()
        expect(page.get_by_text("The memory is empty.")).to_be_visible()
        expect(page.locator("#token")).to_be_hidden()
        visit.wait()
        page.locator("#text").fill("A")
        page.get_by_role("button", name="Score", exact=True).click()
        expect(page.get_by_role("alert")).to_contain_text("tokens, got 1")
