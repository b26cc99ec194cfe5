"""The examples in docs/own-network.md work: real networks, real training, real HTTP."""

from __future__ import annotations

import base64
import io
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import Fork
from runs import BANK_SENTENCES
from servers import Server

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files of the document."""
    text = (ROOT / "docs" / "own-network.md").read_text("utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name is not None, block
        (tmp_path / name[1]).write_text(block)
    return tmp_path


def read_commands() -> list[str]:
    text = (ROOT / "docs" / "own-network.md").read_text("utf-8")
    consoles = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    return re.findall(r"^\$ (.*)$", "".join(consoles), re.MULTILINE)


def run(command: str, folder: Path) -> str:
    """Run a command of the document in a folder; return what it prints."""
    program, *arguments = command.split()
    if program == "printf":
        subprocess.run(command, shell=True, cwd=folder, check=True)
        return ""
    named: dict[str, Any] = {"cwd": folder, "environment": {"OMP_NUM_THREADS": "1"}}
    if program == "mbpa":
        named["module"] = "mbpa.cli"
    else:
        named["script"] = (folder / arguments.pop(0)).read_text("utf-8")
    code, printed = Fork(*arguments, **named).finish()
    assert code == 0, printed
    return printed


@pytest.mark.heavy
def test_a_vision_network_is_trained_saved_served_and_taught(folder: Path) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    image = pytest.importorskip("PIL.Image")
    train, name, serve, lesson, *_ = read_commands()
    run(train, folder)
    run(name, folder)
    names = (folder / "names.txt").read_text().splitlines()
    assert names == ["zero", "one", "two", "three", "four", "five", "six", "seven"]
    digits = datasets.load_digits()
    places = [place for place, digit in enumerate(digits.target) if digit < 8][1000:1200]

    def pack(pixels) -> str:
        file = io.BytesIO()
        image.fromarray((pixels * 255 / 16).astype("uint8")).save(file, "PNG")
        return base64.b64encode(file.getvalue()).decode()

    def measure_known(server: Server) -> float:
        asked = {"images": [pack(digits.images[place]) for place in places]}
        answers = server.client.post("/predict", json=asked).json()["answers"]
        right = [
            answer["label"] == names[digits.target[place]]
            for place, answer in zip(places, answers, strict=True)
        ]
        return sum(right) / len(right)

    assert serve.startswith("mbpa serve saved ")
    with Server(*serve.split()[2:], cwd=folder) as server:
        assert measure_known(server) >= 0.98
        printed = run(lesson.replace("http://127.0.0.1:8000", server.url), folder)
        assert int(printed.split()[0]) >= 60
        assert measure_known(server) >= 0.9
    with Server(*serve.split()[2:], cwd=folder) as server:
        labels = server.client.get("/labels").json()["labels"]
        assert {each["label"]: each["examples"] for each in labels}["eight"] == 5


def fine_tune(folder: Path) -> None:
    """Train a small BERT on sentences and save it as Hugging Face does."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    named = [(label, text) for label, texts in BANK_SENTENCES.items() for text in texts]
    words = sorted({word for _, text in named for word in text.split()})
    vocabulary = {word: number for number, word in enumerate(("[PAD]", "[UNK]", *words))}
    words_only = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words_only.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words_only, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
    )
    names = sorted(BANK_SENTENCES)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
    )
    torch.manual_seed(0)
    network = transformers.BertForSequenceClassification(config)
    inputs = tokenizer([text for _, text in named], padding=True, return_tensors="pt")
    labels = torch.tensor([names.index(label) for label, _ in named])
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(60):
        optimiser.zero_grad()
        network(**inputs, labels=labels).loss.backward()
        optimiser.step()
    network.save_pretrained(folder / "fine-tuned")
    tokenizer.save_pretrained(folder / "fine-tuned")
    rows = "".join(f"{text},{label}\n" for label, text in named)
    (folder / "intents.csv").write_text(f"text,label\n{rows}")


def ask(server: Server, texts: list[str]) -> list[dict[str, float]]:
    asked = {"texts": texts, "top": 5, "threshold": 0}
    answers = server.client.post("/predict", json=asked).json()["answers"]
    return [{each["label"]: each["probability"] for each in answer["top"]} for answer in answers]


@pytest.mark.heavy
def test_a_hugging_face_classifier_is_served_and_taught(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    fine_tune(folder)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "fine-tuned")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "fine-tuned")
    texts = ["card late", "reset pin", "new loan today"]
    with torch.no_grad():
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        expected = network.eval()(**inputs).logits.softmax(1).tolist()
    names = sorted(BANK_SENTENCES)
    with Server.of_script(folder / "service.py", "0") as server:
        found = ask(server, texts)
        for probabilities, row in zip(found, expected, strict=True):
            assert probabilities == pytest.approx(dict(zip(names, row, strict=True)), abs=1e-4)
        lessons = ["new post today", "post late today", "order post"]
        examples = [{"label": "post", "text": text} for text in lessons]
        assert server.client.post("/learn", json={"examples": examples}).status_code == 200
        taught = ask(server, ["new post today", "reset pin"])
        assert max(taught[0], key=taught[0].__getitem__) == "post"
        assert server.stop() == 0
    with Server.of_script(folder / "service.py", "0") as server:
        assert ask(server, ["new post today", "reset pin"]) == taught


@pytest.mark.heavy
def test_a_hugging_face_classifier_is_the_encoder_of_a_run(folder: Path) -> None:
    fine_tune(folder)
    *_, teach, serve = read_commands()
    assert teach.startswith("mbpa teach intents.csv ")
    run(f"{teach} --no-progress", folder)
    with Server(*serve.split()[2:], cwd=folder) as server:
        found = ask(server, ["card late", "reset pin"])
        assert [max(each, key=each.__getitem__) for each in found] == ["card", "pin"]
