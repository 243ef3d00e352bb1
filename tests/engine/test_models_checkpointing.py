"""Activation checkpointing of both kinds, nested, around and inside units, with frozen layers."""

from typing import Any

import pytest
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from models import Block, Stack
from ranks import run_ranks
from trainer import LAYOUTS, STAGES, compare


class Checkpointed(Stack):
    """Recomputes its blocks in backward."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class CheckpointedReentrant(Checkpointed):
    use_reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.requires_grad_())


class CheckpointedInside(Stack):
    """Checkpoints inside the unit rather than around it."""

    class Inner(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    block_class = Inner


class CheckpointedTwice(Stack):
    """A checkpoint around all blocks, and one around each of them."""

    use_reentrant = False

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return self.head(checkpoint(self.run, x, use_reentrant=self.use_reentrant))


class CheckpointedTwiceReentrant(CheckpointedTwice):
    use_reentrant = True


class CheckpointedMixed(CheckpointedTwice):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class CheckpointedSegment(Stack):
    """One checkpoint around two blocks, one block without."""

    def pair(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.pair, x, use_reentrant=False)
        return self.head(self.blocks[2](x))


class CheckpointedFrozen(Checkpointed):
    """The first block is frozen whole, one layer of the second; the last has early stop's case."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[1].up.requires_grad_(False)
        self.blocks[2].down.requires_grad_(False)


class CheckpointedFrozenReentrant(CheckpointedFrozen):
    use_reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.requires_grad_())


class CheckpointedToTheEnd(Checkpointed):
    """Recomputes whole blocks, where early stop would have ended."""

    def forward(self, x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(False):
            return super().forward(x)


CHECKPOINTED = [
    Checkpointed,
    CheckpointedReentrant,
    CheckpointedInside,
    CheckpointedTwice,
    CheckpointedTwiceReentrant,
    CheckpointedMixed,
    CheckpointedSegment,
    CheckpointedFrozen,
    CheckpointedFrozenReentrant,
    CheckpointedToTheEnd,
]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # nested, reentrant
@pytest.mark.parametrize("make_model", CHECKPOINTED)
def test_checkpointing_takes_the_same_steps(make_model: Any) -> None:
    run_ranks(compare, 3, make_model, LAYOUTS)


def test_checkpointing_takes_the_same_steps_alone_and_when_accumulating() -> None:
    for make_model in (Checkpointed, CheckpointedReentrant):
        run_ranks(compare, 1, make_model, STAGES)
        run_ranks(compare, 2, make_model, STAGES, num_micro_batches=2)
