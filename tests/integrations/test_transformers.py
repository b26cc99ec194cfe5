"""Classifiers of transformers with a memory: real models, tiny, with random weights."""

from __future__ import annotations

import copy
import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import mbpa
from mbpa.encoders.text import DEFAULT_ENCODER, find_directory
from mbpa.integrations.transformers import (
    MEMORY_FOLDER,
    MemoryCallback,
    MemoryTrainer,
    add_memory,
    find_head,
    load_memory,
    predict_batch,
    save_memory,
    write_batch,
)

TEXT = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "num_labels": 5,
    "pad_token_id": 1,
}
GPT = {
    "vocab_size": 50,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 40,
    "num_labels": 5,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
DISTIL = {"vocab_size": 50, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
IMAGE = {
    "image_size": 16,
    "patch_size": 8,
    "num_channels": 1,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "num_labels": 5,
}
RESNET = {"num_channels": 1, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}


def make(kind: str, config: dict[str, Any], seed: int = 0) -> Any:
    """Return a model of this class, in training mode."""
    torch.manual_seed(seed)
    model_class = getattr(transformers, kind)
    return model_class(model_class.config_class(**config)).train()


def make_texts(count: int = 4, length: int = 7, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 50, (count, length), generator=generator)
    mask = torch.ones(count, length, dtype=torch.long)
    mask[0, 4:], ids[0, 4:] = 0, 1
    return {"input_ids": ids, "attention_mask": mask}


def make_images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(0))}


CLASSIFIERS = [
    ("BertForSequenceClassification", TEXT, "classifier"),
    ("BertForTokenClassification", TEXT, "classifier"),
    ("RobertaForSequenceClassification", TEXT, "classifier.out_proj"),
    ("DistilBertForSequenceClassification", {**DISTIL, "num_labels": 5}, "classifier"),
    ("GPT2ForSequenceClassification", GPT, "score"),
    ("GPT2ForTokenClassification", GPT, "classifier"),
    ("LlamaForSequenceClassification", TEXT, "score"),
    ("LlamaForTokenClassification", TEXT, "score"),
    ("ViTForImageClassification", IMAGE, "classifier"),
    ("ResNetForImageClassification", {**RESNET, "num_labels": 5}, "classifier.1"),
]


@pytest.mark.parametrize(("kind", "config", "at"), CLASSIFIERS, ids=[c[0] for c in CLASSIFIERS])
def test_a_memory_adds_what_is_written_and_changes_nothing_else(
    kind: str, config: dict[str, Any], at: str
) -> None:
    classifier = make(kind, config)
    before = copy.deepcopy(classifier.state_dict())
    batch = make_images() if "Image" in kind else make_texts()
    model = add_memory(classifier, capacity=50)
    assert find_head(classifier) == at

    empty = predict_batch(model, batch)
    with torch.no_grad():
        alone = copy.deepcopy(classifier).eval()(**batch).logits.log_softmax(-1)
    torch.testing.assert_close(empty, alone)

    labels = (alone.argmax(-1) + 1) % 5  # what the network does not predict
    ids = write_batch(model, {**batch, "labels": labels})
    assert len(ids) == labels.numel()
    after = predict_batch(model, batch)
    real = batch.get("attention_mask", torch.ones(4)) == 1 if labels.ndim == 2 else ...
    assert (after.argmax(-1) == labels)[real].float().mean() > 0.8
    assert classifier.training
    assert all(torch.equal(before[name], now) for name, now in classifier.state_dict().items())


def test_the_key_of_a_pooled_head_is_the_state_at_the_last_token() -> None:
    classifier, batch = make("GPT2ForSequenceClassification", GPT), make_texts()
    with torch.no_grad():
        states = copy.deepcopy(classifier).eval().transformer(**batch).last_hidden_state
    last = batch["attention_mask"].sum(1) - 1
    keys = add_memory(classifier).embed(**batch)
    torch.testing.assert_close(keys, states[torch.arange(4), last])


def test_a_head_that_is_pooled_unexpectedly_is_refused_by_name() -> None:
    classifier = make("CTRLForSequenceClassification", {**GPT, "dff": 24})
    batch = {"input_ids": make_texts()["input_ids"][1:]}
    with pytest.raises(ValueError, match=r"'classifier'.*pass pooled=True"):
        add_memory(classifier)(**batch)
    alone = copy.deepcopy(classifier).eval()(**batch).logits.log_softmax(-1)
    torch.testing.assert_close(add_memory(classifier, pooled=True)(**batch), alone.detach())


