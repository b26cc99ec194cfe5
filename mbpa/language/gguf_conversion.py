"""Conversion of a GGUF file with a Llama model to a folder in Hugging Face's format.

The package `gguf` reads the file and expands its quantized weights. The rest is names: of the
settings, of the weights, and of the parts of the tokenizer. Transformers can read such files as
well, with the same weights to the bit. But it needs the package accelerate, takes three times as
long, refuses to save what it has read, and omits that this tokenizer splits numbers into digits.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from mbpa.errors import MissingExtraError

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens in `tokenizer.ggml.token_type`


def convert_gguf(source: Path, folder: Path, *, dtype: torch.dtype) -> None:
    """Write the model and the tokenizer in a GGUF file to a folder in Hugging Face's format.

    Args:
        source: GGUF file of a Llama model with the tokenizer of SmolLM.
        folder: an existing folder.
        dtype: type of the weights that are written; they are expanded in float32.

    Raises:
        MissingExtraError: gguf or transformers is not installed.
        ValueError: the file holds another kind of model or tokenizer.
    """
    try:
        import gguf
        import transformers
    except ImportError as error:
        raise MissingExtraError(f"{error.name}", extra="language") from error

    reader = gguf.GGUFReader(source)
    fields = {name: field.contents for name, field in reader.fields.items()}

    def read(name: str) -> Any:
        if name not in fields:
            raise ValueError(f"{source}: must have the field {name}")
        return fields[name]()

    for name, expected in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if (found := read(name)) != expected:
            raise ValueError(f"{source}: {name} must be {expected!r}, got {found!r}")

    tokens, token_types = read("tokenizer.ggml.tokens"), read("tokenizer.ggml.token_type")
    special = {
        role: read(f"tokenizer.ggml.{name}_token_id")
        for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{name}_token_id" in fields
    }
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    heads = read("llama.attention.head_count")
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(tokens),
        max_position_embeddings=read("llama.context_length"),
        hidden_size=read("llama.embedding_length"),
        intermediate_size=read("llama.feed_forward_length"),
        num_hidden_layers=read("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=read("llama.attention.head_count_kv"),
        head_dim=read("llama.rope.dimension_count"),
        rms_norm_eps=read("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": read("llama.rope.freq_base")},
        tie_word_embeddings="output.weight" not in tensors,
        **{f"{role}_token_id": special.get(role) for role in ("bos", "eos", "pad")},
    )
    weights = {}
    for name, tensor in tensors.items():
        weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        if ".attn_q." in name or ".attn_k." in name:
            weight = _restore_head_order(weight, config.head_dim)
        weights[_rename(source, name)] = weight
    _check_weights(source, weights, config)

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_build_tokenizer(tokens, token_types, read("tokenizer.ggml.merges")),
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        **{f"{role}_token": tokens[place] for role, place in special.items()},
    )
    if "tokenizer.chat_template" in fields:
        tokenizer.chat_template = read("tokenizer.chat_template")

    tokenizer.save_pretrained(folder)
    config.dtype = dtype
    config.save_pretrained(folder)
    transformers.GenerationConfig.from_model_config(config).save_pretrained(folder)
    safetensors.torch.save_file(
        {name: weight.to(dtype).contiguous() for name, weight in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def _rename(source: Path, name: str) -> str:
    """Return Hugging Face's name of a weight."""
    layer = _LAYER.fullmatch(name)
    if layer is not None and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.weight"
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    raise ValueError(f"{source}: must have the weights of a plain Llama model, got {name}")


def _restore_head_order(weight: Tensor, head_dim: int) -> Tensor:
    """Undo the reordering of rows within each head.

    Rotary embeddings turn pairs of numbers. GGUF has the two of a pair next to each other, Hugging
    Face half a head apart.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(rows // head_dim, head_dim // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _check_weights(source: Path, weights: dict[str, Tensor], config: Any) -> None:
    """Raise `ValueError` unless these are the weights that the model has."""
    import transformers

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    expected = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"{source}: {name} must have shape {expected.get(name)}, got {found.get(name)}"
            )


def _build_tokenizer(tokens: list[str], token_types: list[int], merges: list[str]) -> Any:
    """Return the tokenizer of SmolLM: digits one by one, then GPT-2's byte-level pairs."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: place for place, token in enumerate(tokens)},
            merges=[(left, right) for left, right in (merge.split(" ") for merge in merges)],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, token_types, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if kind == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in kinds if kind == _USER_DEFINED]
    )
    return tokenizer
