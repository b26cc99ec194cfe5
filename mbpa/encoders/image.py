"""Image encoders, which turn pictures into keys of unit norm.

They take files in the form that `mbpa.encoders.pictures.standardize` returns. Needs the extra
`images`, and for models of Hugging Face the extra `text`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mbpa.encoders.base import (
    Encoder,
    compute_fingerprint,
)
from mbpa.encoders.pictures import encode_file, import_pillow, read_rgb
from mbpa.encoders.pictures import standardize as kept  # its earlier name
from mbpa.hugging_face import find_model, hide_progress_bars, import_transformers

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["DEFAULT_ENCODER", "Edges", "ImageEncoder", "encoder", "kept"]

DEFAULT_ENCODER = "edges"
"""Name of the default encoder, which needs no weights. It is good for digits, signs and icons, but
only a baseline for photographs."""
MAX_SIDE_RATIO = 4  # of a model's input
PICTURES_PER_BATCH = 32


class ImageEncoder(Encoder[bytes]):
    """An encoder of standardized picture files. To write your own, define `__call__`."""

    takes = "images"


def encoder(name: str = DEFAULT_ENCODER, *, device: str | torch.device = "cpu") -> ImageEncoder:
    """Return the encoder of this name.

    Args:
        name: "edges", a directory with a vision model in Hugging Face's format, or the name of such
            a model in Hugging Face's cache.
        device: device on which a model runs; "edges" always uses the CPU.

    Raises:
        MissingExtraError: Pillow is not installed, or transformers for a model.
        ValueError: there is no such encoder on this machine, or it does not take pictures.
    """
    import_pillow()
    if name == DEFAULT_ENCODER:
        return Edges()
    try:
        directory = find_model(name, extra="text")
    except ValueError as error:
        raise ValueError(f"the encoder must be {DEFAULT_ENCODER!r}, {error}") from error
    return _VisionModel(name, directory, torch.device(device))


class Edges(ImageEncoder):
    """Amounts of edges by direction and place, and coarse colours.

    Histograms of oriented gradients (Dalal and Triggs 2005) of the picture resized to a square. The
    places overlap, so that strokes may move a little, and overall brightness does not matter. The
    last number is constant, so that the key of a blank picture has a direction, too.
    """

    name = DEFAULT_ENCODER
    side, places, directions = 32, 8, 8
    key_dim = places**2 * (directions + 2) + 1
    blank = 0.01

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the version of this encoder."""
        return hashlib.sha256(b"edges 1").hexdigest()

    def __call__(self, pictures: Sequence[bytes], /) -> Float[Tensor, "B D"]:
        keys = torch.empty(len(pictures), self.key_dim)
        for key, picture in zip(keys, pictures, strict=True):
            light, *colours = read_rgb(picture).convert("YCbCr").split()
            parts = [self._edges(light), *map(self._colour, colours), np.array([self.blank])]
            key.copy_(torch.from_numpy(np.concatenate(parts)))
        return torch.nn.functional.normalize(keys, dim=1)

    def _edges(self, light: Image.Image) -> Float[np.ndarray, "E"]:
        down, right = np.gradient(np.asarray(light.resize((self.side, self.side)), float) / 255)
        turn = np.arctan2(down, right) / (2 * np.pi) * self.directions
        lower = np.floor(turn)
        row, column = np.indices(turn.shape)
        found = np.zeros((self.directions, self.side, self.side))
        for direction, share in ((lower, 1 + lower - turn), (lower + 1, turn - lower)):
            which = direction.astype(int) % self.directions
            found[which, row, column] += share * np.hypot(down, right)
        # A place extends to the middle of the next one, with linearly decreasing weight.
        middles = (np.arange(self.places) + 0.5) * self.side / self.places - 0.5
        away = np.abs(np.arange(self.side) - middles[:, None]) * self.places / self.side
        near = np.maximum(0, 1 - away)
        sums = np.einsum("dij,pi,qj->dpq", found, near, near).flatten()
        edges: np.ndarray = np.sqrt(sums / (1 + sums.sum()))
        return edges

    def _colour(self, band: Image.Image) -> Float[np.ndarray, "C"]:
        small = np.asarray(band.resize((self.places, self.places)), float)
        return (small.flatten() - 128) / 255


def _pad_strip(picture: Image.Image) -> Image.Image:
    """Pad a picture with white so that its sides have a ratio of at most `MAX_SIDE_RATIO`.

    Models scale the shorter side to a fixed size, which would turn a strip one pixel wide into a
    hundred megabytes.
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
