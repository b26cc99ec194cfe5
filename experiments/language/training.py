"""Training of the language model, and a cache of trained networks for all runs that need them.

The text is laid out as many rows that are read in parallel, from a different first word in every
epoch, so that batches never end at the same words. The network that is tested is an average of the
weights, as it was when it did best on the validation text; if there are several averages, the best
of them. On a GPU a step is recorded once and then replayed as a whole, because the GPU finishes its
many small operations faster than Python can launch them. Nothing in an epoch waits for the GPU. A
killed process loses half a minute.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import inspect
import json
import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional

from experiments.data import Corpus
from experiments.errors import ExperimentError
from experiments.experiment import Context
from experiments.language import network, recording
from experiments.language.config import LanguageConfig, TrainingSettings
from experiments.language.network import LanguageModel, draw_masks, products
from experiments.language.recording import Recorded
from experiments.tensor_cache import read_cached
from mbpa.device import use_one_thread
from mbpa.files import write_durably

NETWORK_FORMAT = 1  # version of the network files
WEIGHTS, SQUARES, MEANS = "weights/", "squares/", "means/"  # prefixes: best weights, Adam's moments
NETWORK_SAVE_EVERY_S = 20.0  # seconds
CURVE_POINTS = 50  # of the learning curve
STREAMS = 32  # positions at which the curve's text is read in parallel
MAX_STREAM_TOKENS = 2_300  # tokens between two of them, or there are more positions
SCORED_TOKENS_PER_CHUNK = 1024  # tokens whose logits are held at a time
LSTM_THREADING_UNITS = 400  # units from which a second thread helps, even on a busy machine
WIDTH_MULTIPLE = 8  # widths are padded to a multiple of this


@dataclass(frozen=True)
class Point:
    """One point of the learning curve."""

    epochs: int
    train: float
    """Perplexity in the last epoch, with dropout."""
    valid: float
    """Perplexity of the best averaged weights, the text read at several positions in parallel."""


def train_or_load(
    config: LanguageConfig, corpus: Corpus, context: Context, seed: int
) -> LanguageModel:
    """Return the network of this seed, with the averaged weights that did best on the validation
    text; from the cache if it is there.
    """
    path = _cache_path(config, corpus, context, seed)
    weights = _read_tensors(path, WEIGHTS, context.device)
    if weights is None:
        threads = (
            use_one_thread()
            if config.network.hidden < LSTM_THREADING_UNITS
            else contextlib.nullcontext()
        )
        with threads:
            run = TrainingRun(config, corpus, context, seed, path.stem)
            run.finish()
        _write(path, run)
        weights = run.best
    model = _initial(config, corpus, seed).to(context.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model.eval()


def learning_curve(
    config: LanguageConfig, corpus: Corpus, context: Context, seed: int
) -> tuple[list[Point], float]:
    """Return how a cached network was trained, and in how many seconds."""
    with safe_open(_cache_path(config, corpus, context, seed), framework="pt") as file:
        told = json.loads(file.metadata()["training"])
    return [Point(*point) for point in told["curve"]], told["seconds"]


def adam_state(
    config: LanguageConfig, corpus: Corpus, context: Context, seed: int
) -> dict[str, Any] | None:
    """Return the `state_dict()` of the Adam that trained a cached network, if it was kept."""
    path = _cache_path(config, corpus, context, seed)
    squares = _read_tensors(path, SQUARES, context.device)
    means = _read_tensors(path, MEANS, context.device)
    if not squares or means is None:
        return None
    with safe_open(path, framework="pt") as file:
        steps = json.loads(file.metadata()["training"])["steps"]
    state: dict[int, dict[str, Tensor]] = {}
    for place, name in enumerate(squares):
        mean = means.get(name, torch.zeros_like(squares[name]))
        state[place] = {
            "step": torch.tensor(float(steps)),
            "exp_avg": mean,
            "exp_avg_sq": squares[name],
        }
    optimizer = _optimizer(list(squares.values()), config.training, torch.device("cpu"))
    return {**optimizer.state_dict(), "state": state}


@torch.no_grad()
def measure_perplexity(
    model: LanguageModel, tokens: Int[Tensor, "T"], device: torch.device, streams: int = 1
) -> float:
    """Return the perplexity of all tokens but the first.

    Args:
        streams: number of positions at which the text is read in parallel; faster, and slightly too
            high, since the network does not know what precedes them. The last few tokens may be
            omitted.
    """
    scored = (len(tokens) - 1) // streams * streams
    inputs, targets = (
        tokens[start : start + scored].to(device).view(streams, -1) for start in (0, 1)
    )
    state, total = model.initial_state(streams), torch.zeros((), dtype=torch.float64, device=device)
    columns = max(1, SCORED_TOKENS_PER_CHUNK // streams)
    for words, following in zip(inputs.split(columns, 1), targets.split(columns, 1), strict=True):
        logits, state = model(words, state)
        losses = functional.cross_entropy(
            logits.flatten(0, 1), following.flatten(), reduction="none"
        )
        total += losses.double().sum()
    return float((total / scored).exp())


def streams_of(tokens: int) -> int:
    """Return how many positions to read a text at in parallel, at least a hundred tokens apart."""
    return max(1, min((tokens - 1) // 100, max(STREAMS, tokens // MAX_STREAM_TOKENS)))


def rate_share(done: float, settings: TrainingSettings) -> float:
    """Return the share of the learning rate at this share of the training: 1, then falling
    linearly.
    """
    if done <= settings.decay_from:
        return 1.0
    fallen = (done - settings.decay_from) / (1 - settings.decay_from)
    return 1 - (1 - settings.decay_to) * fallen


class TrainingRun:
    """A training in progress, which resumes from the workspace if it can.

    Args:
        name: a digest of everything the result depends on; a state saved under another name is not
            resumed.
    """

    def __init__(
        self, config: LanguageConfig, corpus: Corpus, context: Context, seed: int, name: str
    ) -> None:
        settings, device = config.training, context.device
        self.settings, self.context, self.seed, self.name = settings, context, seed, name
        self.valid = corpus.valid
        self.text = corpus.train.to(device)
        self.model = _initial(config, corpus, seed).to(device)
        self.averages = [copy.deepcopy(self.model).requires_grad_(False) for _ in settings.averages]
        for average in self.averages:
            average.lstm.flatten_parameters()  # a copy loses this
        self.parameters: list[Tensor] = list(self.model.parameters())
        self.averaged: list[list[Tensor]] = [list(each.parameters()) for each in self.averages]
        self.best = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.optimizer = _optimizer(self.parameters, settings, device)
        self.multiple = WIDTH_MULTIPLE if device.type == "cuda" else 1

        self.batch = max(1, min(settings.batch, len(self.text) // (settings.bptt + 1)))
        self.length = len(self.text) // self.batch
        self.bptt = min(settings.bptt, self.length)
        self.steps_an_epoch = self.length // self.bptt

        self.steps = 0
        hidden, cells = self.model.initial_state(self.batch)
        self.state = hidden, cells.clone()
        self.source = torch.Generator(device).manual_seed(seed)
        self.loss = torch.zeros((), device=device)
        self.words = torch.zeros(self.batch, self.bptt, dtype=torch.long, device=device)
        self.following = torch.zeros_like(self.words)
        self._learn: Callable[[], None] = self._learn_batch
        if device.type == "cuda":
            self._learn = Recorded(self._learn_batch, self.source)
        self.curve: list[Point] = []
        self._seconds_before, self._start = 0.0, time.perf_counter()
        self._saved_at, self._saving = self._start, Future[None]()
        self._saving.set_result(None)
        self._resume()

    @property
    def seconds(self) -> float:
        """Seconds spent on the training."""
        return self._seconds_before + time.perf_counter() - self._start

    @property
    def epochs(self) -> int:
        """Number of completed epochs."""
        return self.steps // self.steps_an_epoch

    def finish(self) -> None:
        """Train to the end."""
        wanted = self.settings.epochs
        if self.steps % self.steps_an_epoch:
            self._lay_out()
        bar = self.context.bar(wanted, f"training, seed {self.seed}", "epochs", self.epochs)
        with bar, ThreadPoolExecutor(1) as saver:
            while self.epochs < wanted:
                if self.steps % self.steps_an_epoch == 0:
                    self._begin_epoch()
                with products("tf32", self.text.device):
                    self._step()
                if self.steps % self.steps_an_epoch == 0:
                    self._end_epoch()
                    if self.curve:
                        bar.set_postfix_str(f"perplexity {self.curve[-1].valid:.1f}", refresh=False)
                    bar.update()
                if (
                    time.perf_counter() - self._saved_at > NETWORK_SAVE_EVERY_S
                    and self._saving.done()
                ):
                    self._save(saver)
        self._saving.result()

    def _begin_epoch(self) -> None:
        self._lay_out()
        for part in (*self.state, self.loss):
            part.zero_()

    def _lay_out(self) -> None:
        """Lay out the text in rows, one per position, cyclically from this epoch's first word."""
        draws = torch.Generator().manual_seed(self.seed * 100_003 + self.epochs)
        first = int(torch.randint(len(self.text), (), generator=draws))
        used = self.batch * self.length
        self.inputs, self.targets = (
            self.text.roll(-first - ahead)[:used].view(self.batch, self.length) for ahead in (0, 1)
        )

    def _step(self) -> None:
        place = self.steps % self.steps_an_epoch
        columns = slice(place * self.bptt, (place + 1) * self.bptt)
        self.words.copy_(self.inputs[:, columns])
        self.following.copy_(self.targets[:, columns])
        done = self.steps / (self.steps_an_epoch * self.settings.epochs)
        _set_rate(self.optimizer, self.settings.lr * rate_share(done, self.settings))
        self._learn()
        self.steps += 1
        most = self.steps / (self.steps + 9)  # reach of a ninth of the steps so far
        with torch.no_grad():
            for averaged, share in zip(self.averaged, self.settings.averages, strict=True):
                torch._foreach_lerp_(averaged, self.parameters, 1 - min(share, most))

    def _learn_batch(self) -> None:
        """Learn from the current words. Everything that changes is changed in place."""
        before = self.state
        loss = self._loss(self.words, self.following)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.settings.precision == "half":
            for parameter in self.parameters:
                if parameter.grad is not None:  # what overflows would spoil all others by its norm
                    parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        self.optimizer.step()
        for old, new in zip(before, self.state, strict=True):
            old.copy_(new)
        self.state = before

    def _loss(self, inputs: Int[Tensor, "B T"], targets: Int[Tensor, "B T"]) -> Tensor:
        """Return the loss of a batch, with penalties, and advance the state."""
        settings = self.settings
        drawn = draw_masks(self.model, self.batch, settings.dropouts, self.source)
        if settings.state_reset:
            keeps = torch.rand((1, self.batch, 1), device=inputs.device, generator=self.source)
            keeps = (keeps >= settings.state_reset).float()
            self.state = self.state[0] * keeps, self.state[1] * keeps
        noisy = self.model.noisy(
            inputs, self.state, drawn, self.multiple, half=settings.precision == "half"
        )
        self.state = noisy.state[0].detach(), noisy.state[1].detach()
        loss = functional.cross_entropy(noisy.logits.flatten(0, 1), targets.flatten())
        self.loss += loss.detach()
        if settings.activation_penalty:
            loss = loss + settings.activation_penalty * noisy.dropped.square().mean()
        if settings.temporal_penalty and self.bptt > 1:
            change = noisy.outputs[:, 1:] - noisy.outputs[:, :-1]
            loss = loss + settings.temporal_penalty * change.square().mean()
        return loss

    def _end_epoch(self) -> None:
        if self.epochs % max(1, self.settings.epochs // CURVE_POINTS) and (
            self.epochs < self.settings.epochs
        ):
            return
        device = self.text.device
        found = [
            measure_perplexity(each, self.valid, device, streams_of(len(self.valid)))
            for each in self.averages
        ]
        valid = min((value for value in found if math.isfinite(value)), default=math.inf)
        if not math.isfinite(valid):
            raise ExperimentError(
                f"the training diverged after {self.epochs} epochs: "
                f"pass a --training.lr below {self.settings.lr}"
            )
        if valid < min((point.valid for point in self.curve), default=math.inf):
            best = self.averaged[found.index(valid)]
            torch._foreach_copy_(list(self.best.values()), best)
        train = float((self.loss / self.steps_an_epoch).exp())
        self.curve.append(Point(self.epochs, train, valid))

    # State from which a killed process resumes

    def _save(self, saver: ThreadPoolExecutor) -> None:
        """Copy the state on its device, and write it to disk while training continues."""
        self._saving.result()  # raises an error of the last save
        state: dict[str, Any] = {
            "name": self.name,
            "steps": self.steps,
            "model": dict(self.model.named_parameters()),
            "averages": [dict(average.named_parameters()) for average in self.averages],
            "best": self.best,
            "optimizer": self.optimizer.state_dict(),
            "state": self.state,
            "source": self.source.get_state(),
            "loss": self.loss,
            "curve": [dataclasses.astuple(point) for point in self.curve],
            "seconds": self.seconds,
        }
        save, name = self.context.workspace.save, f"training-{self.seed}"
        self._saving = saver.submit(save, name, copy.deepcopy(state))
        self._saved_at = time.perf_counter()

    def _resume(self) -> None:
        kept = self.context.workspace.load(f"training-{self.seed}")
        if kept is None or kept["name"] != self.name:
            return
        with torch.no_grad():
            modules = zip(
                (self.model, *self.averages), (kept["model"], *kept["averages"]), strict=True
            )
            for module, then in modules:
                for key, parameter in module.named_parameters():
                    parameter.copy_(then[key])
            for key, tensor in self.best.items():
                tensor.copy_(kept["best"][key])
        _load(self.optimizer, kept["optimizer"])
        for part, then in zip(
            (*self.state, self.loss), (*kept["state"], kept["loss"]), strict=True
        ):
            part.copy_(then)
        self.source.set_state(kept["source"])
        self.steps, self._seconds_before = kept["steps"], kept["seconds"]
        self.curve = [Point(*point) for point in kept["curve"]]


