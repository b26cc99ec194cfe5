"""ResNet (He et al. 2015) with 18, 34 or 50 layers, for large and small images.

Parameters are named as in common checkpoints (`layer1.0.conv1.weight`, `fc.bias`, …), which can
therefore be loaded. Blocks of three convolutions have their stride in the middle one, as in those
checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
"""Number of blocks in each of the four stages."""


class ResNet(nn.Module):
    """A network from images to logits; the input of its last layer is the features.

    Args:
        layers: 18, 34 or 50.
        classes: number of outputs of `fc`.
        small: for images of 32 to 64 pixels: a first convolution of 3×3 without stride, and no
            pooling after it.
        width: number of channels of the first stage; 64 unless the network should be tiny.
    """

    def __init__(self, layers: int, classes: int, *, small: bool = False, width: int = 64) -> None:
        super().__init__()
        if layers not in DEPTHS:
            raise ValueError(f"layers must be one of {tuple(DEPTHS)}, got {layers}")
        block = Bottleneck if layers == 50 else Basic
        self.small = small
        kernel, stride = (3, 1) if small else (7, 2)
        self.conv1 = nn.Conv2d(3, width, kernel, stride, kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        inputs = width
        for stage, depth in enumerate(DEPTHS[layers]):
            planes, blocks = width << stage, list[nn.Module]()
            for place in range(depth):
                blocks.append(block(inputs, planes, 2 if stage and not place else 1))
                inputs = planes * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inputs, classes)
        _initialise(self)

    @property
    def feature_size(self) -> int:
        """Size of the vectors that `features` returns."""
        return self.fc.in_features

    def features(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B D"]:
        """Return the input of the last layer: spatial means of the last stage's output."""
        found = torch.relu(self.bn1(self.conv1(images)))
        if not self.small:
            found = nn.functional.max_pool2d(found, 3, 2, 1)
        for stage in range(1, 5):
            found = self.get_submodule(f"layer{stage}")(found)
        return found.float().mean((2, 3))  # in float32 even under autocast

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B C"]:
        logits: Tensor = self.fc(self.features(images))
        return logits

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the parameters of a checkpoint, with its `fc` if that has the same number of
        classes.
        """
        own = self.state_dict()
        given = dict(tensors)
        for name in ("fc.weight", "fc.bias"):
            if name in given and given[name].shape != own[name].shape:
                given[name] = own[name]
        self.load_state_dict(given)


class Basic(nn.Module):
    """Two convolutions of 3×3 with a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = _around(inputs, planes, stride)

    def forward(self, images: Float[Tensor, "B I H W"]) -> Float[Tensor, "B O _ _"]:
        found = torch.relu(self.bn1(self.conv1(images)))
        found = self.bn2(self.conv2(found))
        kept = images if self.downsample is None else self.downsample(images)
        return torch.relu(found + kept)


class Bottleneck(nn.Module):
    """Convolutions of 1×1, 3×3 and 1×1 with a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        outputs = planes * self.expansion
        self.conv1 = nn.Conv2d(inputs, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _around(inputs, outputs, stride)

    def forward(self, images: Float[Tensor, "B I H W"]) -> Float[Tensor, "B O _ _"]:
        found = torch.relu(self.bn1(self.conv1(images)))
        found = torch.relu(self.bn2(self.conv2(found)))
        found = self.bn3(self.conv3(found))
        kept = images if self.downsample is None else self.downsample(images)
        return torch.relu(found + kept)


def _around(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def _initialise(network: nn.Module) -> None:
    """Initialise as He et al., but zero each block's last normalisation, which trains better."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, Basic):
            nn.init.zeros_(module.bn2.weight)
        elif isinstance(module, Bottleneck):
            nn.init.zeros_(module.bn3.weight)
