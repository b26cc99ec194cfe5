"""The page in a real browser. One server and one browser serve all tests of this file."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import browser
import pytest
from runs import BANK_SENTENCES, WRONG_SENTENCE, WordEncoder, write_bank_run
from servers import running
from visiting import Visitor, collect_state

from mbpa.explorer import page
from mbpa.serve.answers import Lesson
from mbpa.serve.app import create_app
from mbpa.serve.classifier import Classifier

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # Playwright's pipe
]

LABEL = "luggage <img src=//elsewhere.example/x>"  # shown as it is, it would be fetched
LUGGAGE = "suitcase is gone\n\nmy suitcase flew away\nsuitcase gone at the airport"
LONG_LABEL = "card_payment_wrong_exchange_rate_for_customer"
PHONE = {"viewport": {"width": 390, "height": 844}}
TABS = ("Ask and teach", "Taught", "Labels", "Least certain", "Probably mislabelled")

# Words of the page's own texts that are not on one line.
FIND_BROKEN_WORDS = r"""() => [...document.querySelectorAll(".mbpa")].flatMap(card => {
  const broken = [], walker = document.createTreeWalker(card, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    for (const word of walker.currentNode.data.matchAll(/[^\s_.\/:-]+/g)) {
      const range = document.createRange();
      range.setStart(walker.currentNode, word.index);
      range.setEnd(walker.currentNode, word.index + word[0].length);
      const tops = new Set([...range.getClientRects()].map(each => Math.round(each.top)));
      if (tops.size > 1) broken.push(word[0]);
    }
  }
  return broken;
})"""

# Texts whose colour has a contrast of less than 4.5 to what lies behind them, with the contrast.
FIND_PALE_TEXTS = r"""() => {
  const context = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const parse = colour => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = context.getImageData(0, 0, 1, 1).data;
    return {rgb: [red, green, blue], alpha: alpha / 255};
  };
  const blend = (top, under) => top.rgb.map((c, i) => top.alpha * c + (1 - top.alpha) * under[i]);
  const find_background = element => {
    if (!element) return [255, 255, 255];
    const own = parse(getComputedStyle(element).backgroundColor);
    return own.alpha === 1 ? own.rgb : blend(own, find_background(element.parentElement));
  };
  const find_opacity = element =>
    element ? getComputedStyle(element).opacity * find_opacity(element.parentElement) : 1;
  const measure = rgb => {
    const [red, green, blue] = rgb.map(c => c / 255).map(
      c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const pale = [];
  let count = 0;
  const check = (element, colour, text) => {
    if (element.closest(":disabled, [aria-disabled=true]")) return;
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height || !element.checkVisibility({visibilityProperty: true})) return;
    const under = find_background(element), given = parse(colour);
    given.alpha *= find_opacity(element);
    const [dark, light] = [measure(blend(given, under)), measure(under)].sort((a, b) => a - b);
    const contrast = (light + 0.05) / (dark + 0.05);
    count += 1;
    if (contrast < 4.5) pale.push(`${text.trim().slice(0, 40)}: ${contrast.toFixed(2)}`);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (walker.currentNode.data.trim() && !element.closest("svg, script, style, noscript"))
      check(element, getComputedStyle(element).color, walker.currentNode.data);
  }
  const fields = "input:not([type=radio], [type=checkbox]), textarea";
  for (const element of document.querySelectorAll(fields)) {
    check(element, getComputedStyle(element).color, element.value || element.tagName);
    if (element.placeholder)
      check(element, getComputedStyle(element, "::placeholder").color, element.placeholder);
  }
  return {pale, count};
}"""

# Whether nothing is being loaded or changing its colour.
IS_SETTLED = """() => !document.querySelector(".pending")
  && document.getAnimations().every(each => each.playState !== "running")"""

# The element that has the focus: its name, and the width of its outline in pixels.
DESCRIBE_FOCUS = r"""() => {
  const focused = document.activeElement;
  const shown = getComputedStyle(focused.closest(".choice") || focused);
  const name = focused.getAttribute("aria-label") || focused.closest("label")?.innerText
    || focused.innerText;
  const outline = shown.outlineStyle === "none" ? 0 : parseFloat(shown.outlineWidth);
  return [name || "", outline];
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    """A classifier, the address of its page, and a browser."""
    from playwright.sync_api import sync_playwright

    chromium = browser.find_or_skip()
    run = tmp_path_factory.mktemp("page") / "run"
    write_bank_run(run)

    async def mount_page(classifier: Classifier):  # in a loop: else Gradio leaves loops open
        return page.mount(create_app(classifier), classifier)

    with (
        Classifier.load(run, text_encoder=WordEncoder()) as classifier,
        running(asyncio.run(mount_page(classifier))) as url,
        sync_playwright() as driver,
        driver.chromium.launch(
            executable_path=chromium.program, env=chromium.environment
        ) as opened,
    ):
        yield classifier, url, opened
    gc.collect()  # here, where what is left open is no error


@pytest.fixture
def classifier(site) -> Iterator[Classifier]:
    """The classifier; afterwards it forgets what the test has taught."""
    classifier = site[0]
    last = classifier.journal.last
    yield classifier
    classifier.forget([each.id for each in classifier.examples() if each.id > last])


@pytest.fixture
def visit(site, classifier):
    """A function that opens the page; afterwards nothing must have gone wrong in it."""
    _, url, opened = site
    visitors = []

    def open_page(**options) -> Visitor:
        visitors.append(Visitor(opened, f"{url}{page.PATH}", **options))
        return visitors[-1]

    yield open_page
    for visitor in visitors:
        visitor.close()
        assert visitor.troubles == []
        assert visitor.hosts == {url.removeprefix("http://")}


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Record the addresses that this process connects to or looks up."""
    seen: list[object] = []
    connect, resolve = socket.socket.connect, socket.getaddrinfo

    def connecting(self: socket.socket, address: object) -> None:
        seen.append(address)
        return connect(self, address)

    def resolving(host: object, *arguments: object, **named: object) -> object:
        seen.append((host, 0))
        return resolve(host, *arguments, **named)

    monkeypatch.setattr(socket.socket, "connect", connecting)
    monkeypatch.setattr(socket, "getaddrinfo", resolving)
    return seen


def test_an_untouched_page_says_what_to_do(visit):
    visitor = visit()
    assert visitor.page.locator("#answer li").count() == 4
    visitor.page.locator("#answer").get_by_text("Type a sentence and press Enter").wait_for()
    assert visitor.page.get_by_role("combobox", name="Wrong?").count() == 0
    assert not visitor.page.locator("#memories").is_visible()
    visitor.open_tab("Taught")
    visitor.page.get_by_text("Nothing has been taught since the training").wait_for()
    visitor.open_tab("Labels")
    visitor.page.locator("#label").get_by_text("Choose a label to rename it").wait_for()
    assert visitor.page.get_by_role("button", name="Rename").is_disabled()


def test_a_visitor_teaches_and_undoes_and_nothing_leaves_the_machine(
    site, visit, classifier, addresses
):
    visitor, untaught = visit(), classifier.examples()
    visitor.ask("my suitcase is late")
    before = visitor.everything
    assert visitor.answer in BANK_SENTENCES
    _teach(visitor, LABEL, LUGGAGE, f"Taught 3 examples of the new label “{LABEL}”.")
    assert visitor.answer == LABEL
    assert "my suitcase flew away" in visitor.everything
    assert classifier.journal.labels()[LABEL] == 3
    assert visitor.page.locator("#map circle").count() > 3
    visitor.press("Undo", "Undone")
    assert visitor.everything == before
    assert classifier.examples() == untaught
    reference = visitor.visit(f"{site[1]}/docs")
    assert reference.get_by_role("heading", name="POST /predict").is_visible()
    assert {address[0] for address in addresses if isinstance(address, tuple)} <= {"127.0.0.1"}


def test_a_visitor_corrects_an_answer(visit, classifier):
    visitor = visit()
    visitor.ask("order a suitcase")
    assert visitor.answer != "pin"
    label = visitor.page.get_by_role("combobox", name="Wrong?")
    label.fill("pin")
    label.press("Enter")
    visitor.press("Correct it", "Taught 1 example of “pin”.")
    assert visitor.answer == "pin"
    assert classifier.examples("pin")[-1].text == "order a suitcase"


def test_a_visitor_reviews_examples(visit, classifier):
    visitor, before = visit(), collect_state(classifier)
    visitor.open_tab("Probably mislabelled")
    visitor.page.get_by_text("suggest card").filter(visible=True).first.wait_for()
    visitor.press("Change to the suggested label", "Now “card”, was “loan”.")
    assert WRONG_SENTENCE in [each.text for each in classifier.examples("card")]
    assert WRONG_SENTENCE not in [each.text for each in classifier.examples("loan")]
    visitor.press("Undo", "Undone: Now “card”")
    assert collect_state(classifier) == before
    visitor.open_tab("Least certain")
    visitor.page.get_by_text("Its neighbours, the").filter(visible=True).wait_for()
    visitor.press("Forget this example", "Forgot one example of")
    assert len(classifier) == before.total() - 1
    visitor.press("Undo", "Undone: Forgot one")
    assert collect_state(classifier) == before


def test_what_was_taught_is_listed_after_a_reload_and_taken_back(visit, classifier):
    visitor, untaught = visit(), collect_state(classifier)
    _teach(visitor, LABEL, LUGGAGE, "Taught 3 examples")
    classifier.learn([Lesson("pin", "pin of the suitcase")], by="ana")  # as over HTTP
    visitor.page.reload()
    visitor.page.locator("#map svg").wait_for()
    assert visitor.page.get_by_role("button", name="Undo").is_disabled()
    visitor.open_tab("Taught")
    texts = ["pin of the suitcase", *LUGGAGE.replace("\n\n", "\n").splitlines()[::-1]]
    visitor.wait_for_rows(texts, texts)
    assert visitor.page.get_by_role("button", name="Take this one back").is_disabled()
    visitor.choose("Label", "pin")
    visitor.wait_for_rows(texts[:1], texts)
    visitor.choose("Taught within", "the last hour")
    visitor.wait_for_rows(texts[:1], texts)
    visitor.pick_row("pin of the suitcase")
    visitor.page.locator("#taught").get_by_text("by ana").wait_for()
    visitor.press("Take this one back", "Took back 1 example of “pin”.")
    visitor.wait_for_rows([], texts)
    visitor.page.get_by_text("passes this filter").wait_for()
    visitor.choose("Label", "all labels")
    visitor.wait_for_rows(texts[1:], texts)
    visitor.press("Take back all 3 that are listed", "Took back 3 examples of")
    visitor.wait_for_rows([], texts)
    assert collect_state(classifier) == untaught
    visitor.press("Undo", "Undone: Took back 3 examples")
    visitor.wait_for_rows(texts[1:], texts)
    assert classifier.labels[LABEL] == 3
    visitor.press("Undo", "Undone: Took back 1 example")
    assert classifier.examples("pin")[-1].text == "pin of the suitcase"


def test_labels_are_renamed_and_merged_and_this_is_undone(visit, classifier):
    classifier.learn([Lesson("baggage", "suitcase gone"), Lesson("bag", "bag lost")])
    visitor, before = visit(), collect_state(classifier)
    visitor.open_tab("Labels")
    visitor.wait_for_rows([*sorted(BANK_SENTENCES)], [*BANK_SENTENCES])
    visitor.page.get_by_role("textbox", name="Find a label").fill("bag")
    visitor.wait_for_rows(["bag", "baggage"], ["bag", "baggage", *BANK_SENTENCES])
    visitor.pick_row("baggage")
    name = visitor.page.get_by_role("textbox", name="New name")
    visitor.page.locator("#label").get_by_text("1 example, taught since training").wait_for()
    name.fill("luggage")
    name.press("Enter")
    visitor.wait_for_message("Renamed “baggage” to “luggage”.")
    assert "luggage" in classifier.labels
    visitor.choose("Merge into", "bag")
    visitor.press("Merge", "Merged 1 example of “luggage” into “bag”.")
    visitor.page.locator("#label").get_by_text("2 examples").wait_for()
    assert classifier.labels["bag"] == 2
    assert "luggage" not in classifier.labels
    visitor.press("Undo", "Undone: Merged")
    visitor.press("Undo", "Undone: Renamed")
    visitor.wait_for_rows(["bag", "baggage"], ["bag", "baggage", "luggage"])
    assert collect_state(classifier) == before
    visitor.page.get_by_role("textbox", name="Find a label").fill("rates")
    visitor.pick_row("rates")
    visitor.choose("Merge into", "bag")
    visitor.page.get_by_role("button", name="Merge").click()
    visitor.page.get_by_text("This merge cannot be undone: tick the box").wait_for()
    assert collect_state(classifier) == before


def test_the_classifier_is_trained_again(site, classifier, tmp_path):
    """On a run of its own, since what it learns stays."""
    from mbpa.explorer.labels_tab import IS_TRAINING

    write_bank_run(tmp_path / "run")
    with Classifier.load(tmp_path / "run", text_encoder=WordEncoder()) as own:
        own.learn([Lesson("luggage", text) for text in LUGGAGE.split("\n") if text])
        with running(mount_in_thread(own)) as url:
            visitor = Visitor(site[2], f"{url}{page.PATH}")
            visitor.open_tab("Labels")
            visitor.page.get_by_role("button", name="Train again").click()
            visitor.page.locator("#training").get_by_text(IS_TRAINING).wait_for()
            assert visitor.page.get_by_role("button", name="Train again").is_disabled()
            visitor.wait_for_message("Trained with 28 examples.")
            assert visitor.page.get_by_role("button", name="Train again").is_enabled()
            visitor.close()
        assert "luggage" in own.trained_labels
        assert visitor.troubles == []


def mount_in_thread(classifier: Classifier):
    """Return an app with the page, made in a thread: in this one, the browser's loop is running."""

    async def mount_page():
        return page.mount(create_app(classifier), classifier)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, mount_page()).result()


