"""Draws docs/explorer-pictures.png: `python tests/screenshot.py`, from the root of the checkout.

A run of MNIST's digits from zero to seven is taught three eights, and asked about another: the
first for which three are enough.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

import browser
from digits import NAMES, write_digits
from playwright.sync_api import sync_playwright
from servers import running

from mbpa import image
from mbpa.explorer import page
from mbpa.serve import teaching
from mbpa.serve.album import read_album
from mbpa.serve.answers import Lesson
from mbpa.serve.classifier import Classifier
from mbpa.serve.service import create_app

EACH = 60  # pictures of a digit


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_digits(folder / "digits", each=EACH)
        eights = files["eight"]
        (folder / "taught").mkdir()
        for label in NAMES[:8]:
            shutil.move(folder / "digits" / label, folder / "taught" / label)
        album = read_album(folder / "taught")
        made = teaching.teach(album, image.encoder())
        teaching.write_taught(made, album, folder / "run")
        with Classifier.load(folder / "run") as classifier:
            _draw(classifier, eights[:3], _answered(classifier, eights), out)


def _answered(classifier: Classifier, eights: list[Path]) -> Path:
    pictures = [image.kept(path.read_bytes()) for path in eights]
    ids = classifier.learn([Lesson("eight", image=picture) for picture in pictures[:3]])
    answers = classifier.predict(pictures[3:])
    classifier.forget(ids)
    return next(
        path for path, answer in zip(eights[3:], answers, strict=True) if answer.label == "eight"
    )


def _draw(classifier: Classifier, taught: list[Path], asked: Path, out: Path) -> None:
    async def mounted():
        return page.mount(create_app(classifier), classifier)

    chromium = browser.found()
    with (
        running(asyncio.run(mounted())) as url,
        sync_playwright() as driver,
        driver.chromium.launch(
            executable_path=chromium.program, env=chromium.environment
        ) as opened,
    ):
        shown = opened.new_page(viewport={"width": 1280, "height": 900})
        shown.goto(url)
        shown.locator("#map svg").wait_for()
        places = shown.locator(".drop input[type=file]")
        places.last.set_input_files(taught)
        shown.locator(".drop").filter(has_text="002").wait_for()
        places.first.set_input_files(asked)
        shown.locator("#answer .bars").wait_for()
        shown.get_by_role("textbox", name="Teach a label").fill("eight")
        shown.get_by_role("button", name="Teach").filter(visible=True).click()
        shown.locator("#said").get_by_text("Taught 3").wait_for()
        shown.mouse.move(0, 0)
        shown.wait_for_timeout(500)
        shown.screenshot(path=out, full_page=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/explorer-pictures.png"))