def _initial(config: LanguageConfig, corpus: Corpus, seed: int) -> LanguageModel:
    """Return the untrained network; the caller's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LanguageModel(len(corpus.words), **vars(config.network))


def _optimizer(
    parameters: list[Tensor], settings: TrainingSettings, device: torch.device
) -> torch.optim.Adam:
    on_gpu = device.type == "cuda"
    return torch.optim.Adam(
        parameters,
        lr=torch.tensor(settings.lr, device=device) if on_gpu else settings.lr,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=on_gpu or None,
        capturable=on_gpu,
    )


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate, in place if it is a tensor, since the recorded step reads it again."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a saved state, but keep the current learning rate."""
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


# The network on disk


def _cache_path(config: LanguageConfig, corpus: Corpus, context: Context, seed: int) -> Path:
    """Return the path, whose name is a digest of everything the network depends on."""
    told: dict[str, Any] = {"seed": seed, "format": NETWORK_FORMAT, "words": len(corpus.words)}
    told |= {"torch": str(torch.__version__), "device": context.device.type}
    for name in ("train", "valid"):  # the latter decides when the network was best
        told[name] = hashlib.sha256(getattr(corpus, name).numpy().tobytes()).hexdigest()
    told["code"] = _code()
    told["settings"] = [dataclasses.asdict(part) for part in (config.network, config.training)]
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    return context.cache / f"language-{digest[:16]}.safetensors"