def test_everything_can_be_done_with_the_keyboard(visit, classifier):
    visitor, untaught = visit(), collect_state(classifier)
    keys = visitor.page.keyboard
    _focus(visitor, "Sentence")  # where the focus is at first
    keys.type("my suitcase is late")
    keys.press("Enter")
    visitor.page.locator("#answer .bars").wait_for()
    _tab_to(visitor, "Teach a label")
    keys.type("luggage")
    _tab_to(visitor, "Examples, one per line")
    for line in LUGGAGE.split("\n"):
        keys.type(line)
        keys.press("Enter")
    _tab_to(visitor, "Teach")
    keys.press("Enter")
    visitor.wait_for_message("Taught 3 examples")
    assert visitor.answer == "luggage"
    _tab_to(visitor, "Taught", "Shift+Tab")
    keys.press("Enter")
    visitor.page.get_by_text("suitcase is gone", exact=True).filter(visible=True).wait_for()
    _tab_to(visitor, "suitcase gone at the airport")
    keys.press("ArrowDown")  # the next row
    visitor.page.locator("#taught").get_by_text("my suitcase flew away").wait_for()
    _tab_to(visitor, "Take this one back")
    keys.press("Enter")
    visitor.wait_for_message("Took back 1 example")
    assert classifier.labels["luggage"] == 2
    _tab_to(visitor, "Undo", "Shift+Tab")
    keys.press("Enter")
    visitor.wait_for_message("Undone: Took back")
    keys.press("Enter")
    visitor.wait_for_message("Undone: Taught")
    assert collect_state(classifier) == untaught


