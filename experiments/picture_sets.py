"""Pictures that a network is trained on or evaluated on: bytes on its device, or files.

`Held` keeps small pictures on the network's device. `Streamed` is for sets that are too large:
worker processes read and crop pictures as they are needed. The random numbers of a batch do not
depend on how many processes share it: each process draws for the whole batch and uses its part.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional

from experiments.data.pictures import ImageFiles, cores

STREAMED_PER_BATCH = 250  # streamed pictures per batch in evaluation; workers hold many batches


@dataclass(frozen=True)
class Share:
    """The part of every batch that one of several processes takes."""

    rank: int = 0
    count: int = 1
    """Number of processes, which must divide a batch evenly."""

    def part(self, batch: Tensor) -> Tensor:
        """Return this process's rows of a batch."""
        return batch.chunk(self.count)[self.rank]


WHOLE = Share()


class Pictures(abc.ABC):
    """Pictures of one size, and their labels."""

    labels: Int[Tensor, "N"]
    """Labels, on the device that pictures are delivered to."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Height and width of the pictures in pixels."""

    @abc.abstractmethod
    def select(self, rows: Int[Tensor, "n"]) -> Self:
        """Return the pictures at `rows`."""

    @abc.abstractmethod
    def to(self, device: torch.device) -> Self:
        """Return the same pictures, delivered to another device."""

    @abc.abstractmethod
    def in_order(self, most: int) -> Iterator[UInt8[Tensor, "B 3 H W"]]:
        """Yield all pictures unchanged, at most `most` at a time."""

    @abc.abstractmethod
    def augment(
        self,
        order: Int[Tensor, "n"],
        batch: int,
        draws: torch.Generator,
        *,
        padding: int,
        smallest_crop: float,
        size: int,
        share: Share = WHOLE,
    ) -> Iterator[tuple[UInt8[Tensor, "b 3 H W"], Int[Tensor, "b"]]]:
        """Yield a share of each batch, with its labels; pictures are cropped and randomly mirrored.

        Args:
            order: rows, on the CPU; their number is a multiple of `batch`.
            padding: maximum shift in pixels of held pictures that are not cropped.
            smallest_crop: minimum share of a picture's area that is seen.
            size: side of the crops in pixels; held pictures that are not cropped keep theirs.
        """

    def with_labels(self, labels: Int[Tensor, "N"]) -> Self:
        """Return the same pictures with other labels."""
        return replace(self, labels=labels)  # type: ignore[type-var]  # both kinds are dataclasses

    def of_classes(self, classes: Int[Tensor, "C"]) -> Self:
        """Return the pictures of some classes, labelled by their index among these."""
        labels = index_labels(self.labels, classes)
        rows = (labels >= 0).nonzero()[:, 0]
        return self.select(rows).with_labels(labels[rows])


def index_labels(labels: Int[Tensor, "N"], classes: Int[Tensor, "C"]) -> Int[Tensor, "N"]:
    """Return the index of each label among the classes; -1 if it is none of them."""
    highest = int(torch.maximum(labels.max(), classes.max()))
    place = torch.full((highest + 1,), -1, device=labels.device)
    place[classes] = torch.arange(len(classes), device=labels.device)
    return place[labels]


