"""Draws the page for the documents: `python tests/screenshot.py`, from the root of the checkout.

`explorer.png`: a run of Banking77 is asked a sentence, then taught three of a new label; above the
answer before, below the page after. `explorer-pictures.png`: a run of MNIST's digits from zero to
seven is taught three eights, and asked about another: the first for which three are enough. Both
data sets are looked for where `python -m experiments data` looks.
"""

from __future__ import annotations

import asyncio
import io
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import browser
from digits import NAMES, write_digits
from PIL import Image
from playwright.sync_api import Page, sync_playwright
from servers import running

from experiments.data import data_dir
from mbpa.encoders import image, text
from mbpa.encoders.pictures import standardize
from mbpa.explorer import page
from mbpa.serve import teaching
from mbpa.serve.answers import Lesson
from mbpa.serve.app import create_app
from mbpa.serve.classifier import Classifier
from mbpa.serve.labelled_images import LabelledImages, read_labelled_images
from mbpa.serve.labelled_texts import LabelledTexts, read_labelled_texts

LABEL = "travel_insurance"
TAUGHT = """Is lost luggage insured when I travel?
Does my card come with travel insurance?
The airline lost my bag, can I claim it?"""
ASKED = "Am I covered when I fall ill abroad?"
EACH = 60  # pictures of a digit
LINE = (0xE2, 0xE8, 0xF0)  # between two states of the page


def draw_sentences(out: Path) -> None:
    data = read_labelled_texts(data_dir() / "banking77" / "train.csv")
    with teach_run(data, text.encoder()) as classifier, open_page(classifier) as shown:
        shown.get_by_role("textbox", name="Sentence").fill(ASKED)
        shown.get_by_role("button", name="Ask").click()
        shown.locator("#answer .bars").wait_for()
        shown.mouse.move(0, 0)
        box = shown.locator("#answer").bounding_box()
        assert box is not None
        before = take_photo(shown, height=box["y"] + box["height"])
        shown.get_by_role("textbox", name="Examples, one per line").fill(TAUGHT)
        after = take_photo(_teach(shown, LABEL))
    _save(before, after, out=out)


def draw_pictures(out: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_digits(folder / "digits", each=EACH)
        eights = files["eight"]
        (folder / "known").mkdir()
        for label in NAMES[:8]:
            shutil.move(folder / "digits" / label, folder / "known" / label)
        with teach_run(read_labelled_images(folder / "known"), image.encoder()) as classifier:
            asked = find_answered(classifier, eights)
            with open_page(classifier) as shown:
                places = shown.locator(".drop input[type=file]")
                places.last.set_input_files(eights[:3])
                shown.locator(".drop").filter(has_text="002").wait_for()
                places.first.set_input_files(asked)
                shown.locator("#answer .bars").wait_for()
                _save(take_photo(_teach(shown, "eight")), out=out)


@contextmanager
def teach_run(data: LabelledTexts | LabelledImages, encoder: text.TextEncoder | image.ImageEncoder):
    with tempfile.TemporaryDirectory() as name:
        made = teaching.teach(data, encoder, progress=True)
        teaching.write_new_run(made, data, Path(name) / "run")
        with Classifier.load(Path(name) / "run") as classifier:
            yield classifier


def find_answered(classifier: Classifier, eights: list[Path]) -> Path:
    pictures = [standardize(path.read_bytes()) for path in eights]
    ids = classifier.learn([Lesson("eight", image=picture) for picture in pictures[:3]])
    answers = classifier.predict(pictures[3:])
    classifier.forget(ids)
    return next(
        path for path, answer in zip(eights[3:], answers, strict=True) if answer.label == "eight"
    )


@contextmanager
def open_page(classifier: Classifier) -> Iterator[Page]:
    async def mount_page():
        return page.mount(create_app(classifier), classifier)

    chromium = browser.find_browser()
    with (
        running(asyncio.run(mount_page())) as url,
        sync_playwright() as driver,
        driver.chromium.launch(
            executable_path=chromium.program, env=chromium.environment
        ) as opened,
    ):
        shown = opened.new_page(viewport={"width": 1280, "height": 900})
        shown.goto(url)
        shown.locator("#map svg").wait_for()
        yield shown


def _teach(shown: Page, label: str) -> Page:
    shown.get_by_role("textbox", name="Teach a label").fill(label)
    shown.get_by_role("button", name="Teach").filter(visible=True).click()
    shown.locator("#message").get_by_text("Taught 3").wait_for()
    shown.mouse.move(0, 0)
    return shown


def take_photo(shown: Page, height: float | None = None) -> Image.Image:
    shown.wait_for_timeout(500)
    taken = Image.open(io.BytesIO(shown.screenshot(full_page=True))).convert("RGB")
    return taken.crop((0, 0, taken.width, round(height) + 16)) if height else taken


def _save(*states: Image.Image, out: Path) -> None:
    """One below the other, a line between; in 128 colours, which is enough and small."""
    sheet = Image.new(
        "RGB", (states[0].width, sum(each.height for each in states) + 2 * len(states) - 2), LINE
    )
    top = 0
    for state in states:
        sheet.paste(state, (0, top))
        top += state.height + 2
    sheet.quantize(128, dither=Image.Dither.NONE).save(out, optimize=True)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    draw_sentences(folder / "explorer.png")
    draw_pictures(folder / "explorer-pictures.png")
