"""Visitors of the page: with a browser, and without one."""

from __future__ import annotations

import asyncio
from collections import Counter

from mbpa.explorer.actions import Actions
from mbpa.serve.app import create_app
from mbpa.serve.classifier import Classifier


class Visitor:
    """A visitor with a browser; records errors and the hosts that the page contacts."""

    def __init__(self, opened, url: str, **options) -> None:
        self._context, self.hosts, self.troubles = opened.new_context(**options), set(), []
        self.page = self.visit(url)
        self.page.locator("#map svg").wait_for()

    def close(self) -> None:
        self._context.close()

    def visit(self, url: str):
        """Open a tab; Gradio's page complains when it is left while something is on its way."""
        page = self._context.new_page()
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        page.on("websocket", lambda opened: self.hosts.add(opened.url.split("/")[2]))
        page.on("pageerror", lambda error: self.troubles.append(f"{error} {error.stack}"))
        page.on("response", self._look_at)
        page.on("console", self._hear)
        page.goto(url)
        return page

    def _look_at(self, response) -> None:
        if response.status >= 400:
            self.troubles.append(f"{response.status} {response.url}")

    def _hear(self, message) -> None:
        if message.type == "error":
            self.troubles.append(f"{message.text} {message.location}")

    def ask(self, sentence: str) -> None:
        self.page.get_by_role("textbox", name="Sentence").fill(sentence)
        self.page.get_by_role("button", name="Ask").click()
        self.page.locator("#answer .bars").wait_for()

    def press(self, button: str, then: str) -> None:
        """Press a button, and wait until the page says that it is done."""
        self.page.get_by_role("button", name=button).filter(visible=True).click()
        self.wait_for_message(then)

    def wait_for_message(self, text: str) -> None:
        """Wait until the page says what it has done."""
        self.page.locator("#message").get_by_text(text).wait_for()

    def open_tab(self, name: str) -> None:
        self.page.get_by_role("tab", name=name).click()

    def choose(self, name: str, option: str) -> None:
        """Choose an option of a dropdown."""
        self.page.get_by_role("combobox", name=name, exact=True).filter(visible=True).click()
        self.page.get_by_role("option", name=option, exact=True).click()

    def pick_row(self, text: str) -> None:
        """Select the row of the visible list that shows a text."""
        self.page.locator(".list").filter(visible=True).get_by_text(text, exact=True).filter(
            visible=True
        ).click()

    def wait_for_rows(self, texts: list[str], known: list[str]) -> None:
        """Wait until the visible list shows these texts in this order, and no other known ones."""
        self.page.wait_for_function(
            """([texts, known]) => {
                const lists = [...document.querySelectorAll(".list")];
                const lines = lists.find(each => each.offsetParent).innerText.split(/[\\n\\t]/);
                const found = lines.filter(line => known.includes(line));
                return JSON.stringify(found) === JSON.stringify(texts);
            }""",
            arg=[texts, known],
        )

    @property
    def answer(self) -> str:
        return self.page.locator("#answer .verdict b").inner_text()

    @property
    def everything(self) -> str:
        return (
            self.page.locator("#answer").inner_text() + self.page.locator("#memories").inner_text()
        )


def run_visits(classifier: Classifier, *visits):
    """Let visitors act one after the other; return the result of the last one."""

    async def day():
        app = create_app(classifier)
        taken = None
        async with app.router.lifespan_context(app):
            for visit in visits:
                taken = await visit(Actions(app.state.service))
        return taken

    return asyncio.run(day())


def visit_page(classifier: Classifier, visit):
    """Return the result of a visit to the page itself, without a browser."""
    from mbpa.explorer.page import ExplorerPage
    from mbpa.explorer.uploads import Uploads

    async def show(actions: Actions):
        uploads = Uploads.create_beside(classifier.journal)
        try:
            return await visit(ExplorerPage(actions, uploads))
        finally:
            uploads.close()

    return run_visits(classifier, show)


def collect_state(classifier: Classifier) -> Counter:
    """Return everything in the memory except ids."""
    ids, keys = classifier.entries()
    texts = {each.id: each for each in classifier.examples()}
    return Counter(
        (texts[id].label, texts[id].text, key.numpy().tobytes())
        for id, key in zip(ids, keys, strict=True)
    )
