"""Networks of the experiments: several MLPs of one shape, trained in parallel as one.

S networks that differ in seed, method or memory size take their steps in the same few calls, which
suits a GPU. Each is exactly the network it would be alone: nothing is shared but the call.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

Parameters = list[Float[Tensor, "S ..."]]


class Stack:
    """S MLPs with ReLU; parameters are weight (inputs × outputs) and bias of each layer in turn.

    Args:
        seeds: one per network; the same seed gives the same network in every stack.
        sizes: sizes of the layers, inputs first.
    """

    def __init__(self, seeds: Sequence[int], sizes: Sequence[int], device: torch.device) -> None:
        self.sizes = tuple(sizes)
        each = [make_mlp(seed, sizes) for seed in seeds]
        self.params: Parameters = [
            torch.stack([_turn(tensor) for tensor in tensors]).to(device).requires_grad_()
            for tensors in zip(*(net.parameters() for net in each), strict=True)
        ]

    def __len__(self) -> int:
        return len(self.params[0])

    def __call__(self, inputs: Float[Tensor, "S B I"]) -> Float[Tensor, "S B C"]:
        return self.layers(inputs)[-1]

    def layers(self, inputs: Float[Tensor, "S B I"]) -> list[Float[Tensor, "S B _"]]:
        """Return the outputs of each layer, before the ReLU."""
        outputs = []
        for weight, bias in zip(self.params[::2], self.params[1::2], strict=True):
            inputs = torch.baddbmm(bias[:, None], inputs, weight)
            outputs.append(inputs)
            inputs = inputs.relu()
        return outputs

    def network(self, index: int) -> nn.Sequential:
        """Return a copy of one network on its own."""
        network = sequential(self.sizes).to(self.params[0].device)
        with torch.no_grad():
            for own, stacked in zip(network.parameters(), self.params, strict=True):
                own.copy_(_turn(stacked[index]))
        return network.requires_grad_(False).eval()


def _turn(tensor: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Convert a weight of `nn.Linear` to the layout of a stack, or back."""
    return tensor.detach().mT if tensor.ndim == 2 else tensor.detach()


def make_mlp(seed: int, sizes: Sequence[int]) -> nn.Sequential:
    """Return an untrained MLP; the caller's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return sequential(sizes)


def sequential(sizes: Sequence[int]) -> nn.Sequential:
    """Return linear layers with ReLU between them."""
    modules: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        modules += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def cross_entropies(
    logits: Float[Tensor, "S B C"], labels: Int[Tensor, "S B"]
) -> Float[Tensor, "S"]:
    """Return the mean over the batch for each network."""
    chosen = logits.log_softmax(-1).gather(-1, labels[..., None])
    return -chosen[..., 0].mean(-1)
