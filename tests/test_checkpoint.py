"""Checkpoints: what was saved comes back, damage is named, and no interruption costs the old one.

Run as a program this file is the saver that ``test_..._killed_...`` below kills: forking there
gives many real kills for one import of torch, away from pytest's own threads.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mbpa
import mbpa.checkpoint as checkpoint
from mbpa import files
from mbpa.checkpoint import FORMAT, load_checkpoint, save_checkpoint
from mbpa.errors import CheckpointError

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.bool,
]
DESCRIPTION = {"predictor": {"k": 8, "rate": 0.1}, "classes": ["é", None, True], "n": 1.0}


def small():
    return {
        "memory": {"keys": torch.arange(6.0).reshape(2, 3), "values": torch.tensor([3, 1])},
        "head": {"weight": torch.tensor([[0.5]], dtype=torch.bfloat16)},
        "none": {},
    }


def generation(number, size=100):
    """A checkpoint every part of which tells which generation it belongs to."""
    return {
        "tensors": {
            "memory": {"keys": torch.full((size,), float(number))},
            "head": {"weight": torch.full((3,), number)},
        },
        "description": {"generation": number},
    }


def generation_of(directory):
    loaded = load_checkpoint(directory)
    number = loaded.description["generation"]
    assert_same(
        loaded.tensors, generation(number, len(loaded.tensors["memory"]["keys"]))["tensors"]
    )
    return number


def assert_same(left, right):
    assert left.keys() == right.keys()
    for group, named in right.items():
        assert left[group].keys() == named.keys()
        for name, tensor in named.items():
            came = left[group][name]
            assert (came.dtype, came.shape) == (tensor.dtype, tensor.shape)
            assert came.device.type == "cpu"
            bits = [
                t.cpu().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
                for t in (came, tensor)
            ]
            assert torch.equal(*bits)  # bits, so that NaN equals itself


def leftovers(directory):
    """Return the files in ``directory`` that belong to no complete checkpoint."""
    expected = {"manifest.json", ".lock"}
    with contextlib.suppress(FileNotFoundError):
        manifest = json.loads((directory / "manifest.json").read_text())
        expected |= {entry["name"] for entry in manifest["files"].values()}
    return set(os.listdir(directory)) - expected


def payloads(directory):
    return sorted(directory.glob("*.safetensors"))


def rewrite(directory, edit):
    """Edit the manifest and correct its checksum, as a forger would."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    edit(manifest)
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(manifest))


def replace_payload(directory, group, data):
    """Replace a payload by ``data``, with the right name and checksum."""
    digest = hashlib.sha256(data).hexdigest()
    name = f"{group}-{digest[:16]}.safetensors"
    (directory / name).write_bytes(data)
    entry = {"name": name, "bytes": len(data), "sha256": digest}
    rewrite(directory, lambda manifest: manifest["files"].update({group: entry}))
    return directory / name


def poke(path, position, byte):
    """In place: rewriting a file thousands of times makes some file systems flush every time."""
    with open(path, "r+b", buffering=0) as file:
        file.seek(position)
        file.write(bytes([byte]))


def assert_refused(directory, path, match=None):
    with pytest.raises(CheckpointError, match=match) as caught:
        load_checkpoint(directory)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.fixture
def saved(tmp_path):
    save_checkpoint(tmp_path, tensors=small(), description=DESCRIPTION)
    return tmp_path


# What is saved comes back


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=seed).bool()
    raw = torch.randint(0, 256, [math.prod(shape) * dtype.itemsize], generator=seed)
    tensor = raw.to(torch.uint8).view(dtype).reshape(shape)  # any bits: NaN and infinity too
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
groups = st.text("abcXYZ019_-", min_size=1, max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars.filter(lambda value: value not in (math.inf, -math.inf)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(groups, st.dictionaries(names, tensors(), max_size=4), max_size=3),
    st.dictionaries(st.text(), values, max_size=3),
)
def test_whatever_is_saved_is_loaded(stored, description):
    with tempfile.TemporaryDirectory() as directory:
        save_checkpoint(directory, tensors=stored, description=description)
        loaded = load_checkpoint(directory)
    assert_same(loaded.tensors, stored)
    assert loaded.description == description


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8, torch.int8, torch.int16, torch.int32])
def test_every_dtype_is_kept_also_empty_and_scalar(tmp_path, dtype):
    stored = {
        "g": {
            "some": torch.tensor([[0, 1], [1, 0]], dtype=dtype),
            "scalar": torch.tensor(1, dtype=dtype),
            "empty": torch.empty(0, 3, dtype=dtype),
        }
    }
    save_checkpoint(tmp_path, tensors=stored, description={})
    assert_same(load_checkpoint(tmp_path).tensors, stored)