@functools.cache
def _code() -> list[str]:
    """Return the sources as they were at the first call, since they may be edited meanwhile."""
    return [inspect.getsource(module) for module in (network, recording, sys.modules[__name__])]


def _read_tensors(path: Path, kind: str, device: torch.device) -> dict[str, Tensor] | None:
    """Read the tensors of a kind, in the order of the parameters, if the file is intact."""

    def read(file: Any) -> dict[str, Tensor]:
        order, there = json.loads(file.metadata()["training"])["order"], set(file.keys())
        return {name: file.get_tensor(kind + name) for name in order if kind + name in there}

    return read_cached(path, device, read)


def _write(path: Path, run: TrainingRun) -> None:
    state = run.optimizer.state_dict()["state"]
    kept = {WEIGHTS + name: tensor for name, tensor in run.best.items()}
    for name, moments in zip(run.best, state.values(), strict=bool(state)):
        kept[SQUARES + name] = moments["exp_avg_sq"]
        if run.settings.beta1:
            kept[MEANS + name] = moments["exp_avg"]
    told = {
        "curve": [dataclasses.astuple(point) for point in run.curve],
        "order": list(run.best),
        "seconds": run.seconds,
        "steps": run.steps,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in kept.items()}
    write_durably(path, save(tensors, metadata={"training": json.dumps(told)}))