def test_what_cannot_be_wrapped_is_refused() -> None:
    bert = make("BertForSequenceClassification", TEXT)
    with pytest.raises(ValueError, match=r"must be a model for .*, got BertForMaskedLM"):
        add_memory(make("BertForMaskedLM", TEXT))
    with pytest.raises(ValueError, match=r"at must name a submodule of Bert.*, got 'classifer'"):
        add_memory(bert, at="classifer")
    with pytest.raises(ValueError, match=r"at must name an nn\.Linear unless a memory is given"):
        add_memory(make("RobertaForSequenceClassification", TEXT), at="classifier")
    bert.config.num_labels = 7
    with pytest.raises(ValueError, match=r"each of its 7 labels, got \{'classifier': 5\}"):
        add_memory(bert)
    several = {**TEXT, "problem_type": "multi_label_classification"}
    with pytest.raises(ValueError, match="problem_type must be single_label_classification or"):
        add_memory(make("BertForSequenceClassification", several))


def test_tokens_without_a_label_are_not_written() -> None:
    model = add_memory(make("BertForTokenClassification", TEXT))
    batch = make_texts()
    labels = torch.randint(5, (4, 7))
    labels[:, 0] = labels[0, 4:] = -100
    write_batch(model, {**batch, "labels": labels})
    entries, keys = model.memory.entries(), model.embed(**batch)
    assert torch.equal(entries.values, labels[labels != -100])
    assert torch.equal(entries.keys, keys[labels != -100])
    none = write_batch(model, {**batch, "labels": torch.full((4, 7), -100)})
    assert len(none) == 0


def test_padding_is_not_adapted() -> None:
    model, batch = add_memory(make("BertForTokenClassification", TEXT)), make_texts()
    alone = model(**batch)
    write_batch(model, {**batch, "labels": torch.zeros(4, 7, dtype=torch.long)})
    chosen, whole = predict_batch(model, batch), model(**batch)
    real = batch["attention_mask"] == 1
    torch.testing.assert_close(chosen[real], whole[real])
    torch.testing.assert_close(chosen[~real], alone[~real])
    assert not torch.allclose(whole[~real], alone[~real])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_labels_may_have_any_integer_dtype(dtype: torch.dtype) -> None:
    model = add_memory(make("BertForSequenceClassification", {**TEXT, "num_labels": 200}))
    labels = torch.tensor([[0], [1], [156], [3]], dtype=dtype)  # 156 is −100 as a byte
    write_batch(model, {**make_texts(), "labels": labels})
    assert model.memory.entries().values.tolist() == [0, 1, 156, 3]
    with pytest.raises(ValueError, match="float"):
        write_batch(model, {**make_texts(), "labels": labels.float()})
    with pytest.raises(ValueError, match="labels must be below 200"):
        write_batch(model, {**make_texts(), "labels": torch.tensor([0, 1, 2, 200])})
    with pytest.raises(ValueError, match=r"must have shape \(4,\), got \(2,\)"):
        write_batch(model, {**make_texts(), "labels": torch.tensor([0, 1])})
    with pytest.raises(ValueError, match="the batch must have 'labels'"):
        write_batch(model, make_texts())


def test_regression_stores_targets() -> None:
    model = add_memory(make("BertForSequenceClassification", {**TEXT, "num_labels": 1}))
    batch, targets = make_texts(), torch.tensor([1.0, 2.0, -1.0, 0.5])
    before = (model(**batch)[:, 0] - targets).abs().mean()
    write_batch(model, {**batch, "labels": targets})
    after = (model(**batch)[:, 0] - targets).abs().mean()
    assert after < before / 2


# Training

EXAMPLES = [
    {**{name: part[i] for name, part in make_texts(22, seed=1).items()}, "labels": i % 5}
    for i in range(22)
]
FOR_EVALUATION = [{**each, "input_ids": each["input_ids"].clone()} for each in EXAMPLES[:6]]
for example in FOR_EVALUATION:
    example["input_ids"][0] = 2  # a word that training does not have


class Recorder(transformers.TrainerCallback):
    """Keeps a copy of the network at the beginning of every update, and all training batches."""

    def __init__(self) -> None:
        self.networks: list[Any] = []
        self.batches: list[dict[str, Tensor]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.networks.append(copy.deepcopy(kwargs["model"].state_dict()))

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = transformers.default_data_collator(examples)
        if batch["input_ids"][0, 0] != FOR_EVALUATION[0]["input_ids"][0]:
            self.batches.append(batch)
        return batch


def make_trainer(
    folder: Path, callback: MemoryCallback, classifier: Any, **settings: Any
) -> MemoryTrainer:
    recorder = settings.pop("recorder", None)
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    defaults = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "save_strategy": "no"}
    rest = {"dataloader_pin_memory": False, "logging_strategy": "no", "seed": 3}
    arguments = {**quiet, **defaults, **rest, **settings}
    return MemoryTrainer(
        model=classifier,
        args=transformers.TrainingArguments(str(folder), **arguments),
        train_dataset=EXAMPLES,
        eval_dataset=FOR_EVALUATION,
        data_collator=recorder.collate if recorder else None,
        callbacks=[callback] + ([recorder] if recorder else []),
    )