def test_tensors_that_share_storage_come_back_apart(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    weight = torch.nn.Parameter(base)
    stored = {
        "g": {"all": base, "again": base, "row": base[1], "column": base[:, 1], "t": base.T},
        "h": {
            "wide": base[:1].expand(5, 4),
            "weight": weight,
            "negative": torch._neg_view(torch.ones(3)),
        },
    }
    save_checkpoint(tmp_path, tensors=stored, description={})
    loaded = load_checkpoint(tmp_path).tensors
    assert_same(
        loaded, {group: {n: t.detach() for n, t in g.items()} for group, g in stored.items()}
    )
    loaded["g"]["all"].zero_()
    assert torch.equal(loaded["g"]["again"], base)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_gpu_come_back_on_the_cpu(tmp_path):
    stored = {"g": {"x": torch.arange(4.0, device="cuda"), "y": torch.ones(2, 3, device="cuda").T}}
    save_checkpoint(tmp_path, tensors=stored, description={})
    assert_same(load_checkpoint(tmp_path).tensors, stored)


def test_saving_leaves_the_given_tensors_alone(tmp_path):
    weight = torch.nn.Parameter(torch.ones(2, 3).T)
    save_checkpoint(tmp_path, tensors={"g": {"w": weight}}, description={})
    assert weight.requires_grad
    assert not weight.is_contiguous()


def test_order_of_groups_and_description_is_kept_and_tensors_are_sorted(tmp_path):
    one = torch.ones(1)
    stored = {"z": {"b": one, "c": one.long(), "a": one}, "a": {}}
    save_checkpoint(tmp_path, tensors=stored, description={"z": 1, "a": (1, 2)})
    loaded = load_checkpoint(tmp_path)
    assert list(loaded.tensors) == ["z", "a"]
    assert list(loaded.tensors["z"]) == ["a", "b", "c"]
    assert list(loaded.description.items()) == [("z", 1), ("a", [1, 2])]


def test_manifest_is_readable_and_names_version_and_files(saved):
    text = (saved / "manifest.json").read_text()
    manifest = json.loads(text)
    assert list(manifest) == ["format", "mbpa", "files", "description", "sha256"]
    assert manifest["format"] == FORMAT == 1
    assert isinstance(manifest["mbpa"], str)
    assert '\n  "description": {\n' in text
    for group, entry in manifest["files"].items():
        data = (saved / entry["name"]).read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        assert entry == {
            "name": f"{group}-{digest[:16]}.safetensors",
            "bytes": len(data),
            "sha256": digest,
        }
    signed = manifest["sha256"]
    rewrite(saved, lambda manifest: None)
    assert json.loads((saved / "manifest.json").read_text())["sha256"] == signed


def test_version_is_the_installed_one_or_unknown(tmp_path, monkeypatch):
    def version(name):
        assert name == "mbpa"
        return "1.2.3"

    def missing(name):
        raise checkpoint.importlib.metadata.PackageNotFoundError(name)

    for function, expected in [(version, "1.2.3"), (missing, "unknown")]:
        monkeypatch.setattr(checkpoint.importlib.metadata, "version", function)
        save_checkpoint(tmp_path, **generation(1))
        assert json.loads((tmp_path / "manifest.json").read_text())["mbpa"] == expected


def test_parents_are_created_and_relative_paths_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_checkpoint("a/b/c", **generation(1))
    assert generation_of(tmp_path / "a" / "b" / "c") == generation_of(Path("a/b/c")) == 1


def test_a_copied_and_read_only_checkpoint_loads(saved, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy, ignore=shutil.ignore_patterns(".lock", "copy"))
    copy.chmod(0o555)
    assert_same(load_checkpoint(copy).tensors, small())
    copy.chmod(0o755)


# What cannot be stored is refused before anything is written


@pytest.mark.parametrize("group", ["", "a/b", "..", "a.b", "é", "a b", "a\n", "x" * 129, 3])
@pytest.mark.usefixtures("unchecked_annotations")
def test_group_names_are_letters_digits_underscore_and_hyphen(tmp_path, group):
    with pytest.raises(ValueError, match=re.escape(f"got {group!r}")):
        save_checkpoint(tmp_path / "new", tensors={group: {}}, description={})
    assert not (tmp_path / "new").exists()


def circular():
    loop = []
    loop.append(loop)
    return loop


def nested(depth):
    return [nested(depth - 1)] if depth else 0


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (math.nan, "NaN"),
        ([-math.inf], "NaN or Infinity"),
        (torch.ones(1), "Tensor"),
        ({1: 2}, "string keys, got 1"),
        ([{"a": {None: 2}}], "string keys, got None"),
        (circular(), "Circular"),
        (nested(100), "at most 100 deep"),
        ({"x"}, "set"),
    ],
    ids=str,
)
def test_description_must_be_json(tmp_path, value, match):
    with pytest.raises(ValueError, match=match):
        save_checkpoint(tmp_path / "new", tensors=small(), description={"x": value})
    assert not (tmp_path / "new").exists()