@pytest.mark.parametrize("options", [{}, PHONE], ids=["desktop", "phone"])
def test_no_word_is_broken_and_nothing_is_wider_than_the_screen(visit, classifier, options):
    classifier.learn([Lesson(LONG_LABEL, "wrong exchange rate of the euro"), Lesson("a", "b")])
    visitor = visit(**options)
    width = visitor.page.viewport_size["width"]
    for state in _show_everything(visitor, "wrong euro exchange rate"):
        assert visitor.page.evaluate("document.documentElement.scrollWidth") <= width, state
        assert visitor.page.evaluate(FIND_BROKEN_WORDS) == [], state
    visitor.open_tab("Ask and teach")
    assert visitor.answer == LONG_LABEL


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_enough_contrast(visit, classifier, scheme):
    classifier.learn([Lesson("luggage", "suitcase gone"), Lesson("luggage", "suitcase lost")])
    visitor = visit(color_scheme=scheme)
    light = visitor.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (light == "rgb(255, 255, 255)") == (scheme == "light")
    for state in _show_everything(visitor, "dollar pin suitcase"):
        found = visitor.page.evaluate(FIND_PALE_TEXTS)
        assert found["count"] > 15
        assert found["pale"] == [], state


def test_the_page_shows_that_it_is_working(visit):
    visitor, held = visit(), []
    visitor.page.route("**/queue/join*", lambda route: held.append(route))  # sent later
    visitor.page.get_by_role("textbox", name="Sentence").fill("card late")
    visitor.page.get_by_role("textbox", name="Sentence").press("Enter")
    visitor.page.wait_for_function(
        """() => getComputedStyle(document.querySelector("#answer"), "::after")
            .content.includes("Working")"""
    )
    held[0].continue_()
    visitor.page.unroute("**/queue/join*")
    visitor.page.locator("#answer .bars").wait_for()
    content = """() => getComputedStyle(document.querySelector("#answer"), "::after").content"""
    assert visitor.page.evaluate(content) == "none"


