"""The text of single tokens."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from tiny_language_model import TEXT, make_tokenizer
from tokenizers import Tokenizer, decoders, models

from mbpa.language.tokens import TokenReader, quote

SAMPLES = ["中文漢字", "👩‍👩‍👧 😀", "Größe — ½", "plain words, and more", "\n\n  x\t", "עברית", "ก็"]


@cache
def make_byte_fallback_tokenizer() -> Any:
    """Return a tokenizer as Llama 2 has it: pieces with ▁, and bytes for what is unknown."""
    from transformers import PreTrainedTokenizerFast

    letters = sorted(set("abcdefghijklmnopqrstuvwxyz,.▁PGß"))
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: number for number, name in enumerate(names)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    from tokenizers import normalizers

    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.mark.parametrize("make", [make_tokenizer, make_byte_fallback_tokenizer])
@pytest.mark.parametrize("seed", range(20))
def test_pieces_join_to_the_text(make: Any, seed: int) -> None:
    draw, tokenizer = random.Random(seed), make()
    text = "".join(draw.choice(SAMPLES) for _ in range(12)) + TEXT[:seed]
    ids = tokenizer(text)["input_ids"]
    start = draw.randrange(3)
    reader = TokenReader(tokenizer, ids[:start])
    pieces = [reader.read(token) for token in ids[start:]] + [reader.flush()]
    whole = tokenizer.decode(ids)
    assert whole.endswith("".join(pieces))
    before = tokenizer.decode(ids[:start]).rstrip("\ufffd")
    assert before + "".join(pieces) == whole


@pytest.mark.parametrize("make", [make_tokenizer, make_byte_fallback_tokenizer])
@pytest.mark.parametrize("seed", range(10))
def test_a_quoted_passage_is_in_the_text(make: Any, seed: int) -> None:
    draw, tokenizer = random.Random(seed), make()
    text = "".join(draw.choice(SAMPLES) for _ in range(12))
    ids = torch.tensor(tokenizer(text)["input_ids"])
    whole, reader = tokenizer.decode(ids.tolist()), TokenReader(tokenizer, ids[:1].tolist())
    for at in range(1, len(ids)):
        before, token, after = quote(tokenizer, ids, at, 24, 12)
        assert before + token + after in whole
        assert "\ufffd" not in before + token + after
        assert token == reader.read(int(ids[at]))


def test_a_part_of_a_character_comes_with_what_completes_it() -> None:
    tokenizer = make_byte_fallback_tokenizer()
    ids = tokenizer("a中b")["input_ids"]
    reader = TokenReader(tokenizer)
    assert [reader.read(token) for token in ids] == ["a", "", "", "中", "b"]


def test_what_nothing_completes_is_flushed() -> None:
    tokenizer = make_byte_fallback_tokenizer()
    ids = tokenizer("a中")["input_ids"][:-1]
    reader = TokenReader(tokenizer)
    assert [reader.read(token) for token in ids] == ["a", "", ""]
    assert reader.flush().startswith("\ufffd")
    assert reader.flush() == ""