def test_description_nested_as_deep_as_allowed_or_deeper_never_ends_in_a_recursion_error(tmp_path):
    save_checkpoint(tmp_path, tensors={}, description={"x": nested(98)})
    assert load_checkpoint(tmp_path).description == {"x": nested(98)}
    deep = 0
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="description must be"):
        save_checkpoint(tmp_path, tensors={}, description={"x": deep})


@pytest.mark.parametrize(
    ("named", "match"),
    [
        ({"x": [1.0]}, r"g\['x'\] must be a torch.Tensor, got list"),
        ({"x": torch.ones(2, dtype=torch.complex64)}, "dtypes bfloat16, .*; got torch.complex64"),
        ({"x": torch.ones(2, device="meta")}, "hold data, got layout torch.strided on meta"),
        ({"x": torch.eye(2).to_sparse()}, "dense and hold data, got layout torch.sparse_coo"),
        ({"__metadata__": torch.ones(2)}, "other than '__metadata__'"),
        ({3: torch.ones(2)}, "must be a string .* got 3"),
        ({"\ud800": torch.ones(2)}, "valid text"),
        ([torch.ones(2)], "group g must be a mapping, got list"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_tensors_that_safetensors_cannot_hold_are_refused(tmp_path, named, match):
    with pytest.raises(ValueError, match=match):
        save_checkpoint(tmp_path / "new", tensors={"g": named}, description={})
    assert not (tmp_path / "new").exists()


def test_directory_must_not_be_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in [tmp_path / "file", tmp_path / "file" / "below"]:
        with pytest.raises(ValueError, match=re.escape(f"got {path}")):
            save_checkpoint(path, **generation(1))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("content", ['{"name": "My web app"}', "[]"])
def test_manifest_of_another_program_is_not_overwritten(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match="another program"):
        save_checkpoint(tmp_path, **generation(1))
    assert os.listdir(tmp_path) == ["manifest.json"]
    assert (tmp_path / "manifest.json").read_text() == content


def test_manifest_that_is_a_directory_is_refused(tmp_path):
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(ValueError, match=r"manifest\.json must be a file"):
        save_checkpoint(tmp_path, **generation(1))
    assert_refused(tmp_path, tmp_path / "manifest.json", "regular file")


def test_other_files_are_left_alone(tmp_path):
    others = {
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "memory-0123456789ABCDEF.safetensors",
        "memory-0123456789abcdef.safetensors.tmp",
        "manifest.json.tmp",
        "manifest.json.bak",
        "notes.txt",
        f"notes.txt.{'0' * 32}.tmp",
        ".hidden",
    }
    for name in others:
        (tmp_path / name).write_text("mine")
    (tmp_path / "folder").mkdir()
    for number in range(3):
        save_checkpoint(tmp_path, **generation(number))
    assert leftovers(tmp_path) == others | {"folder"}
    assert all((tmp_path / name).read_text() == "mine" for name in others)


# Damage is detected and named


def test_missing_directory_and_manifest_are_named(tmp_path):
    assert_refused(tmp_path, tmp_path / "manifest.json", "no manifest in this directory")
    assert_refused(tmp_path / "no", tmp_path / "no" / "manifest.json", "is not a directory")
    (tmp_path / "file").write_text("")
    assert_refused(tmp_path / "file", tmp_path / "file" / "manifest.json", "is not a directory")


def test_error_names_the_full_path_of_a_relative_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused("x", tmp_path / "x" / "manifest.json")


def test_missing_payload_is_named(saved):
    for path in payloads(saved):
        data = path.read_bytes()
        path.unlink()
        assert_refused(saved, path, "missing, though manifest.json names it")
        path.write_bytes(data)
    assert_same(load_checkpoint(saved).tensors, small())


def test_truncation_of_any_payload_is_detected(saved):
    for path in payloads(saved):
        data = path.read_bytes()
        for length in [0, 1, 7, 8, 9, len(data) // 2, len(data) - 1, len(data) + 1]:
            path.write_bytes((data + b"\0")[:length])
            assert_refused(saved, path, f"must have {len(data)} bytes, got {length}$")
        path.write_bytes(data)


def test_truncation_of_the_manifest_is_detected(saved):
    path = saved / "manifest.json"
    data = path.read_bytes()
    assert data.endswith(b"}\n")
    os.truncate(path, len(data) - 1)
    assert load_checkpoint(saved).description == DESCRIPTION
    for length in reversed(range(len(data) - 1)):
        os.truncate(path, length)
        assert_refused(saved, path)


def test_flipped_bits_anywhere_in_a_payload_are_detected(saved):
    for path in payloads(saved):
        data = path.read_bytes()
        for position, byte in enumerate(data):
            poke(path, position, byte ^ 1 << position % 8)
            assert_refused(saved, path, "altered: sha256")
            poke(path, position, byte)
    assert_same(load_checkpoint(saved).tensors, small())


@pytest.mark.heavy
def test_altered_byte_anywhere_in_the_manifest_is_detected_or_harmless(saved):
    path = saved / "manifest.json"
    data = path.read_bytes()
    harmless = 0
    for position, byte in enumerate(data):
        for other in {byte ^ 1 << bit for bit in range(8)} | set(b' \n09"e{-\0\xff') - {byte}:
            poke(path, position, other)
            loaded, said = None, ""
            try:
                loaded = load_checkpoint(saved)
            except CheckpointError as error:
                said = str(error)
            assert loaded or str(path) in said
            if loaded:
                harmless += 1
                assert_same(loaded.tensors, small())
                assert loaded.description == DESCRIPTION
        poke(path, position, byte)
    assert 0 < harmless < len(data)  # white space, and 1e0 for 1.0


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "must be JSON"),
        (b"\xff\xfe", "must be JSON"),
        (b"[]", "must be a JSON object, got list"),
        (b"null", "must be a JSON object, got NoneType"),
        (b"{}", "'format' must be a positive integer, got None"),
        (b'{"format": true}', "positive integer, got True"),
        (b'{"format": 1.0}', r"positive integer, got 1\.0"),
        (b'{"format": 0}', "positive integer, got 0"),
        (b'{"format": 1}', "lacks 'mbpa'"),
        (b'{"format": ' + b"1" * 5000 + b"}", "must be JSON"),
        (b"[" * 100_000, "must be JSON"),
        ('{"format": 1}'.encode("utf-16"), "must be JSON"),
    ],
    ids=range(12),
)
def test_manifest_that_is_no_manifest_is_refused(saved, content, match):
    (saved / "manifest.json").write_bytes(content)
    assert_refused(saved, saved / "manifest.json", match)


@pytest.mark.parametrize("number", ["1e999", "NaN", "-Infinity"])
def test_manifest_with_a_number_json_lacks_is_refused(saved, number):
    path = saved / "manifest.json"
    path.write_text(path.read_text().replace('"n": 1.0', f'"n": {number}'))
    assert_refused(saved, path, "altered")


@pytest.mark.parametrize("field", ["format", "mbpa", "files", "description", "sha256"])
def test_manifest_must_have_every_field_of_its_type(saved, field):
    path = saved / "manifest.json"
    manifest = json.loads(path.read_text())
    for wrong in [None, 3.5, []]:
        path.write_text(json.dumps({**manifest, field: wrong}))
        assert_refused(saved, path, f"'{field}'")
    del manifest[field]
    path.write_text(json.dumps(manifest))
    assert_refused(saved, path, f"'{field}'")


def test_newer_format_says_upgrade_whatever_else_it_holds(saved):
    said = r"written by a newer mbpa \(format 2, this one reads up to 1\): upgrade mbpa"
    (saved / "manifest.json").write_text('{"format": 2, "layers": []}')
    assert_refused(saved, saved / "manifest.json", said)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "folder/x.safetensors",
        "..",
        "",
        "manifest.json",
        "memory-0123456789abcdef.safetensors",
        "a\0b",
        None,
        3,
    ],
)
def test_payload_names_that_are_not_ours_are_refused(saved, name):
    rewrite(saved, lambda manifest: manifest["files"]["memory"].update(name=name))
    said = assert_refused(saved, saved / "manifest.json", "plain file name")
    assert said.endswith(f"got {name!r}")


