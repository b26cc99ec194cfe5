"""Try an installed mbpa with one extra: python smoke.py EXTRA [--editable].

`make release-check` runs it in an environment that holds the wheel, that extra and nothing else.
The name `none` stands for the wheel without extras; --editable permits an editable installation.
"""

from __future__ import annotations

import csv
import functools
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch

import mbpa

START_TIMEOUT_S = 900


def try_bare() -> None:
    """Teach a network a new class; every extra that is missing is named by an error."""
    torch.manual_seed(0)
    classifier = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)
    )
    embed, head = mbpa.split(classifier, at="2")
    memory = mbpa.ExactMemory(capacity=100, key_dim=16)
    model = mbpa.MbPA(embed, head, memory=memory, predictor=mbpa.Adapted(k=5))
    x = torch.randn(40, 8)
    model.write(x, (x[:, 0] > 0).long())
    model.grow(classes=3)
    model.write(x[:4] + 20, [2, 2, 2, 2])
    assert model(x[:4] + 20).argmax(-1).tolist() == [2, 2, 2, 2]
    with tempfile.TemporaryDirectory() as folder:
        model.save(folder)
        again = mbpa.MbPA.load(folder, embed, head)
        assert torch.equal(again(x), model(x))
    for extra, use in {"graph": use_graph, "text": use_text, "images": use_images}.items():
        assert f"'mbpa[{extra}]'" in catch(mbpa.MissingExtraError, use)
    assert "usage: mbpa" in run_command("--help")


def use_graph() -> None:
    memory = mbpa.GraphMemory(capacity=1_000, key_dim=8)
    keys = torch.randn(500, 8)
    memory.write(keys, torch.arange(500))
    found = memory.read(keys[:5], k=1)
    assert found.values[:, 0].tolist() == [0, 1, 2, 3, 4]


def use_demo() -> None:
    with tempfile.TemporaryDirectory() as folder:
        printed = run_command("demo", "--seeds", "1", "--no-progress", "--out", folder)
        assert (Path(folder) / "demo.png").is_file()
        assert "MbPA" in printed


def use_images() -> None:
    from mbpa.encoders.image import encoder

    encode = encoder()
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(file, "PNG")
    assert encode([file.getvalue()]).shape == (1, encode.key_dim)


def use_text() -> None:
    from mbpa.encoders.text import encoder

    encode = encoder()
    far, near = encode(["where is my parcel?", "two pizzas, please", "my package has not come"])[1:]
    asked = encode(["where is my parcel?"])[0]
    assert asked @ near > asked @ far


def use_language() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from mbpa.language import MemoryLM

    text = "The heron stands in the shallow water of the river and waits for a fish. " * 2
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<end>"],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    sizes = {"hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 64}
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        num_hidden_layers=1,
        num_attention_heads=1,
        bos_token_id=None,
        eos_token_id=0,
        **sizes,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    lm = MemoryLM(model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>"))
    before = lm.score(text)
    lm.read(text, source="heron")
    after = lm.score(text)
    assert after.perplexity < before.perplexity, (before, after)
    lm.forget("heron")
    assert not lm.sources()


def use_qdrant() -> None:
    from qdrant_client import QdrantClient

    from mbpa.memory.qdrant import QdrantMemory

    client = QdrantClient(":memory:")
    memory = QdrantMemory(client, "smoke", capacity=10, key_dim=4)
    memory.write(torch.eye(4), torch.arange(4))
    assert memory.read(torch.eye(4)[2:3], k=1).values.item() == 2


def use_milvus() -> None:
    """The extra holds the client only; a server, or milvus-lite, is the user's."""
    from pymilvus import MilvusClient, MilvusException

    import mbpa.memory.milvus

    assert mbpa.memory.milvus.MilvusMemory.__doc__
    connect = functools.partial(MilvusClient, "http://127.0.0.1:9", timeout=1)
    assert "connect" in catch(MilvusException, connect).lower()


def use_serve() -> None:
    with tempfile.TemporaryDirectory() as folder, Serving(Path(folder), "serve") as serving:
        lesson = {"examples": [{"label": "pizza", "text": "one pizza"}] * 1}
        serving.post("/learn", lesson)
        answers = serving.post("/predict", {"texts": ["one pizza"]})
        assert "pizza" in json.dumps(answers)
        assert b"<html" in serving.get("/docs").lower()


def use_explore() -> None:
    with tempfile.TemporaryDirectory() as folder, Serving(Path(folder), "explore") as serving:
        assert b"gradio" in serving.get("/explore/").lower()


def use_replicas() -> None:
    """Nothing listens there, which is reported in one line; nothing is missing."""
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder))
        error = run_command(
            *("serve", run, "--database", "postgresql://127.0.0.1:9/mbpa?connect_timeout=2"),
            expected=2,
        )
        assert "127.0.0.1" in error, error
        assert "is not installed" not in error, error