@pytest.mark.heavy
@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
        {"bf16": True, "label_smoothing_factor": 0.1},
    ],
    ids=["accumulation", "mixed-precision"],
)
def test_training_embeds_then_updates_then_writes(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The oracle: the network before each update, in eval mode, on the batches of that update."""
    classifier, recorder = make("BertForSequenceClassification", TEXT), Recorder()
    model = add_memory(classifier, capacity=30)  # less than two epochs of 22
    callback = MemoryCallback(model)
    make_trainer(
        tmp_path, callback, classifier, recorder=recorder, num_train_epochs=2, **settings
    ).train()

    accumulated = settings.get("gradient_accumulation_steps", 1)
    per_epoch = -(-6 // accumulated)  # 6 batches of 4, the last with 2
    oracle = make("BertForSequenceClassification", TEXT).eval()
    keys, labels = [], []
    for number, batch in enumerate(recorder.batches):
        update = number // 6 * per_epoch + number % 6 // accumulated
        oracle.load_state_dict(recorder.networks[update])
        inputs = {name: part for name, part in batch.items() if name != "labels"}
        with torch.no_grad():
            keys.append(oracle.bert(**inputs).pooler_output)
        labels.append(batch["labels"])
    entries = model.memory.entries()
    assert len(recorder.batches) == 12
    assert entries.ids.tolist() == list(range(14, 44))
    torch.testing.assert_close(entries.keys, torch.cat(keys)[14:])
    assert torch.equal(entries.values, torch.cat(labels)[14:])


def test_evaluation_uses_the_memory_if_asked(tmp_path: Path) -> None:
    classifier = make("BertForSequenceClassification", TEXT)
    callback = MemoryCallback(add_memory(classifier))
    trainer = make_trainer(tmp_path, callback, classifier, num_train_epochs=1)
    trainer.train()
    batch = transformers.default_data_collator(FOR_EVALUATION)
    inputs = {name: part for name, part in batch.items() if name != "labels"}

    found = trainer.predict(FOR_EVALUATION)
    want = callback.model(**inputs)
    torch.testing.assert_close(torch.from_numpy(found.predictions), want)
    loss = torch.nn.functional.nll_loss(want, batch["labels"]).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-4)

    callback.at_evaluation = False
    alone = classifier.eval()(**inputs).logits.detach()
    torch.testing.assert_close(torch.from_numpy(trainer.predict(FOR_EVALUATION).predictions), alone)
    assert not torch.allclose(alone.log_softmax(-1), want, atol=1e-3)


@pytest.mark.heavy
def test_training_resumes_with_the_memory_of_the_checkpoint(tmp_path: Path) -> None:
    def train(folder: Path, epochs: int, resume: bool) -> mbpa.MbPA:
        classifier = make("BertForSequenceClassification", TEXT)
        model = add_memory(classifier, capacity=30)
        trainer = make_trainer(
            folder,
            MemoryCallback(model),
            classifier,
            num_train_epochs=2,
            save_strategy="epoch",
            lr_scheduler_type="constant",
        )
        trainer.args.num_train_epochs = epochs
        trainer.train(resume_from_checkpoint=resume)
        return model

    whole = train(tmp_path / "whole", 2, resume=False).memory.entries()
    train(tmp_path / "parts", 1, resume=False)
    assert (tmp_path / "parts" / "checkpoint-6" / MEMORY_FOLDER).is_dir()
    resumed = train(tmp_path / "parts", 2, resume=True).memory.entries()
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


@pytest.mark.heavy
def test_the_memory_of_the_best_checkpoint_is_restored(tmp_path: Path) -> None:
    classifier = make("BertForSequenceClassification", TEXT)
    model = add_memory(classifier)
    trainer = make_trainer(
        tmp_path,
        MemoryCallback(model),
        classifier,
        num_train_epochs=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="eval_runtime",
        greater_is_better=False,
    )
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    saved = load_memory(type(classifier).from_pretrained(best), best)
    assert len(model.memory) == len(saved.memory) == int(best.name.split("-")[1]) // 6 * 22
    assert torch.equal(model.memory.entries().keys, saved.memory.entries().keys)


def test_a_memory_is_loaded_around_the_loaded_network(tmp_path: Path) -> None:
    classifier, batch = make("BertForSequenceClassification", TEXT), make_texts()
    model = add_memory(classifier, predictor=mbpa.Adapted(k=3))
    write_batch(model, {**batch, "labels": torch.tensor([0, 1, 2, 3])})
    model.grow(7)
    write_batch(model, {**make_texts(seed=2), "labels": torch.tensor([5, 6, 5, 6])})
    classifier.save_pretrained(tmp_path)
    save_memory(model, tmp_path)
    loaded = load_memory(type(classifier).from_pretrained(tmp_path), tmp_path)
    assert loaded.classes == 7
    assert torch.equal(predict_batch(loaded, batch), predict_batch(model, batch))


@pytest.mark.heavy
def test_what_would_fill_the_memory_wrongly_is_refused(tmp_path: Path) -> None:
    classifier = make("BertForSequenceClassification", TEXT)
    model = add_memory(classifier)
    trainer = make_trainer(tmp_path, MemoryCallback(model), classifier)
    trainer.args._n_gpu = 2  # as where there are two GPUs
    with pytest.raises(ValueError, match="one process on one device, got n_gpu=2"):
        trainer.train()
    with pytest.raises(ValueError, match="must have one MemoryCallback among its callbacks, got 0"):
        make_trainer(tmp_path, Recorder(), classifier).train()  # type: ignore[arg-type]
    other = make("BertForSequenceClassification", TEXT)
    with pytest.raises(ValueError, match=r"must be a layer of the BertFor\w+ that is trained"):
        make_trainer(tmp_path, MemoryCallback(model), other).train()
    model.grow(6)
    with pytest.raises(ValueError, match="grow after training"):
        make_trainer(tmp_path, MemoryCallback(model), classifier).train()
    plain = transformers.Trainer(
        model=other,
        args=trainer.args.__class__(str(tmp_path), report_to="none", use_cpu=True),
        train_dataset=EXAMPLES,
        callbacks=[MemoryCallback(add_memory(other))],
    )
    plain.args.dataloader_pin_memory = False
    with pytest.raises(ValueError, match="must be used with a MemoryTrainer"):
        plain.train()
    assert len(model.memory) == 0


@pytest.mark.heavy
def test_a_memory_teaches_intents_that_training_lacked(tmp_path: Path) -> None:
    """Banking77: a real encoder with a layer trained on six intents is shown two others."""
    texts, known = read_intents(intents=8, each=20)
    directory = find_directory(DEFAULT_ENCODER)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    fixed = {"padding": "max_length", "truncation": True, "max_length": 16}
    train, test = (
        [{**tokenizer(text, **fixed), "labels": known[intent]} for text, intent in part]
        for part in texts
    )
    torch.manual_seed(0)
    bert = transformers.BertForSequenceClassification
    classifier = bert.from_pretrained(directory, num_labels=6)
    classifier.bert.requires_grad_(False)
    model = add_memory(classifier, capacity=120)
    settings = {"num_train_epochs": 4, "per_device_train_batch_size": 20, "learning_rate": 2e-2}
    trainer = make_trainer(tmp_path, MemoryCallback(model), classifier, **settings)
    trainer.train_dataset = [example for example in train if example["labels"] < 6]
    trainer.train()

    batch = transformers.default_data_collator(test)
    labels = batch.pop("labels")
    is_new = labels >= 6
    alone = classifier.eval()(**batch).logits.argmax(-1) == labels
    model.grow(8)
    for label in (6, 7):
        few = [example for example in train if example["labels"] == label][:5]
        write_batch(model, transformers.default_data_collator(few))
    right = predict_batch(model, batch).argmax(-1) == labels
    assert not alone[is_new].any()
    assert right[is_new].float().mean() > 0.5
    assert right[~is_new].float().mean() > alone[~is_new].float().mean() - 0.1


def read_intents(intents: int, each: int) -> tuple[list[list[tuple[str, str]]], dict[str, int]]:
    """Return sentences of some intents for training and testing; skip the test without them."""
    root = Path(os.environ.get("MBPA_DATA") or Path(mbpa.__file__).parents[2] / "shared" / "data")
    if not (root / "banking77").is_dir():
        pytest.skip(f"needs Banking77 in {root}")
    parts, known = [], {}
    for name in ("train", "test"):
        with open(root / "banking77" / f"{name}.csv", encoding="utf-8", newline="") as file:
            rows = [(row["text"], row["category"]) for row in csv.DictReader(file)]
        if not known:
            known = {
                intent: n for n, intent in enumerate(sorted({row[1] for row in rows})[:intents])
            }
        parts.append(
            [row for intent in known for row in [row for row in rows if row[1] == intent][:each]]
        )
    return parts, known
