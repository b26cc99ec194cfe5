"""Targets that read files: checkpoints, pictures, spreadsheets and the description of a run."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reliability.fuzzing.engine import Check, Target, summarise_message
from reliability.fuzzing.mutators import (
    JSON_TOKENS,
    join_chunks,
    make_part_mutator,
    mutate_csv,
    mutate_json,
    mutate_json_line,
    mutate_png,
    mutate_safetensors,
    pack_parts,
    unpack_parts,
)
from reliability.trial import BrokenPromiseError

# Twice a picture of the maximum number of pixels, at four bytes per pixel, and some room.
PICTURE_MEMORY_BYTES = 512 << 20
RIGHT_PAYLOADS, RIGHT_MANIFEST = 1, 2  # bits of a checkpoint case: checksums to recompute
MANIFEST = "manifest.json"
SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "F16": 2, "BF16": 2, "I32": 4, "F32": 4}
SIZES |= {"F64": 8, "I64": 8}


# Checkpoints: a case is one byte of bits, the manifest, and the payloads in the order of the names


def make_checkpoint_seeds() -> list[bytes]:
    """Return a small checkpoint with each choice of checksums to recompute."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_checkpoint(root)
        manifest = (root / MANIFEST).read_bytes()
        payloads = [(root / name).read_bytes() for name in list_payloads(manifest)]
    return [pack_parts([bytes([bits]), manifest, *payloads]) for bits in range(4)]


def write_checkpoint(root: Path) -> None:
    """Save a small model with a memory and a grown head by `MbPA.save`."""
    import torch

    import mbpa

    torch.manual_seed(0)
    model = mbpa.MbPA(
        head=torch.nn.Linear(4, 2),
        memory=mbpa.ExactMemory(capacity=8, key_dim=4),
        predictor=mbpa.Adapted(mbpa.Gradient(lr=1.0, steps=2), k=3),
    )
    model.grow(3)
    model.write(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))
    model.save(root)


def list_payloads(manifest: bytes) -> list[str]:
    """Return the names of the payloads in the order of the manifest."""
    return [entry["name"] for entry in json.loads(manifest)["files"].values()]


@contextlib.contextmanager
def open_checkpoint(directory: Path) -> Iterator[Check]:
    from mbpa.checkpoint import load_checkpoint
    from mbpa.errors import CheckpointError

    root = directory / "checkpoint"
    root.mkdir()
    write_checkpoint(root)
    expected = load_checkpoint(root)
    names = list_payloads((root / MANIFEST).read_bytes())

    def check(data: bytes) -> str:
        bits, manifest, *payloads = [*unpack_parts(data), b"", b"", b"", b""][:4]
        is_right = (bits or b"\0")[0]
        for path in root.glob("*.safetensors"):
            path.unlink()
        files = dict(zip(names, payloads, strict=True))
        if is_right & RIGHT_PAYLOADS:
            manifest, files = name_payloads(manifest, payloads, files)
        if is_right & RIGHT_MANIFEST:
            manifest = sign_manifest(manifest)
        (root / MANIFEST).write_bytes(manifest)
        for name, payload in files.items():
            (root / name).write_bytes(payload)
        try:
            found = load_checkpoint(root)
        except CheckpointError as error:
            return summarise_message(str(error))
        text = json.loads(manifest)
        if found.description != text["description"]:
            raise BrokenPromiseError("the description is not the manifest's")
        for group, entry in text["files"].items():
            compare_tensors(found.tensors[group], files[entry["name"]])
        if not is_right and not is_equal_checkpoint(found, expected):
            raise BrokenPromiseError("a damaged checkpoint was read as another one")
        return "read"

    yield check


def name_payloads(
    manifest: bytes, payloads: Sequence[bytes], files: dict[str, bytes]
) -> tuple[bytes, dict[str, bytes]]:
    """Return the manifest with a correct entry for each payload, and the payloads by name."""
    try:
        content = json.loads(manifest)
        groups = list(content["files"])
        named = {}
        for group, payload in zip(groups, payloads, strict=False):
            digest = hashlib.sha256(payload).hexdigest()
            name = f"{group}-{digest[:16]}.safetensors"
            if "/" in name or "\0" in name or len(name.encode()) > 200:
                continue
            content["files"][group] = {"name": name, "bytes": len(payload), "sha256": digest}
            named[name] = payload
        return json.dumps(content).encode(), named
    except (ValueError, LookupError, TypeError, RecursionError):
        return manifest, files


