"""Small runs for the tests of serving: made of random keys, or of words, without a network."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import mbpa
from mbpa.encoders.image import ImageEncoder
from mbpa.encoders.text import TextEncoder
from mbpa.modules.new_rows import NewRows, label_sums
from mbpa.serve.answers import Lesson
from mbpa.serve.run_info import RunInfo, write_run
from mbpa.serve.training import Training, train_head
from mbpa.teaching import Learner, fit_learner
from mbpa.teaching.learner import MIN_LABELS

SCALE, OFFSET = 3.0, 0.5  # of rows for new labels
PREDICTOR = mbpa.Adapted(mbpa.Gradient(lr=5.0, steps=10), k=12)


class WordEncoder(TextEncoder):
    """The key of a text is the sum of its words, each with a random direction of its own."""

    name, key_dim = "words", 64

    def __call__(self, texts: Sequence[str]) -> Tensor:
        keys = torch.stack([sum(map(self._word, text.lower().split())) for text in texts])
        return nn.functional.normalize(keys, dim=1)

    def _word(self, word: str) -> Tensor:
        seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big")
        return torch.randn(self.key_dim, generator=torch.Generator().manual_seed(seed))


class UnsteadyEncoder(WordEncoder):
    """An encoder that rounds differently each time, as one on another machine might."""

    calls = 0

    def __call__(self, texts: Sequence[str]) -> Tensor:
        self.calls += 1
        return super().__call__(texts) * (1 + self.calls * 2.0**-20)


class BrokenEncoder(WordEncoder):
    """An encoder that always fails."""

    def __call__(self, texts: Sequence[str]) -> Tensor:
        raise ValueError("a defect of the encoder")


def write_word_run(directory: Path) -> None:
    """Write a run of four sentences and two labels for `WordEncoder`."""
    encoder = WordEncoder()
    named = [
        ("fruit", "apples and pears"),
        ("fruit", "a ripe plum"),
        ("tool", "hammer and saw"),
        ("tool", "a sharp saw"),
    ]
    keys = encoder([text for _, text in named])
    head = nn.Linear(encoder.key_dim, 2)
    with torch.no_grad():
        head.weight.copy_(torch.stack([keys[0] + keys[1], keys[2] + keys[3]]))
        head.bias.zero_()
    info = RunInfo(
        key_dim=encoder.key_dim,
        labels=("fruit", "tool"),
        trained_examples=len(named),
        threshold=0.0,
        encoder=encoder.name,
        fingerprint=encoder.fingerprint,
    )
    write_run(directory, info, head, PREDICTOR, named, keys)


BANK_SENTENCES = {
    "card": ("card arrived", "card late", "new card", "card lost", "card post", "order card"),
    "loan": ("loan rate", "borrow loan", "loan money", "repay loan", "loan terms", "house loan"),
    "rates": ("euro rate", "dollar euro", "euro today", "exchange euro", "yen euro", "euro pound"),
    "pin": ("pin forgotten", "reset pin", "change pin", "pin wrong", "pin blocked", "new pin"),
}
WRONG_SENTENCE = "card post late"  # taught as a loan


def write_bank_run(directory: Path) -> None:
    """Write a run for `WordEncoder`: four labels of six sentences, and one under a wrong label."""
    encoder = WordEncoder()
    named = [(label, text) for label, texts in BANK_SENTENCES.items() for text in texts]
    named.append(("loan", WRONG_SENTENCE))
    keys = encoder([text for _, text in named])
    names = tuple(sorted(BANK_SENTENCES))
    means = torch.stack([keys[[label == name for label, _ in named]].mean(0) for name in names])
    head = nn.Linear(encoder.key_dim, len(names))
    with torch.no_grad():
        head.weight.copy_(8 * (means - means.mean(0)))
        head.bias.zero_()
    info = RunInfo(64, names, len(named), 0.5, encoder.name, encoder.fingerprint)
    write_run(directory, info, head, PREDICTOR, named, keys)


class BrightnessEncoder(ImageEncoder):
    """The key of a picture is its brightness and its aspect ratio."""

    name, key_dim = "brightness", 3

    def __call__(self, pictures: Sequence[bytes]) -> Tensor:
        from PIL import Image

        keys = []
        for picture in pictures:
            with Image.open(io.BytesIO(picture)) as opened:
                pixels = opened.convert("L").tobytes()
                light = sum(pixels) / len(pixels) / 255
                keys.append([light, 1 - light, math.log(opened.width / opened.height)])
        return nn.functional.normalize(torch.tensor(keys), dim=1)


def plain_picture(colour: str, width: int = 8, height: int = 8) -> bytes:
    """Return a picture of one colour in the form in which pictures are stored."""
    from PIL import Image

    from mbpa.encoders.pictures import standardize

    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return standardize(file.getvalue())


def write_picture_run(directory: Path) -> None:
    """Write a run of four pictures and two labels for `BrightnessEncoder`."""
    encoder = BrightnessEncoder()
    colours = {"dark": ("black", "navy"), "light": ("white", "yellow")}
    named = [(label, plain_picture(each)) for label, some in colours.items() for each in some]
    keys = encoder([picture for _, picture in named])
    head = nn.Linear(encoder.key_dim, 2)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    info = RunInfo(
        key_dim=encoder.key_dim,
        labels=("dark", "light"),
        trained_examples=len(named),
        threshold=0.0,
        encoder=encoder.name,
        fingerprint=encoder.fingerprint,
        takes="images",
    )
    write_run(directory, info, head, PREDICTOR, named, keys)


def random_keys(count: int, key_dim: int, seed: int = 0) -> Tensor:
    keys = torch.randn(count, key_dim, generator=torch.Generator().manual_seed(seed))
    return nn.functional.normalize(keys, dim=1)


def write_random_run(
    directory: Path,
    *,
    labels: int = 6,
    examples: int = 60,
    key_dim: int = 16,
    predictor: mbpa.Predictor = PREDICTOR,
    has_rows: bool = False,
    learns: bool | None = None,
) -> list[Lesson]:
    """Write a run without an encoder, whose examples lie around one place per label; return them.

    Args:
        has_rows: new labels get rows computed from their examples instead of zeros.
        learns: the run has a learner in place of the predictor; by default if there are labels
            enough and nothing else is given.
    """
    names = tuple(f"label {i:03}" for i in range(labels))
    places = random_keys(labels, key_dim)
    numbers = torch.arange(examples) % labels
    keys = places[numbers] + 0.3 * random_keys(examples, key_dim, seed=1)
    keys = nn.functional.normalize(keys, dim=1)
    head = nn.Linear(key_dim, labels)
    with torch.no_grad():
        head.weight.copy_(4 * (places - places.mean(0)))
        head.bias.zero_()
    info = RunInfo(
        key_dim=key_dim, labels=names, trained_examples=examples, threshold=0.3, encoder=None
    )
    lessons = [
        Lesson(names[number], f"text {i}", key)
        for i, (number, key) in enumerate(zip(numbers.tolist(), keys, strict=True))
    ]
    sums = label_sums(keys, numbers, labels)
    rows = NewRows.around(head.weight, head.bias, sums, scale=SCALE, offset=OFFSET)
    named = [(each.label, each.text) for each in lessons]
    if learns is None:
        learns = labels >= MIN_LABELS and predictor is PREDICTOR and not has_rows
    method = _fit_learner(labels, key_dim, head) if learns else predictor
    write_run(directory, info, head, method, named, keys, rows if has_rows else None)
    return lessons


_fitted: dict[tuple[int, int], dict[str, Tensor]] = {}  # fitting takes a second


def _fit_learner(labels: int, key_dim: int, head: nn.Linear) -> Learner:
    """Fit a learner to examples around the places of `write_random_run`."""
    if (labels, key_dim) not in _fitted:
        numbers = torch.arange(20 * labels) % labels
        keys = random_keys(labels, key_dim)[numbers]
        keys = nn.functional.normalize(keys + 0.5 * random_keys(len(keys), key_dim, seed=2), dim=1)
        training = Training(epochs=5)

        def train(keys: Tensor, labels: Tensor, classes: int) -> nn.Linear:
            return train_head(keys, labels, classes, training, (keys[:0], labels[:0]))

        learner = fit_learner(keys, numbers, head, train)
        assert learner is not None
        _fitted[labels, key_dim] = learner.tensors()
    return Learner.from_tensors(head, _fitted[labels, key_dim])