@dataclass(frozen=True, eq=False)
class Held(Pictures):
    """Pictures held on the device."""

    images: UInt8[Tensor, "N 3 H W"]
    labels: Int[Tensor, "N"]

    @property
    def size(self) -> int:
        return self.images.shape[-1]

    def select(self, rows: Int[Tensor, "n"]) -> Held:
        rows = rows.to(self.labels.device)
        return Held(self.images[rows], self.labels[rows])

    def to(self, device: torch.device) -> Held:
        return Held(self.images.to(device), self.labels.to(device))

    def in_order(self, most: int) -> Iterator[UInt8[Tensor, "B 3 H W"]]:
        return iter(self.images.split(most))

    def enlarge(self, size: int) -> Held:
        """Return the pictures interpolated to this size; unchanged if they are not smaller."""
        if size <= self.size:
            return self
        parts = [
            functional.interpolate(part.float(), size=(size, size), mode="bilinear").round().byte()
            for part in self.images.split(1000)
        ]
        return Held(torch.cat(parts), self.labels)

    def augment(
        self,
        order: Int[Tensor, "n"],
        batch: int,
        draws: torch.Generator,
        *,
        padding: int,
        smallest_crop: float,
        size: int,
        share: Share = WHOLE,
    ) -> Iterator[tuple[UInt8[Tensor, "b 3 H W"], Int[Tensor, "b"]]]:
        for rows in order.to(self.labels.device).split(batch):
            mine = share.part(rows)
            found = self.images[mine]
            if smallest_crop < 1:
                found = crop(found, smallest_crop, size, draws, share)
            else:
                found = shift(found, padding, draws, share)
            yield found, self.labels[mine]