def test_path_traversal_by_the_group_name_is_refused(tmp_path):
    directory = tmp_path / "inside"
    save_checkpoint(directory, tensors={"memory": {}}, description={})
    entry = json.loads((directory / "manifest.json").read_text())["files"]["memory"]
    shutil.copy(directory / entry["name"], tmp_path / entry["name"])
    forged = {**entry, "name": f"../{entry['name']}"}
    rewrite(directory, lambda manifest: manifest.update(files={"../memory": forged}))
    assert_refused(directory, directory / "manifest.json", "plain file name")


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ("x", "must be an object, got 'x'"),
        ({}, "'bytes' of 0 or more, got None"),
        ({"bytes": -1}, "'bytes' of 0 or more, got -1"),
        ({"bytes": True}, "'bytes' of 0 or more, got True"),
        ({"bytes": 1}, "64 hex digits, got None"),
        ({"bytes": 1, "sha256": "A" * 64}, "64 hex digits, got 'A"),
        ({"bytes": 1, "sha256": 5}, "64 hex digits, got 5"),
    ],
    ids=range(7),
)
def test_file_entries_of_the_manifest_must_be_well_formed(saved, entry, match):
    rewrite(saved, lambda manifest: manifest["files"].update(memory=entry))
    assert_refused(saved, saved / "manifest.json", match)


