"""A network of one's own as a service: as an encoder for `mbpa teach`, or with its own head."""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path

import pytest

from mbpa import cli
from mbpa.errors import RunError
from mbpa.serve.classifier import Classifier
from tests.encoders.test_own import Letters
from tests.runs import BrightnessEncoder, WordEncoder
from tests.servers import Server

LETTERS = "from tests.encoders.test_own import Letters\n"
NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that writes a module into the working directory and returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(tmp_path)])

    def write(source: str) -> str:
        name = f"own_{uuid.uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


@pytest.fixture
def spreadsheet(tmp_path: Path) -> str:
    rows = [f"{name * (1 + i % 3)} {name} {i},{name}" for name in NAMES for i in range(12)]
    (tmp_path / "data.csv").write_text("text,label\n" + "\n".join(rows))
    return "data.csv"


def test_a_network_is_taught_and_served_as_an_encoder(module, spreadsheet, tmp_path, capsys):
    name = f"{module(LETTERS + 'def make(): return Letters()')}:make"
    assert cli.main(["teach", spreadsheet, "--encoder", name, "--no-progress"]) == 0
    assert f"next: mbpa serve run --encoder {name}, or" in capsys.readouterr().out
    content = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (content["encoder"], content["key_dim"]) == (name, 32)
    with Server("run", "--encoder", name, cwd=tmp_path) as server:
        asked = {"texts": ["alpha alpha 99", "zeta zeta 99"], "threshold": 0}
        answers = server.client.post("/predict", json=asked).json()["answers"]
        assert [each["label"] for each in answers] == ["alpha", "zeta"]
        examples = [{"label": "omega", "text": f"omega omega {i}"} for i in range(3)]
        assert server.client.post("/learn", json={"examples": examples}).status_code == 200
        asked = {"texts": ["omega omega 77"], "threshold": 0}
        (answer,) = server.client.post("/predict", json=asked).json()["answers"]
        assert answer["label"] == "omega"


def test_a_run_of_ones_own_encoder_needs_that_encoder(module, spreadsheet, tmp_path, capsys):
    name = f"{module(LETTERS + 'def make(): return Letters()')}:make"
    assert cli.main(["teach", spreadsheet, "--encoder", name, "--no-progress"]) == 0
    other = f"{module(LETTERS + 'def make(): return Letters(seed=1)')}:make"
    small = f"{module(LETTERS + 'def make(): return lambda x: Letters()(x)[:, :8]')}:make"
    capsys.readouterr()
    for options, message in (
        ((), f"its encoder is code of your own: name it again, with --encoder {name}"),
        (("--encoder", other), f"it was made with the encoder {name}, and the keys of"),
        (("--encoder", small), "its keys have 32 numbers, those of the encoder"),
        (("--encoder", "nowhere:make"), "there is no module 'nowhere'"),
        (("--encoder", "minilm"), "--encoder must be MODULE:FUNCTION, got 'minilm'"),
    ):
        assert cli.main(["serve", "run", "--port", "0", *options]) == 2
        printed = capsys.readouterr().err.splitlines()[-1]
        assert message in printed
        assert printed.startswith("mbpa: ")
    with Classifier.load(tmp_path / "run", encoder=Letters()) as classifier:
        assert classifier.predict(["beta beta 5"], threshold=0.0)[0].label == "beta"
    with Classifier.load(tmp_path / "run", encodes=False) as classifier:
        assert classifier.takes is None
    with pytest.raises(RunError, match="the encoder brightness takes images, not texts"):
        Classifier.load(tmp_path / "run", encoder=BrightnessEncoder())


def test_keys_of_an_encoder_class_must_have_norm_1(module, spreadsheet, capsys):
    name = module(
        "from tests.runs import WordEncoder\n"
        "class Long(WordEncoder):\n"
        "    def __call__(self, texts):\n"
        "        return 7 * super().__call__(texts)\n"
    )
    assert cli.main(["teach", spreadsheet, "--encoder", f"{name}:Long", "--no-progress"]) == 2
    printed = capsys.readouterr().err
    assert printed == f"mbpa: {name}:Long cannot be used: keys must have norm 1, got 7\n"
    assert not Path("run").exists()
    name = module("from tests.runs import WordEncoder")
    assert (
        cli.main(["teach", spreadsheet, "--encoder", f"{name}:WordEncoder", "--no-progress"]) == 0
    )
    with Classifier.load("run", encoder=WordEncoder()) as classifier:
        assert classifier.info.encoder == "words"
