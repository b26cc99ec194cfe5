"""A network of one's own as a service: as an encoder for `mbpa teach`, or with its own head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import mbpa
from mbpa import cli
from mbpa.errors import RunError
from mbpa.serve import make_run, retraining
from mbpa.serve.answers import Answer, Lesson
from mbpa.serve.classifier import Classifier
from mbpa.serve.journal import InputError
from mbpa.serve.verification import check_run
from tests.encoders.test_own import Letters
from tests.runs import BrightnessEncoder, WordEncoder
from tests.servers import Server

LETTERS = "from tests.encoders.test_own import Letters\n"
NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta")


@pytest.fixture
def spreadsheet(tmp_path: Path) -> str:
    rows = [f"{name * (1 + i % 3)} {name} {i},{name}" for name in NAMES for i in range(12)]
    (tmp_path / "data.csv").write_text("text,label\n" + "\n".join(rows))
    return "data.csv"


@pytest.mark.heavy
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


@pytest.mark.heavy
def test_a_run_of_ones_own_encoder_needs_that_encoder(module, spreadsheet, tmp_path, capsys):
    name = f"{module(LETTERS + 'def make(): return Letters()')}:make"
    assert cli.main(["teach", spreadsheet, "--encoder", name, "--no-progress"]) == 0
    other = f"{module(LETTERS + 'def make(): return Letters(seed=1)')}:make"
    small = f"{module(LETTERS + 'def make(): return lambda x: Letters()(x)[:, :8]')}:make"
    capsys.readouterr()
    for options, message in (
        ((), f"its encoder {name} is code of your own: pass --encoder MODULE:FUNCTION"),
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


@pytest.mark.heavy
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


# With its own head

FRUITS = ("apple", "pear", "plum", "fig")


def make_model(examples: int = 0, *, seed: int = 0) -> mbpa.MbPA:
    """Return a model of `Letters`, with a head for four fruits."""
    network, memory = Letters(), mbpa.ExactMemory(1000, key_dim=32)
    torch.manual_seed(seed)
    predictor = mbpa.Adapted(mbpa.Gradient(lr=0.05, steps=10), k=5)
    model = mbpa.MbPA(network, nn.Linear(32, 4), memory=memory, predictor=predictor)
    for i in range(examples):
        model.write([f"{FRUITS[i % 3]} {i}"], torch.tensor([i % 3]))
    return model


def name_probabilities(answers: list[Answer]) -> list[dict[str, float]]:
    return [dict(each.top) for each in answers]


@pytest.mark.parametrize("examples", [0, 1, 30])
def test_the_service_answers_as_the_model_does(tmp_path, examples):
    model, texts = make_model(examples), ["apple 7", "a fig", "quince 12", "x"]
    run = tmp_path / "run"
    make_run(model, run, encoder=model.embed, labels=FRUITS)
    with Classifier.load(run, encoder=model.embed) as classifier:
        assert list(classifier.labels) == list(FRUITS)
        assert classifier.labels["fig"] == 0
        assert len(classifier) == examples
        found = name_probabilities(classifier.predict(texts, top=4))
        for named, row in zip(found, model(texts).exp(), strict=True):
            assert named == pytest.approx(dict(zip(FRUITS, row.tolist(), strict=True)), abs=1e-5)

        lessons = [Lesson("quince", f"quince {i}") for i in range(3)]
        ids = classifier.learn(lessons)
        model.grow(5)
        model.write([each.text for each in lessons], torch.tensor([4, 4, 4]))
        found = name_probabilities(classifier.predict(texts, top=5))
        for named, row in zip(found, model(texts).exp(), strict=True):
            names = (*FRUITS, "quince")
            assert named == pytest.approx(dict(zip(names, row.tolist(), strict=True)), abs=1e-5)
        assert classifier.explain(["quince 12"])[0].neighbors[0].label == "quince"

        assert classifier.forget(ids) == ids
        classifier.forget(label="apple")
        assert list(classifier.labels) == list(FRUITS), "a head of one's own keeps its rows"
    assert check_run(run)


def test_keys_of_any_norm_are_taken(tmp_path):
    model = make_model(6)
    make_run(model, tmp_path / "run")
    with Classifier.load(tmp_path / "run") as classifier:
        assert (classifier.takes, list(classifier.labels)) == (None, ["0", "1", "2", "3"])
        keys = 3 * model.embed(["apple"])
        classifier.learn([Lesson("0", key=keys[0])])
        assert classifier.predict(keys=keys)[0].label == "0"


def test_a_restart_goes_on_with_what_was_taught_and_another_model_is_refused(tmp_path):
    run, model = tmp_path / "run", make_model(6)
    make_run(model, run, encoder=model.embed, labels=FRUITS)
    with Classifier.load(run, encoder=Letters()) as classifier:
        classifier.learn([Lesson("quince", "quince 1")])
    make_run(make_model(6), run, encoder=Letters(), labels=FRUITS)
    with Classifier.load(run, encoder=Letters()) as classifier:
        assert classifier.labels["quince"] == 1
    other = make_model(6)
    other.predictor = mbpa.Parametric()
    for changed, names in (
        (make_model(5), FRUITS),
        (make_model(6, seed=1), FRUITS),
        (other, FRUITS),
        (make_model(6), FRUITS[::-1]),
    ):
        with pytest.raises(RunError, match="run was made from another model or with other labels"):
            make_run(changed, run, encoder=Letters(), labels=names)
    with pytest.raises(RunError, match=r"and the keys of .*Letters differ: create the run again"):
        Classifier.load(run, encoder=Letters(seed=1))
    with Classifier.load(run, encodes=False) as classifier:
        assert len(classifier) == 7


def test_labels_of_a_head_of_ones_own_are_renamed_and_merged(tmp_path):
    model = make_model(6)
    make_run(model, tmp_path / "run", encoder=Letters(), labels=FRUITS)
    with Classifier.load(tmp_path / "run", encoder=Letters()) as classifier:
        with pytest.raises(InputError, match="'fig' has no examples: teach one before its name"):
            classifier.rename("fig", "date")
        before = classifier.predict(["apple 3"], top=4)
        assert len(classifier.rename("apple", "crab apple")) == 2
        after = classifier.predict(["apple 3"], top=4)
        renamed = [{"apple": "crab apple"}.get(label, label) for label, _ in before[0].top]
        assert [label for label, _ in after[0].top] == renamed
        assert len(classifier.merge("crab apple", "pear")) == 2
        assert classifier.labels == {"pear": 4, "plum": 2, "fig": 0}
        left = classifier.predict(["apple 3"], top=4)
    with Classifier.load(tmp_path / "run", encoder=Letters()) as classifier:
        assert classifier.predict(["apple 3"], top=4) == left


def test_a_head_of_ones_own_is_not_trained_again(tmp_path):
    make_run(make_model(6), tmp_path / "run")
    with (
        Classifier.load(tmp_path / "run") as classifier,
        pytest.raises(RunError, match="the head of this run is your own, trained with examples"),
    ):
        retraining.retrain(classifier, tmp_path / "run")


def test_what_cannot_be_served_is_refused_with_the_reason(tmp_path):
    memory, predictor = mbpa.ExactMemory(9, key_dim=32), mbpa.Parametric()

    class Own(mbpa.Parametric):
        pass

    deep = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 4))
    unbiased = nn.Linear(32, 4, bias=False)
    targets = mbpa.ExactMemory(9, key_dim=32, value_shape=(4,), value_dtype=torch.float32)
    for model, options, message in (
        (mbpa.MbPA(head=deep, memory=memory, predictor=predictor), {}, "must be a torch.nn.Linear"),
        (mbpa.MbPA(head=unbiased, memory=memory, predictor=predictor), {}, "Linear with a bias"),
        (
            mbpa.MbPA(head=nn.Linear(32, 4), memory=targets, predictor=predictor),
            {},
            "must have a memory of labels",
        ),
        (
            mbpa.MbPA(head=nn.Linear(32, 4), memory=memory, predictor=Own()),
            {},
            "predictor must have parts of mbpa only, got .*Own",
        ),
        (make_model(), {"labels": FRUITS[:3]}, "labels must be 4 different names, .*, got 3"),
        (make_model(), {"labels": ["a", "b", "c", "a "]}, "labels must be 4 different names"),
        (make_model(), {"labels": ["a", "b", "c", "\n"]}, "labels must be names: a label must"),
        (
            make_model(),
            {"encoder": lambda texts: Letters()(texts)[:, :5]},
            "encoder must return keys of 32 numbers, which the head takes, got 5",
        ),
        (make_model(), {"encoder": WordEncoder(), "takes": "images"}, "takes texts, not images"),
    ):
        with pytest.raises(ValueError, match=message):
            make_run(model, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


# Saved


@pytest.mark.heavy
def test_a_saved_model_is_served_and_keeps_what_it_is_taught(module, tmp_path, capsys):
    name = f"{module(LETTERS + 'def make(): return Letters()')}:make"
    make_model(6).save("saved")
    (tmp_path / "names.txt").write_text("\n".join(FRUITS) + "\n")
    options = ("--encoder", name, "--labels", "names.txt")
    with Server("saved", *options, cwd=tmp_path) as server:
        listed = server.client.get("/labels").json()["labels"]
        assert [each["label"] for each in listed] == list(FRUITS)
        examples = [{"label": "quince", "text": f"quince {i}"} for i in range(3)]
        assert server.client.post("/learn", json={"examples": examples}).status_code == 200
        assert server.stop() == 0
    with Server("saved", *options, cwd=tmp_path) as server:
        asked = {"texts": ["quince 4"]}
        (again,) = server.client.post("/predict", json=asked).json()["answers"]
        assert again["label"] == "quince"
    assert cli.main(["check", "saved/run"]) == 0
    assert json.loads(Path("saved/run/run.json").read_text())["encoder"] == name
    make_model(7).save("saved")
    capsys.readouterr()
    assert cli.main(["serve", "saved", "--port", "0", *options]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("mbpa: saved/run was made from another model or with other labels: ")
    with Classifier.load("saved/run", encoder=Letters()) as classifier:
        assert classifier.labels["quince"] == 3


def test_saved_models_that_cannot_be_served_are_refused_in_a_line(module, tmp_path, capsys):
    name = f"{module(LETTERS + 'def make(): return Letters()')}:make"
    deep = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 4))
    memory, predictor = mbpa.ExactMemory(9, key_dim=32), mbpa.Parametric()
    mbpa.MbPA(head=deep, memory=memory, predictor=predictor).save("deep")
    make_model(3).save("saved")
    (tmp_path / "three.txt").write_text("a\nb\nc")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    make_run(make_model(3), "run", encoder=Letters())
    encoder = ("--encoder", name)
    for directory, options, message in (
        (
            "deep",
            encoder,
            "deep cannot be served: the head of this model was not saved, or is not",
        ),
        ("saved", (*encoder, "--labels", "three.txt"), "labels must be 4 different names"),
        ("saved", (*encoder, "--labels", "bytes.txt"), "bytes.txt must be text in UTF-8"),
        (
            "saved",
            (*encoder, "--labels", "none.txt"),
            "--labels must name a file with one label per line, in the order of the head's "
            "outputs, got none.txt: No such file",
        ),
        ("saved", (*encoder, "--takes", "images"), "given 4 images"),
        ("run", (*encoder, "--labels", "three.txt"), "--takes and --labels are for models that"),
    ):
        assert cli.main(["serve", directory, "--port", "0", *options]) == 2
        (printed,) = capsys.readouterr().err.splitlines()
        assert message in printed
    assert not Path("saved/run").exists()