def safetensors_bytes(header, data=b""):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not safetensors",
        b"\xff" * 64,
        safetensors_bytes([]),
        safetensors_bytes({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}),
        safetensors_bytes({"x": {"dtype": "NO", "shape": [1], "data_offsets": [0, 4]}}, b"0000"),
        safetensors_bytes({"x": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 4]}}, b"00"),
    ],
    ids=range(7),
)
def test_payload_that_is_not_safetensors_is_refused_with_all_checksums_right(saved, data):
    path = replace_payload(saved, "memory", data)
    assert_refused(saved, path, "must be safetensors")


class Explosive:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


def test_pickles_are_refused_and_never_run(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Explosive()}, tmp_path / "torch.pt")
    for data in [pickle.dumps(Explosive()), (tmp_path / "torch.pt").read_bytes()]:
        path = replace_payload(saved, "memory", data)
        assert_refused(saved, path, "must be safetensors")
    assert not Path("exploded").exists()


def test_saving_and_loading_use_no_pickle(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pickle was used")

    for module, name in [
        *((pickle, name) for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler")),
        (torch, "load"),
        (torch, "save"),
    ]:
        monkeypatch.setattr(module, name, refuse)
    save_checkpoint(tmp_path, tensors=small(), description=DESCRIPTION)
    assert_same(load_checkpoint(tmp_path).tensors, small())
    assert "pickle" not in vars(checkpoint)


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EACCES, "Permission denied"), OSError("x")]
)
@pytest.mark.parametrize("which", ["manifest.json", "memory"])
def test_files_that_cannot_be_opened_are_named(saved, monkeypatch, which, error):
    def refuse(path, *args):
        if Path(path).name.startswith(which):
            raise error
        return open(path, *args)

    monkeypatch.setattr(checkpoint, "open", refuse, raising=False)
    [path] = saved.glob(f"{which}*")
    assert_refused(saved, path, "cannot be read: (Permission denied|x)")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_without_permission_are_named(saved):
    for path in [*payloads(saved), saved / "manifest.json"]:
        path.chmod(0)
        assert_refused(saved, path, "cannot be read: Permission denied")
        path.chmod(0o644)


def test_pipes_and_directories_in_place_of_files_are_refused(saved):
    for path in [*payloads(saved), saved / "manifest.json"]:
        data = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        assert_refused(saved, path, "regular file")
        path.unlink()
        path.mkdir()
        assert_refused(saved, path, "regular file")
        path.rmdir()
        path.write_bytes(data)


def test_a_save_over_a_damaged_checkpoint_repairs_it(saved):
    for path in payloads(saved):
        path.write_bytes(b"")
    (saved / "manifest.json").write_bytes(b"{")
    save_checkpoint(saved, tensors=small(), description=DESCRIPTION)
    assert_same(load_checkpoint(saved).tensors, small())
    assert not leftovers(saved)


# A save is interrupted