@dataclass(frozen=True, eq=False)
class Streamed(Pictures):
    """Pictures in files."""

    files: ImageFiles
    labels: Int[Tensor, "N"]
    pixels: int

    @property
    def size(self) -> int:
        return self.pixels

    def select(self, rows: Int[Tensor, "n"]) -> Streamed:
        return replace(
            self, files=self.files.select(rows), labels=self.labels[rows.to(self.labels.device)]
        )

    def to(self, device: torch.device) -> Streamed:
        return replace(self, labels=self.labels.to(device))

    def in_order(self, most: int) -> Iterator[UInt8[Tensor, "B 3 H W"]]:
        batches = torch.arange(len(self.labels)).split(min(most, STREAMED_PER_BATCH))
        wanted = ((rows, None) for rows in batches)
        for images in self.files.stream(wanted, self.pixels, pin=self.labels.is_cuda):
            yield self._receive(images)

    def augment(
        self,
        order: Int[Tensor, "n"],
        batch: int,
        draws: torch.Generator,
        *,
        padding: int,
        smallest_crop: float,
        size: int,
        share: Share = WHOLE,
    ) -> Iterator[tuple[UInt8[Tensor, "b 3 H W"], Int[Tensor, "b"]]]:
        crops = torch.rand(len(order), 4, generator=draws)
        crops[:, 0] = smallest_crop + (1 - smallest_crop) * crops[:, 0]
        flips = torch.rand(len(order), generator=draws) < 0.5
        rows, crops, flips = (
            torch.cat([share.part(part) for part in whole.split(batch)])
            for whole in (order, crops, flips)
        )
        batch //= share.count
        labels, flips = self.labels[rows.to(self.labels.device)], flips.to(self.labels.device)
        wanted = zip(rows.split(batch), crops.split(batch), strict=True)
        processes = max(1, cores() // share.count)
        arriving = self.files.stream(wanted, size, processes, pin=self.labels.is_cuda)
        for images, known, mirrored in zip(
            arriving, labels.split(batch), flips.split(batch), strict=True
        ):
            found = self._receive(images)
            yield torch.where(mirrored[:, None, None, None], found.flip(3), found), known

    def _receive(self, images: UInt8[Tensor, "B H W 3"]) -> UInt8[Tensor, "B 3 H W"]:
        """Move pictures to the device; the result is a view whose channels come last in memory."""
        return images.to(self.labels.device, non_blocking=True).permute(0, 3, 1, 2)


def normalise(images: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, "B 3 H W"]:
    """Scale pixels to numbers around zero, of order one."""
    return (images.float() - 117.0) / 66.0


def shift(
    images: UInt8[Tensor, "b 3 H W"], padding: int, draws: torch.Generator, share: Share = WHOLE
) -> UInt8[Tensor, "b 3 H W"]:
    """Shift each image by up to `padding` pixels in each direction, reflecting its edges, and
    mirror half of them.

    Args:
        images: this share of a batch.
    """
    count, (height, width), device = len(images) * share.count, images.shape[2:], images.device
    drawn = torch.randint(2 * padding + 1, (2, count, 1), generator=draws)
    mirrored = torch.randint(2, (1, count, 1), generator=draws)
    all_drawn = torch.cat((drawn, mirrored)).transpose(0, 1)  # one tensor, one copy
    down, right, mirrored = _send(share.part(all_drawn), device).unbind(1)
    rows = down + torch.arange(height, device=device)
    columns = torch.arange(width, device=device)
    columns = right + torch.where(mirrored == 1, columns.flip(0), columns)
    padded = functional.pad(images.float(), (padding,) * 4, mode="reflect").to(images.dtype)
    each = torch.arange(len(images), device=device)
    found = padded.permute(0, 2, 3, 1)[each[:, None, None], rows[:, :, None], columns[:, None]]
    return found.permute(0, 3, 1, 2)


def crop(
    images: UInt8[Tensor, "b 3 H W"],
    smallest: float,
    size: int,
    draws: torch.Generator,
    share: Share = WHOLE,
) -> UInt8[Tensor, "b 3 size size"]:
    """Crop a random part of each image, resize it, and mirror half of them.

    Args:
        images: this share of a batch.
        smallest: minimum share of an image's area; the aspect ratio is between 3:4 and 4:3, or
            closer to 1 where the image has no room for that.
    """
    drawn = torch.rand(len(images) * share.count, 5, generator=draws)
    area, shape, right, down, mirror = _send(share.part(drawn), images.device).unbind(1)
    area, ratio = smallest + (1 - smallest) * area, (4 / 3) ** (2 * shape - 1)
    width, height = ((area * by).sqrt().clamp(max=1) for by in (ratio, 1 / ratio))
    affine = torch.zeros(len(images), 2, 3, device=images.device)
    affine[:, 0, 0] = torch.where(mirror < 0.5, -width, width)
    affine[:, 1, 1] = height
    affine[:, 0, 2], affine[:, 1, 2] = (1 - width) * (2 * right - 1), (1 - height) * (2 * down - 1)
    places = functional.affine_grid(affine, [*images.shape[:2], size, size], align_corners=False)
    found = functional.grid_sample(
        images.float(), places, padding_mode="border", align_corners=False
    )
    return found.round().to(images.dtype)


def recolour(
    inputs: Float[Tensor, "b 3 H W"], most: float, draws: torch.Generator, share: Share = WHOLE
) -> Float[Tensor, "b 3 H W"]:
    """Change contrast, brightness and saturation of each picture by up to `most`.

    Args:
        inputs: this share of a batch, normalised.
    """
    drawn = most * (2 * torch.rand(len(inputs) * share.count, 3, generator=draws) - 1)
    mine = _send(share.part(drawn), inputs.device)
    contrast, light, colour = mine[..., None, None, None].unbind(1)
    found = inputs * (1 + contrast) + light
    grey = found.mean(1, keepdim=True)
    return grey + (found - grey) * (1 + colour)


def _send(drawn: Tensor, device: torch.device) -> Tensor:
    """Copy numbers drawn on the CPU to the device, without waiting for a busy GPU."""
    if device.type == "cuda":
        return drawn.pin_memory().to(device, non_blocking=True)
    return drawn.to(device)


def paste_patches(
    inputs: Float[Tensor, "b 3 H W"], draws: torch.Generator
) -> tuple[Float[Tensor, "b 3 H W"], float]:
    """Paste into each picture a rectangle from the one before it (CutMix, Yun et al. 2019), the
    same for all. Also return the share of a picture that remains its own.
    """
    height, width = inputs.shape[2:]
    side, down, right = torch.rand(3, generator=draws).tolist()
    side = side**0.5  # uniform in the share of the area
    top, bottom = (round(height * min(max(down + by * side, 0), 1)) for by in (-0.5, 0.5))
    left, end = (round(width * min(max(right + by * side, 0), 1)) for by in (-0.5, 0.5))
    found = inputs.clone()
    found[:, :, top:bottom, left:end] = inputs.roll(1, 0)[:, :, top:bottom, left:end]
    return found, 1 - (bottom - top) * (end - left) / (height * width)