def sign_manifest(manifest: bytes) -> bytes:
    """Return the manifest with its correct checksum, as documented in `mbpa.checkpoint`."""
    try:
        content = json.loads(manifest)
        body = {key: value for key, value in content.items() if key != "sha256"}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()
        return json.dumps({**body, "sha256": digest}).encode()
    except (ValueError, AttributeError, TypeError, RecursionError):
        return manifest


def compare_tensors(named: dict[str, Any], payload: bytes) -> None:
    """Compare tensors with what our own reader of safetensors finds in the payload."""
    size = int.from_bytes(payload[:8], "little")
    header = json.loads(payload[8 : 8 + size])
    header.pop("__metadata__", None)
    if list(named) != sorted(header):
        raise BrokenPromiseError(f"tensors are {list(named)}, the header has {sorted(header)}")
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        tensor = named[name]
        if list(tensor.shape) != entry["shape"]:
            raise BrokenPromiseError(f"{name} has another shape than its header says")
        if stop - start != math.prod(entry["shape"]) * SIZES.get(entry["dtype"], -1):
            raise BrokenPromiseError(f"{name} has another size than its header says")
        if read_bytes(tensor) != payload[8 + size + start : 8 + size + stop]:
            raise BrokenPromiseError(f"{name} has other bytes than the file")


def read_bytes(tensor: Any) -> bytes:
    """Return the bytes of a tensor on the CPU."""
    import torch

    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())


def is_equal_checkpoint(found: Any, expected: Any) -> bool:
    """Return whether two loaded checkpoints have the same description and tensors, to the bit."""
    return bool(found.description == expected.description) and flatten_tensors(
        found
    ) == flatten_tensors(expected)


def flatten_tensors(checkpoint: Any) -> dict[tuple[str, str], tuple[str, tuple[int, ...], bytes]]:
    """Return the dtype, shape and bytes of each tensor by group and name."""
    return {
        (group, name): (str(tensor.dtype), tuple(tensor.shape), read_bytes(tensor))
        for group, named in checkpoint.tensors.items()
        for name, tensor in named.items()
    }


# Pictures


def make_picture_seeds() -> list[bytes]:
    """Return small pictures in every format and many modes."""
    from PIL import Image

    seeds = []
    shades = bytes(range(0, 240, 2))  # 12 × 10 pixels
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        picture = Image.frombytes("L", (12, 10), shades).convert("L")
        picture = picture.convert("I").convert(mode) if mode == "I;16" else picture.convert(mode)
        seeds.append(encode_picture(picture, "PNG"))
    plain = Image.frombytes("L", (12, 10), shades)
    coloured, clear = plain.convert("RGB"), plain.convert("RGBA")
    exif = Image.Exif()
    exif[274] = 6  # orientation
    seeds += [
        encode_picture(coloured, "JPEG", quality=50),
        encode_picture(coloured, "JPEG", quality=50, exif=exif.tobytes()),
        encode_picture(coloured, "JPEG", progressive=True),
        encode_picture(coloured.convert("CMYK"), "JPEG", quality=50),
        encode_picture(coloured, "PNG", exif=exif.tobytes()),
        encode_picture(plain.convert("P"), "PNG", transparency=3),
        encode_picture(plain.convert("P"), "GIF", transparency=3),
        encode_picture(coloured.convert("P"), "GIF", save_all=True, append_images=[clear]),
        encode_picture(coloured, "BMP"),
        encode_picture(plain.convert("1"), "BMP"),
        encode_picture(coloured, "WEBP", quality=50),
        encode_picture(clear, "WEBP", lossless=True),
        encode_picture(coloured.resize((600, 20)), "PNG"),
    ]
    return seeds


def make_large_picture_seeds() -> list[bytes]:
    """Return pictures with nearly the maximum number of pixels, in extreme shapes.

    They are blank and so have few bytes. The cost of a picture must not depend on its shape.
    """
    return [
        make_blank_png(width, height, colour_type=colour_type, depth=depth)
        for width, height in ((5600, 5700), (1, 31_999_999), (31_999_999, 1), (100, 319_999))
        for colour_type, depth in ((6, 8), (0, 16))
    ]


