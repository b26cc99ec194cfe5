"""A language model with random weights and a tokenizer, small enough for tests."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = (
    "The heron stands in the shallow water of the river and waits. A fish swims by, and the heron "
    "strikes. In the evening it flies home to the old tree on the bank, where three young herons "
    "wait for the fish. The river rises in spring, when the snow melts in the hills. Then the "
    "water is brown, and the heron hunts in the meadow instead. Größe: 1.20 m — it is a big bird."
)


@cache
def make_tokenizer() -> Any:
    """Return a tokenizer with byte-level pairs and no padding token."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def make_model(seed: int = 0, **changes: Any) -> Any:
    """Return a Llama model of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": len(make_tokenizer()),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": make_tokenizer().eos_token_id,
        "pad_token_id": None,
        "initializer_range": 0.2,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()
