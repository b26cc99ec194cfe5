"""A plugin with which strategies of Avalanche predict with a memory when they are evaluated.

After every training experience its examples are written to the memory. At evaluation the outputs of
the network are replaced by predictions with the memory. Needs the extra `avalanche`.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from mbpa.errors import MissingExtraError
from mbpa.memory import ExactMemory
from mbpa.memory.validation import count
from mbpa.model import MbPA
from mbpa.modules.sharing import share
from mbpa.modules.split import split
from mbpa.predictors import Adapted, Predictor

try:
    from avalanche.models import MultiTaskModule
    from avalanche.training.plugins import SupervisedPlugin
except ImportError as error:
    raise MissingExtraError("avalanche-lib", extra="avalanche") from error

__all__ = ["MemoryPlugin"]


class MemoryPlugin(SupervisedPlugin):  # type: ignore[misc]  # avalanche has no types
    """Writes the examples of training experiences to a memory, and evaluates with it.

    Examples are written when an experience has been trained on, with the keys that the network
    then computes. A replay plugin of the same strategy does not change what is written. If the
    memory is full, it keeps a uniform sample of all examples so far (reservoir sampling), since
    the newest ones would all be of the last classes.

    The network may grow between experiences (`IncrementalClassifier`). It is never changed by the
    plugin. A network that needs task labels (`MultiTaskModule`) is refused.

    Args:
        at: name of the layer to adapt, as for `mbpa.split`; its inputs are the keys. `None`: the
            whole network is adapted, and the keys are the network's inputs, as in the paper's
            experiment with permuted MNIST. Such keys do not change when the network is trained.
        capacity: maximum number of examples.
        predictor: turns the head's outputs and the neighbours into a prediction. Default:
            `Adapted()`.
        keep_inputs: whether the inputs are kept, too, so that their keys can be computed anew after
            every experience; the memory then costs as much as a replay buffer of that size.
            Without it, keys become out of date as the network is trained.
        seed: seed for the choice of examples to keep.
    """

    def __init__(
        self,
        at: str | None,
        *,
        capacity: int,
        predictor: Predictor | None = None,
        keep_inputs: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.at, self.capacity = at, count("capacity", capacity)
        self.predictor = predictor or Adapted()
        self.keep_inputs = keep_inputs and at is not None
        self.model: MbPA | None = None
        """The network with its memory; `None` before the end of the first experience."""
        self._random = random.Random(seed)
        self._seen = 0
        self._inputs: dict[int, Tensor] = {}

    def before_training(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        # Refuse a network that cannot be adapted.
        if isinstance(strategy.model, MultiTaskModule):
            raise ValueError(
                "the network must not need task labels, got the MultiTaskModule "
                f"{type(strategy.model).__name__}: give every task a network and a memory"
            )

    def after_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        # Write the examples of the experience.
        embed, head = self._split(strategy.model)
        dataset = strategy.experience.dataset.eval()  # without augmentation
        batches = torch.utils.data.DataLoader(
            dataset,
            strategy.eval_mb_size,
            collate_fn=getattr(dataset, "collate_fn", None),
            generator=torch.Generator(),  # the global one is that of the training
        )
        for inputs, labels, *_ in batches:
            inputs, labels = inputs.to(strategy.device), labels.to(strategy.device)
            model = self._bind(embed, head, inputs)
            self._write(model, inputs, labels)
        if self.keep_inputs and self.model is not None:
            kept = self._inputs
            self.model.refresh(lambda ids: torch.stack([kept[int(each)] for each in ids]))

    def before_eval_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        # Follow a network that has grown for the classes of this experience.
        if self.model is not None:
            self._bind(*self._split(strategy.model))

    def after_eval_forward(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        # Replace the outputs of the network by predictions with the memory.
        if self.model is not None:
            strategy.mb_output = self.model(strategy.mb_x)

    def _split(self, network: nn.Module) -> tuple[nn.Module | None, nn.Module]:
        return (None, share(network, {})) if self.at is None else split(network, self.at)

    def _bind(self, embed: nn.Module | None, head: nn.Module, inputs: Tensor | None = None) -> MbPA:
        """Return the model, made anew around a network whose layers may have been replaced."""
        if self.model is not None:
            memory = self.model.memory
        else:
            assert inputs is not None
            with torch.no_grad():
                keys = inputs if embed is None else embed(inputs)
            memory = ExactMemory(self.capacity, tuple(keys.shape[1:]), device=keys.device)
        self.model = MbPA(embed, head, memory=memory, predictor=self.predictor)
        return self.model

    def _write(self, model: MbPA, inputs: Tensor, labels: Tensor) -> None:
        """Write examples; of all that were seen so far, each is kept with the same probability."""
        memory, keys = model.memory, model.embed(inputs)
        before: list[int] = memory.ids.tolist()
        kept: list[int] = [*before]  # ids, and −1 − number for the examples of this batch
        for number in range(len(keys)):
            self._seen += 1
            if len(kept) < self.capacity:
                kept.append(-1 - number)
            elif (place := self._random.randrange(self._seen)) < self.capacity:
                kept[place] = -1 - number
        gone = set(before).difference(kept)
        memory.delete(sorted(gone))
        for each in gone:
            self._inputs.pop(each, None)
        chosen = sorted(-1 - each for each in kept if each < 0)
        ids = model.write(keys=keys[chosen], values=labels[chosen])
        if self.keep_inputs:
            self._inputs.update(zip(ids.tolist(), inputs[chosen].clone(), strict=True))