def make_blank_png(width: int, height: int, *, colour_type: int, depth: int) -> bytes:
    """Return a PNG file of zeros; colour types are those of the PNG specification."""
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour_type]
    row_bytes = 1 + width * channels * depth // 8
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    pixels = zlib.compress(bytes(height * row_bytes), 9)
    return join_chunks([(b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")])


def encode_picture(picture: Any, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


@contextlib.contextmanager
def open_picture(directory: Path) -> Iterator[Check]:
    import warnings

    from mbpa.encoders.pictures import PictureError, count_pixels, make_thumbnail, standardize

    def check(data: bytes) -> str:
        pixels = count_pixels(data)
        if not isinstance(pixels, int) or pixels < 0:
            raise BrokenPromiseError(f"count_pixels must return a count, got {pixels!r}")
        try:
            picture = standardize(data)
        except PictureError as error:
            return summarise_message(str(error))
        size = check_kept(picture, most_side=512)
        check_kept(make_thumbnail(picture), most_side=96)
        if size != check_kept(standardize(picture), most_side=512):
            raise BrokenPromiseError(
                "a standardized picture has another size when it is read again"
            )
        return "kept"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about odd files
        yield check


def check_kept(picture: bytes, *, most_side: int) -> tuple[int, int]:
    """Raise unless a run may store the file; return its width and height."""
    from PIL import Image

    from mbpa.serve.input_checks import check_picture

    check_picture(picture)
    with Image.open(io.BytesIO(picture), formats=("PNG", "JPEG")) as opened:
        opened.load()
        size: tuple[int, int] = opened.size
        if opened.mode not in ("L", "RGB") or not 1 <= min(size) <= max(size) <= most_side:
            raise BrokenPromiseError(f"a standardized picture is {opened.mode}, {size}")
    return size


# Spreadsheets


def make_csv_seeds() -> list[bytes]:
    return [
        b"text,label\none pizza,order\nwhere is it,status\n",
        b'text;label\r\n"one; two";a\r\n"three ""four""";b\r\n',
        b"label\ttext\na\tx y\n\nb\tz\n",
        'text,label\n"two\nlines",é\nmore,ü\n'.encode(),
        "text,label\na,1\nb,2\n".encode("utf-16"),
        b"\xef\xbb\xbftext,kind\na,x\na,y\na,x\n",
        b"id,text,label\n1,a,x\n2,b,y\n",
    ]


def make_jsonl_seeds() -> list[bytes]:
    return [
        b'{"text": "one pizza", "label": "order"}\n{"text": "where", "label": "status"}\n',
        b'{"text": "a", "label": 1}\n\n{"text": "b", "label": 2}\n',
        b'{"text": "a", "kind": "x"}\r\n{"text": "b", "kind": "y", "other": [1, null]}',
        b'{"text": "\\u00e9", "label": "x"}\n{"text": null, "label": null}\n'
        b'{"text": "b", "label": "y"}\n',
    ]


def make_spreadsheet_opening(name: str) -> Any:
    """Return a function that opens the check of a file of this name; the suffix sets its format."""

    @contextlib.contextmanager
    def open_spreadsheet(directory: Path) -> Iterator[Check]:
        from mbpa.errors import RunError
        from mbpa.serve.input_checks import check_label, check_text
        from mbpa.serve.labelled_texts import read_labelled_texts

        path = directory / name

        def check(data: bytes) -> str:
            path.write_bytes(data)
            try:
                sheet = read_labelled_texts(path)
            except RunError as error:
                if name not in str(error):
                    raise BrokenPromiseError(f"an error must name the file: {error}") from error
                return summarise_message(str(error))
            if not len(sheet.texts) == len(sheet.labels) <= sheet.rows:
                raise BrokenPromiseError("texts, labels and rows do not match")
            for text, label in zip(sheet.texts, sheet.labels, strict=True):
                if type(text) is not str or type(label) is not str:
                    raise BrokenPromiseError("texts and labels must be strings")
                check_text(text)
                check_label(label)
                (text + label).encode()
            return "read"

        yield check

    return open_spreadsheet


# The description of a run


def make_run_seeds() -> list[bytes]:
    plain = {
        "format": 1,
        "mbpa": "0.1",
        "key_dim": 4,
        "labels": ["a", "b"],
        "trained_examples": 3,
        "threshold": 0.5,
        "encoder": None,
        "fingerprint": None,
        "summary": None,
    }
    pictures = {"format": 2, "takes": "images", "encoder": "edges", "fingerprint": "0f" * 32}
    rows = {"format": 3, "summary": {"accuracy": 0.9, "seeds": [1, 2]}, "takes": "texts"}
    return [json.dumps({**plain, **more}, indent=1).encode() for more in ({}, pictures, rows)]


@contextlib.contextmanager
def open_run(directory: Path) -> Iterator[Check]:
    from mbpa.errors import RunError
    from mbpa.serve.run_info import RunInfo

    path = directory / "run.json"

    def check(data: bytes) -> str:
        path.write_bytes(data)
        try:
            info = RunInfo.read(directory)
        except RunError as error:
            return summarise_message(str(error))
        wrong = list_wrong_fields(info)
        if wrong:
            raise BrokenPromiseError(f"read with a wrong {wrong[0]}")
        return "read"

    yield check


def list_wrong_fields(info: Any) -> list[str]:
    """Return the fields of a `RunInfo` whose values are not of the documented type or range."""
    is_count = {name: type(getattr(info, name)) is int for name in ("key_dim", "trained_examples")}
    labels, threshold = info.labels, info.threshold
    right = {
        "key_dim": is_count["key_dim"] and info.key_dim > 0,
        "labels": isinstance(labels, tuple) and all(type(label) is str for label in labels),
        "trained_examples": is_count["trained_examples"] and info.trained_examples >= 0,
        "threshold": type(threshold) in (int, float) and 0 <= threshold <= 1,
        "encoder": info.encoder is None or type(info.encoder) is str,
        "fingerprint": info.fingerprint is None or type(info.fingerprint) is str,
        "summary": info.summary is None or type(info.summary) is dict,
        "takes": info.takes in ("texts", "images"),
    }
    return [name for name, is_right in right.items() if not is_right]


CSV_TOKENS = (
    *(b",", b";", b"\t", b'"', b'""', b"\n", b"\r", b"\r\n", b"\0", b"text", b"label", b"\xff\xfe"),
    *(
        b"\xfe\xff",
        b"\xef\xbb\xbf",
        b"PK\x03\x04",
        b"\xd0\xcf\x11\xe0",
        b"\xc2\x85",
        b"\xe2\x80\xa8",
    ),
    *(b"\xed\xa0\x80", b"x" * 10_001, b"y" * 201, b'"' + b"z" * 70_000, b"," * 2_000, b" ", b"1"),
)
PICTURE_TOKENS = (
    *(b"\x89PNG\r\n\x1a\n", b"IHDR", b"IDAT", b"PLTE", b"tRNS", b"eXIf", b"iCCP", b"acTL", b"IEND"),
    *(b"\xff\xd8", b"\xff\xd9", b"\xff\xe1", b"\xff\xc0", b"\xff\xc2", b"\xff\xda", b"\xff\xdb"),
    *(b"Exif\0\0", b"II*\0", b"MM\0*", b"GIF89a", b"GIF87a", b"\x2c", b"\x21\xf9\x04", b"\x3b"),
    *(b"BM", b"RIFF", b"WEBP", b"VP8 ", b"VP8L", b"VP8X", b"ALPH", b"ANIM", b"ANMF"),
    *(struct.pack(">I", 0x7FFFFFFF), struct.pack("<I", 0x7FFFFFFF), struct.pack("<i", -1)),
)
CHECKPOINT_TOKENS = (
    *JSON_TOKENS[:8],
    *(b'"F32"', b'"BF16"', b'"F8_E4M3"', b'"C64"', b'"shape":[0]', b"__metadata__", b"../../x"),
)
_parts = make_part_mutator([[], [mutate_json], [mutate_safetensors]])

CHECKPOINT = Target(
    name="checkpoint",
    seeds=make_checkpoint_seeds,
    open=open_checkpoint,
    traced=("mbpa/checkpoint.py", "safetensors/"),
    tokens=CHECKPOINT_TOKENS,
    mutators=(_parts,),
    structured_share=0.95,  # other mutations break the lengths of the parts
)
PICTURE = Target(
    name="picture",
    seeds=lambda: [*make_picture_seeds(), *make_large_picture_seeds()],
    open=open_picture,
    traced=("mbpa/encoders/image.py", "mbpa/serve/answers.py", "/PIL/"),
    tokens=PICTURE_TOKENS,
    mutators=(mutate_png,),
    memory_bytes=PICTURE_MEMORY_BYTES,
)
CSV = Target(
    name="csv",
    seeds=make_csv_seeds,
    open=make_spreadsheet_opening("sheet.csv"),
    traced=("mbpa/serve/labelled_texts.py", "mbpa/serve/answers.py"),
    tokens=CSV_TOKENS,
    mutators=(mutate_csv,),
)
JSONL = Target(
    name="jsonl",
    seeds=make_jsonl_seeds,
    open=make_spreadsheet_opening("sheet.jsonl"),
    traced=("mbpa/serve/labelled_texts.py", "mbpa/serve/answers.py"),
    tokens=(*JSON_TOKENS, b"\n", b"text", b"label"),
    mutators=(mutate_json_line,),
)
RUN = Target(
    name="run",
    seeds=make_run_seeds,
    open=open_run,
    traced=("mbpa/serve/run_info.py",),
    tokens=JSON_TOKENS,
    mutators=(mutate_json,),
)
FILE_TARGETS = (CHECKPOINT, PICTURE, CSV, JSONL, RUN)