def use_experiments() -> None:
    """The experiments are in the checkout; the extra brings what they draw and train with."""
    import lightning_fabric
    import matplotlib

    assert lightning_fabric.__version__
    assert matplotlib.__version__


def use_peers() -> None:
    import adaptive_classifier
    import semantic_router
    import setfit
    import wordllama

    assert all((adaptive_classifier, semantic_router, setfit, wordllama))
    use_text()


def use_huggingface() -> None:
    """A Trainer of transformers trains, and the memory holds what it was trained with."""
    import transformers

    from mbpa.integrations.transformers import MemoryCallback, MemoryTrainer, add_memory

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.BertConfig(vocab_size=20, intermediate_size=16, num_labels=2, **sizes)
    classifier = transformers.BertForSequenceClassification(config)
    model = add_memory(classifier, capacity=100)
    words = [{"input_ids": torch.randint(20, (6,)), "labels": n % 2} for n in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=2, report_to="none", save_strategy="no", disable_tqdm=True
        )
        MemoryTrainer(
            classifier, arguments, train_dataset=words, callbacks=[MemoryCallback(model)]
        ).train()
    assert len(model.memory) == 16


def use_lightning() -> None:
    """A Trainer of Lightning trains, and the memory holds what it was trained with."""
    import lightning

    from mbpa.integrations.lightning import MemoryCallback

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Classifier()
    embed, head = mbpa.split(module.net, at="1")
    memory = mbpa.ExactMemory(capacity=100, key_dim=8)
    model = mbpa.MbPA(embed, head, memory=memory, predictor=mbpa.Adapted(k=5))
    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.arange(16) % 2)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[MemoryCallback(model)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
    assert len(memory) == 16


def use_avalanche() -> None:
    """A strategy of Avalanche learns two experiences, and is evaluated with the memory.

    Avalanche imports torchvision. An index may have it for another build of torch only, which the
    user would have to replace; the trial needs nothing of it.
    """
    try:
        import torchvision  # noqa: F401 (checks that it works)
    except RuntimeError as error:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from torchvision_stand_in import import_avalanche

        print(f"note: tried without torchvision, which is for another build of torch ({error})")
        import_avalanche()
    from avalanche.benchmarks.scenarios.supervised import class_incremental_benchmark
    from avalanche.benchmarks.utils import DataAttribute, make_avalanche_dataset
    from avalanche.models import SimpleMLP
    from avalanche.training.supervised import Naive

    from mbpa.integrations.avalanche import MemoryPlugin

    inputs, labels = torch.randn(40, 8), torch.arange(40) % 4
    dataset = make_avalanche_dataset(
        torch.utils.data.TensorDataset(inputs, labels),
        data_attributes=[DataAttribute(labels.tolist(), "targets")],
    )
    parts = {"train": dataset, "test": dataset}
    benchmark = class_incremental_benchmark(parts, num_experiences=2)
    network = SimpleMLP(num_classes=4, input_size=8, hidden_size=16)
    plugin = MemoryPlugin("classifier", capacity=20)
    strategy = Naive(
        model=network,
        optimizer=torch.optim.Adam(network.parameters()),
        criterion=torch.nn.CrossEntropyLoss(),
        plugins=[plugin],
    )
    for experience in benchmark.train_stream:
        strategy.train(experience)
    strategy.eval(benchmark.test_stream)
    assert plugin.model is not None
    assert len(plugin.model.memory) == 20


def use_sklearn() -> None:
    from sklearn.datasets import load_iris

    from mbpa.integrations.sklearn import MbPAClassifier, MbPARegressor

    rows, labels = load_iris(return_X_y=True)
    model = MbPAClassifier(epochs=5, random_state=0).fit(rows[:100], labels[:100])
    model.partial_fit(rows[100:110], labels[100:110])
    assert model.predict(rows[110:]).tolist().count(2) > 20
    assert MbPARegressor(epochs=5).fit(rows, rows[:, 0]).score(rows, rows[:, 0]) > 0.5


def use_river() -> None:
    from mbpa.integrations.river import OnlineClassifier, OnlineRegressor

    model, values = OnlineClassifier(), OnlineRegressor()
    for number in range(20):
        model.learn_one({"a": number}, "low" if number < 10 else "high")
        values.learn_one({"a": number}, 2.0 * number)
    assert model.predict_one({"a": 2}) == "low"
    assert round(values.predict_one({"a": 10})) == 20


def use_docs() -> None:
    """The site is built from a checkout; the extra brings what `mkdocs build` imports."""
    import latex2mathml.converter
    import material
    import mkdocstrings

    assert "<math" in latex2mathml.converter.convert("x^2")
    assert all((material, mkdocstrings))
    subprocess.run([sys.executable, "-m", "mkdocs", "--version"], check=True)


def use_dev() -> None:
    for tool in ("pytest", "mypy", "ruff"):
        subprocess.run([sys.executable, "-m", tool, "--version"], check=True)
    mbpa.testing.check_memory(mbpa.GraphMemory)


# What they share


def catch(kind: type[Exception], call: Callable[[], object]) -> str:
    """Return the message of the exception that a call must raise."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{call} must raise {kind.__name__}")


class Serving:
    """A service in a process of its own, with a run that has just been taught."""

    def __init__(self, folder: Path, command: str) -> None:
        self._run, self._command = make_run(folder), command

    def __enter__(self) -> Serving:
        self._process = subprocess.Popen(
            [find_command(), self._command, self._run, "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := re.search(r"serving on (http://[^/]+)", line):
                self._url = found[1]
                return self
        raise AssertionError(f"mbpa {self._command} did not start")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        ended = self._process.wait(300)
        assert ended == 0 or sys.platform == "win32", ended  # there, it is killed

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self._url + path, timeout=30) as answer:
            content: bytes = answer.read()
        return content

    def post(self, path: str, body: object) -> object:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            self._url + path, data=json.dumps(body).encode(), headers=headers
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())


def make_run(folder: Path) -> str:
    """Teach a classifier a few sentences."""
    table = folder / "intents.csv"
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for number in range(8):
            rows.writerow([f"where is parcel {number}?", "parcel"])
            rows.writerow([f"please refund order {number}", "refund"])
    run_command("teach", str(table), "--out", str(folder / "run"))
    return str(folder / "run")


def find_command() -> str:
    folder = Path(sys.executable).parent
    return str(next(each for each in folder.iterdir() if each.stem == "mbpa"))


def run_command(*arguments: str, expected: int = 0) -> str:
    """Run the installed command `mbpa` and return what it prints."""
    done = subprocess.run(
        [find_command(), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_TIMEOUT_S,
    )
    assert done.returncode == expected, f"mbpa {' '.join(arguments)}: {done.stdout}"
    return done.stdout


def check_requirements(extra: str) -> int:
    """Return how many distributions the extra asks for; each must be installed."""
    found = 0
    for line in importlib.metadata.requires("mbpa") or ():
        requirement, _, marker = line.partition(";")
        if re.search(rf"extra == ['\"]{extra}['\"]", marker) and "platform_system" not in marker:
            importlib.metadata.version(re.split(r"[^A-Za-z0-9._-]", requirement.strip())[0])
            found += 1
    return found


TRIALS: dict[str, Callable[[], None]] = {
    name.removeprefix("use_"): use for name, use in list(globals().items()) if name[:4] == "use_"
} | {"none": try_bare}


def main(extra: str, option: str = "") -> None:
    start = time.perf_counter()
    place = Path(mbpa.__file__).parent
    assert option == "--editable" or "site-packages" in place.parts, f"not installed: {place}"
    assert extra == "none" or check_requirements(extra) > 0, f"there is no extra {extra}"
    TRIALS[extra]()
    print(f"{extra}: mbpa {mbpa.__version__} works ({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main(*sys.argv[1:])