def _teach(visitor: Visitor, label: str, examples: str, then: str) -> None:
    visitor.page.get_by_role("textbox", name="Teach a label").fill(label)
    visitor.page.get_by_role("textbox", name="Examples").fill(examples)
    visitor.press("Teach", then)


def _show_everything(visitor: Visitor, sentence: str) -> Iterator[str]:
    """Bring the page into one state after the other, and yield its name."""
    visitor.page.wait_for_function(IS_SETTLED)
    yield "empty"
    visitor.ask(sentence)
    visitor.page.wait_for_function(IS_SETTLED)
    yield "answered"
    for tab in TABS[1:]:
        visitor.open_tab(tab)
        visitor.page.locator(".list .choice").filter(visible=True).first.wait_for()
        visitor.page.locator(".list .choice").filter(visible=True).first.click()
        visitor.page.wait_for_timeout(50)  # until its effect begins
        visitor.page.wait_for_function(IS_SETTLED)
        yield tab


def _focus(visitor: Visitor, name: str) -> None:
    """Assert that the element of this name has the focus, and that this is to be seen."""
    focused, outline = visitor.page.evaluate(DESCRIBE_FOCUS)
    assert focused.startswith(name)
    assert outline >= 2


def _tab_to(visitor: Visitor, name: str, key: str = "Tab") -> None:
    """Press a key until the element of this name has the focus; each stop must be to be seen.

    Dropdowns on the way must be closed again.
    """
    stops = []
    for _ in range(40):
        visitor.page.keyboard.press(key)
        focused, outline = visitor.page.evaluate(DESCRIBE_FOCUS)
        stops.append(focused)
        assert outline >= 2, stops
        if focused.split("\n")[0].strip() == name:
            visitor.page.wait_for_function("() => !document.querySelector('ul[role=listbox]')")
            return
    raise AssertionError(f"{name!r} is not among {stops}")