class FileSystem:
    """Stands between the module and the file system: counts its calls, acts at the chosen one.

    ``act`` runs before the call has any effect, or half-way through a write.
    """

    def __init__(self, at=None, act=None):
        self.at, self.act, self.calls = at, act, []
        self.restore = []

    def tick(self, *call):
        self.calls.append(call)
        if len(self.calls) == self.at:
            self.act()

    def __enter__(self):
        for name in ("fsync", "replace", "unlink", "open"):
            self.restore.append((name, getattr(os, name)))
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        files.open = self.open
        return self

    def __exit__(self, *_):
        for name, original in self.restore:
            setattr(os, name, original)
        del files.open

    def _wrapped(self, name, original):
        def call(*args):
            self.tick(name, *(path_of(arg) if name == "fsync" else arg for arg in args))
            return original(*args)

        return call

    def open(self, path, mode):
        if mode == "rb":
            return open(path, mode)
        self.tick("create", path)
        return HalfWriter(open(path, mode), self)


def path_of(descriptor):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # not Linux
        return descriptor


class HalfWriter:
    def __init__(self, file, system):
        self.file, self.system = file, system
        self.flush, self.fileno = file.flush, file.fileno

    def write(self, data):
        self.file.write(data[: len(data) // 2])
        self.file.flush()
        self.system.tick("write", self.file.name)
        self.file.write(data[len(data) // 2 :])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


def full():
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("act", [full, interrupt])
def test_a_save_that_fails_at_any_call_leaves_a_whole_checkpoint_and_no_rubbish(tmp_path, act):
    save_checkpoint(tmp_path, **generation(1))
    outcomes = []
    for at in range(1, 100):
        with FileSystem(at, act) as system, contextlib.suppress(OSError, KeyboardInterrupt):
            save_checkpoint(tmp_path, **generation(2))
            if len(system.calls) < at:
                break
        outcomes.append(generation_of(tmp_path))
        call = system.calls[at - 1][0]
        replaced = [args[-1].name for name, *args in system.calls[: at - 1] if name == "replace"]
        if "manifest.json" not in replaced:  # the old one, as if nothing had happened
            assert outcomes[-1] == 1
            assert not leftovers(tmp_path)
        elif call != "unlink":
            assert outcomes[-1] == 2
            assert not any(name.endswith(".tmp") for name in leftovers(tmp_path))
        save_checkpoint(tmp_path, **generation(1))
        assert not leftovers(tmp_path)
    assert len(system.calls) < at < 99
    assert outcomes.count(1) >= 10
    assert outcomes.count(2) >= 2


def test_a_failed_first_save_leaves_nothing_but_the_lock(tmp_path):
    for at in range(1, 100):
        directory = tmp_path / str(at)
        with FileSystem(at, full) as system, contextlib.suppress(OSError):
            save_checkpoint(directory, **generation(1))
            break
        if (directory / "manifest.json").exists():
            assert generation_of(directory) == 1
        else:
            assert set(os.listdir(directory)) <= {".lock"}
            assert_refused(directory, directory / "manifest.json", "no manifest")
    assert len(system.calls) > 10


def test_an_interrupt_right_after_the_manifest_was_replaced_keeps_the_new_payloads(
    tmp_path, monkeypatch
):
    save_checkpoint(tmp_path, **generation(1))
    replace = os.replace

    def replace_then_interrupt(source, target):
        replace(source, target)
        if Path(target).name == "manifest.json":
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace_then_interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, **generation(2))
    assert generation_of(tmp_path) == 2


def test_after_a_failed_last_flush_either_manifest_finds_its_payloads(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, **generation(1))
    path = tmp_path / "manifest.json"
    old, flush = path.read_bytes(), files.flush_directory

    def fail_last(directory):
        if path.read_bytes() != old:
            full()
        flush(directory)

    monkeypatch.setattr(files, "flush_directory", fail_last)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(tmp_path, **generation(2))
    assert generation_of(tmp_path) == 2
    path.write_bytes(old)  # what a power cut may bring back, the rename having never been flushed
    assert generation_of(tmp_path) == 1


def test_no_payload_is_removed_while_the_manifest_cannot_be_read(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, **generation(1))

    def unreadable(path, mode):
        if mode == "rb":
            raise OSError(errno.EIO, "Input/output error")
        return open(path, mode)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "open", unreadable, raising=False)
        save_checkpoint(tmp_path, **generation(2))
    assert generation_of(tmp_path) == 2
    assert len(payloads(tmp_path)) == 4
    save_checkpoint(tmp_path, **generation(3))
    assert len(payloads(tmp_path)) == 2


def test_a_real_file_size_limit_leaves_the_old_checkpoint(tmp_path):
    save_checkpoint(tmp_path, **generation(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_checkpoint(tmp_path, **generation(2, size=100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert generation_of(tmp_path) == 1
    assert not leftovers(tmp_path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_everything_is_flushed_before_anything_depends_on_it(tmp_path):
    save_checkpoint(tmp_path, **generation(1))
    with FileSystem() as system:
        save_checkpoint(tmp_path, **generation(2))
    log = [(name, str(args[0])) for name, *args in system.calls]
    renames = [i for i, (name, _) in enumerate(log) if name == "replace"]
    flushes = [i for i, call in enumerate(log) if call == ("fsync", str(tmp_path))]
    removals = [i for i, (name, _) in enumerate(log) if name == "unlink"]
    assert (len(renames), len(flushes), len(removals)) == (3, 2, 2)
    for i in renames:
        source = log[i][1]
        assert log.index(("write", source)) < log.index(("fsync", source)) < i
    *of_payloads, of_manifest = renames
    assert max(of_payloads) < flushes[0] < log.index(("create", log[of_manifest][1]))
    assert of_manifest < flushes[1] < min(removals)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_new_directories_are_flushed_into_their_parents(tmp_path):
    with FileSystem() as system:
        save_checkpoint(tmp_path / "a" / "b", **generation(1))
    flushed = {args[0] for name, *args in system.calls if name == "fsync"}
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= flushed


def test_leftovers_of_killed_saves_are_removed_by_the_next(tmp_path):
    for name in [
        f"manifest.json.{'a' * 32}.tmp",
        f"memory-{'b' * 16}.safetensors.{'c' * 32}.tmp",
        f"gone-{'d' * 16}.safetensors",
    ]:
        (tmp_path / name).write_bytes(b"half")
    save_checkpoint(tmp_path, **generation(1))
    assert not leftovers(tmp_path)


def test_a_file_that_cannot_be_removed_does_not_fail_the_save(tmp_path):
    (tmp_path / f"gone-{'d' * 16}.safetensors").mkdir()
    save_checkpoint(tmp_path, **generation(1))
    assert generation_of(tmp_path) == 1


@pytest.mark.heavy
def test_a_save_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(checkpoint.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout)
    assert counts["at every call"] >= 15
    assert counts["at random"] == 40
    assert counts["left something behind"] >= 5  # the kills did come in the midst of saves


def forked(body, *args):
    """Run ``body`` in a child that ends without any of this process's clean-up."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        body(*args)
    except BaseException as error:
        print(f"child: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_every_call(directory):
    def save(at, number):
        with FileSystem(at, kill_self):
            save_checkpoint(directory, **generation(number, size=50_000))

    for at in range(1, 100):
        save_checkpoint(directory, **generation(2 * at))
        assert not leftovers(directory)
        _, status = os.waitpid(forked(save, at, 2 * at + 1), 0)
        assert generation_of(directory) in ((2 * at, 2 * at + 1) if status else (2 * at + 1,))
        if status == 0:
            return at - 1
        assert os.WTERMSIG(status) == signal.SIGKILL
    raise AssertionError("the save never came to its end")


def save_for_ever(directory, number, announce):
    while True:
        save_checkpoint(directory, **generation(number, size=100_000))
        os.write(announce, b"%d\n" % number)
        number += 1


def kill_at_random(directory, times):
    dirty, number = 0, 0
    for _ in range(times):
        reader, writer = os.pipe()
        child = forked(save_for_ever, directory, number + 1, writer)
        os.close(writer)
        time.sleep(random.uniform(0.0, 0.12))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        with os.fdopen(reader) as announced:
            finished = [int(line) for line in announced]
        if number or finished or (directory / "manifest.json").exists():
            newest = max([number, *finished])
            number = generation_of(directory)
            assert newest <= number <= newest + 1
        dirty += directory.exists() and bool(leftovers(directory))
    save_checkpoint(directory, **generation(number + 1))
    assert not leftovers(directory)
    return dirty


def save_from_many_processes(directory):
    def save(first):
        for number in range(first, first + 15):
            save_checkpoint(directory, **generation(number))

    save_checkpoint(directory, **generation(0))
    children = [forked(save, 100 * i) for i in range(1, 4)]
    while children:
        generation_of(directory)
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            assert status == 0
            children.remove(child)
    assert generation_of(directory) in (114, 214, 314)
    assert not leftovers(directory)


def main(directory):
    torch.set_num_threads(1)  # no thread pool, which a fork would break
    counts = {"at every call": kill_at_every_call(directory / "every"), "at random": 40}
    counts["left something behind"] = kill_at_random(directory / "random", counts["at random"])
    save_from_many_processes(directory / "many")
    print(json.dumps(counts))


# Saves and loads at the same time


def test_saves_wait_for_the_lock(tmp_path):
    save_checkpoint(tmp_path, **generation(1))
    saver = threading.Thread(target=save_checkpoint, args=[tmp_path], kwargs=generation(2))
    with open(tmp_path / ".lock", "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        saver.start()
        saver.join(0.2)
        assert saver.is_alive()
        assert generation_of(tmp_path) == 1  # loads do not wait
        assert not leftovers(tmp_path)
    saver.join(10)
    assert generation_of(tmp_path) == 2


def test_a_file_system_without_locks_still_saves(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    save_checkpoint(tmp_path, **generation(1))
    assert generation_of(tmp_path) == 1


def test_the_lock_is_free_after_a_save_even_if_a_fork_inherited_it(tmp_path, monkeypatch):
    flock, inherited = fcntl.flock, []

    def lock_and_fork(descriptor, operation):
        flock(descriptor, operation)
        if not inherited:
            inherited.append(os.dup(descriptor))  # what a fork does to an open file

    monkeypatch.setattr(fcntl, "flock", lock_and_fork)
    save_checkpoint(tmp_path, **generation(1))
    with open(tmp_path / ".lock", "r+b") as lock:
        flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(inherited[0])


@pytest.mark.parametrize("again", [2, 1])
def test_a_load_overtaken_by_saves_reads_the_newer_checkpoint(tmp_path, monkeypatch, again):
    save_checkpoint(tmp_path, **generation(1))
    read, reads = checkpoint._read_manifest, []

    def overtaken(root):
        manifest = read(root)
        reads.append(manifest)
        if len(reads) == 1:
            monkeypatch.setattr(checkpoint, "_read_manifest", read)
            save_checkpoint(tmp_path, **generation(2))
            monkeypatch.setattr(checkpoint, "_read_manifest", overtaken)
        return manifest

    def pause(seconds):  # the manifest may even become the very one whose payloads had vanished
        if again == 1:
            save_checkpoint(tmp_path, **generation(1))

    monkeypatch.setattr(checkpoint, "_read_manifest", overtaken)
    monkeypatch.setattr(checkpoint.time, "sleep", pause)
    assert generation_of(tmp_path) == again
    assert len(reads) >= 2


def test_a_payload_removed_after_it_was_opened_is_still_read(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, **generation(1))
    read, saved = checkpoint._read_payload, []

    def overtaken(*args):
        if not saved:
            saved.append(True)
            save_checkpoint(tmp_path, **generation(2))
        return read(*args)

    monkeypatch.setattr(checkpoint, "_read_payload", overtaken)
    assert generation_of(tmp_path) == 1
    assert generation_of(tmp_path) == 2


@pytest.mark.heavy
def test_threads_that_save_and_load_at_once_see_only_whole_checkpoints(tmp_path):
    save_checkpoint(tmp_path, **generation(0))
    failures, loads, finished = [], [], threading.Event()

    def save(first):
        try:
            for number in range(first, first + 15):
                save_checkpoint(tmp_path, **generation(number))
        except BaseException as error:
            failures.append(error)

    def load():
        try:
            while not finished.is_set():
                loads.append(generation_of(tmp_path))
        except BaseException as error:
            failures.append(error)

    savers = [threading.Thread(target=save, args=[100 * i]) for i in range(1, 4)]
    loaders = [threading.Thread(target=load) for _ in range(2)]
    for thread in savers + loaders:
        thread.start()
    for thread in savers:
        thread.join()
    finished.set()
    for thread in loaders:
        thread.join()
    assert failures == []
    assert len(set(loads)) > 5
    assert generation_of(tmp_path) in (114, 214, 314)
    assert not leftovers(tmp_path)


# Earlier versions


EARLIER = Path(__file__).with_name("files") / "earlier-checkpoint"


def test_a_checkpoint_of_an_earlier_version_answers_as_it_did(tmp_path):
    """Written when modules had other names; see `git log` of the file."""
    told = json.loads(EARLIER.with_suffix(".json").read_text("utf-8"))
    shutil.copytree(EARLIER, tmp_path / "run")
    head = torch.nn.Linear(6, 4)
    head.load_state_dict({name: torch.tensor(value) for name, value in told["head"].items()})
    model = mbpa.MbPA.load(tmp_path / "run", head=head)
    found = model(torch.tensor(told["queries"]))
    torch.testing.assert_close(found, torch.tensor(told["log_probs"]), rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
