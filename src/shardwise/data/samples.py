"""The samples of each rank and step, and their position in checkpoints."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch.distributed as dist

from shardwise.axes import Axes
from shardwise.data.order import BatchShare, SampleOrder, seed_draws
from shardwise.errors import ConfigError, StateError

_Batch = TypeVar("_Batch")
_ORDER = 1  # to be raised with a change of the order


def _place() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


@dataclass(frozen=True)
class MicroBatch(Generic[_Batch]):
    """One pass: its batch, the weight of its mean loss, and whether it ends the step.

    The mean over all ranks of the sum of weighted losses is the mean loss of the global batch. A
    weight of 0 means that there is no micro-batch; its pass must run nevertheless.
    """

    batch: _Batch
    weight: float
    last: bool


class Step(Generic[_Batch]):
    """One step of `Samples.steps`: iterate it once for its passes. ``number`` counts from 1."""

    def __init__(self, samples: "Samples", number: int, batches: Iterator[_Batch]) -> None:
        self.number = number
        self._samples = samples
        self._batches = batches
        self._is_begun = False

    def __iter__(self) -> Iterator[MicroBatch[_Batch]]:
        samples, share = self._samples, self._samples.share
        if self._is_begun:
            raise StateError(
                f"step {self.number} is iterated again, and would take samples of the next one; "
                "go through its passes once"
            )
        self._is_begun = True
        for number in range(share.num_passes):
            batch = next(self._batches)
            if samples.seeds_draws:
                place = share.micro_batch_of(number)
                seed_draws(samples.order.seed, self.number, place, samples.peer)
            weight = 1 / share.divisor if share.counts(number) else 0.0
            is_last = number == share.num_passes - 1
            if is_last:  # now, as a loop may save in the pass
                samples.step = self.number
            yield MicroBatch(batch, weight, is_last)


class Samples:
    """The samples that this rank takes in each step, for any number of ranks.

    Give it to a loader as ``batch_sampler`` and iterate `steps`. The loader may be torch's
    `DataLoader` or torchdata's `StatefulDataLoader`, with workers, over a dataset with
    ``num_samples`` items; it has no epochs and no length. Keep these samples in checkpoints as
    ``extra={"samples": samples}``: their position is the last step whose passes were all handed
    out, not what workers have read ahead. See Note [Samples of a step].

    ``global_batch`` and ``micro_batch`` count samples; ``global_batch`` is a multiple. ``axes`` are
    those given to `shard()`; by default all ranks are data-parallel. ``shuffle`` is True for a
    random order of all samples, False for theirs, or the number of consecutive samples of a block
    that is read together. ``seeds_draws`` seeds torch's generators before each pass:
    see Note [Random numbers of a micro-batch].

    **Raises** ConfigError for sizes that do not fit.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        global_batch: int,
        micro_batch: int,
        axes: Axes | None = None,
        seed: int = 0,
        shuffle: bool | int = True,
        seeds_draws: bool = False,
    ) -> None:
        if min(num_samples, global_batch, micro_batch) < 1 or global_batch % micro_batch:
            raise ConfigError(
                "Samples: expected samples, and a global_batch that is a multiple of micro_batch, "
                f"got {num_samples} samples, {global_batch} and {micro_batch}"
            )
        block = None if isinstance(shuffle, bool) else shuffle
        if block is not None and not 0 < block <= num_samples:
            raise ConfigError(f"Samples: shuffle: expected 1 to {num_samples}, got {block}")
        rank, self._num_ranks = _place()
        over = (axes or Axes()).over(self._num_ranks)
        part, num_parts = over.part_of_batch(rank)
        self.share = BatchShare(global_batch, micro_batch, part, num_parts)
        self.order = SampleOrder(num_samples, seed, block)
        self.peer = over.peer_in_part(rank)
        self.seeds_draws = seeds_draws
        self.step = 0
        self._shuffles = bool(shuffle)
        self._facts = {
            "num_samples": num_samples,
            "global_batch": global_batch,
            "seed": seed,
            "shuffle": shuffle,
            "order": _ORDER,
        }

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the samples of each pass, from the position on, without end."""
        step = self.step
        while True:
            for number in range(self.share.num_passes):
                first = step * self.share.global_batch
                places = (first + index for index in self.share.indices(number))
                yield [self._sample(place) for place in places]
            step += 1

    def _sample(self, place: int) -> int:
        if self._shuffles:
            return self.order.sample(place)
        return place % self.order.num_samples

    def steps(self, loader: Iterable[_Batch], until: int | None = None) -> Iterator[Step[_Batch]]:
        """Yield the steps from the position on to ``until``; ``loader`` uses these samples.

        **Raises** StateError if a step is requested before all passes of the last one are taken, or
        the process group was made after these samples.
        """
        if _place()[1] != self._num_ranks:
            raise StateError(
                f"these samples are divided over {self._num_ranks} ranks, and there are "
                f"{_place()[1]}: make Samples after init_process_group"
            )
        number = self.step + 1
        batches = iter(loader)
        while until is None or number <= until:
            yield Step(self, number, batches)
            if self.step != number:
                raise StateError(
                    f"step {number} was left before its last pass, so its samples are taken in "
                    "part; run all passes of a step, or start `steps` anew to repeat it"
                )
            number += 1

    def state_dict(self) -> dict[str, object]:
        """Return the position and the facts that decide the order, the same on all ranks."""
        return {"step": self.step, **self._facts}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a saved position, with any number of ranks; call before `steps`.

        **Raises** StateError if the position is of other samples, another batch or another seed.
        """
        for key, value in self._facts.items():
            if state.get(key) != value or isinstance(state[key], bool) != isinstance(value, bool):
                raise StateError(
                    f"samples: {key} was {state.get(key)} when this position was saved and is "
                    f"{value} now, so its samples would be others; set it back, or do not load it"
                )
        step = state["step"]
        if not isinstance(step, int) or step < 0:
            raise StateError(f"samples: expected a step as position, got {step}")
        self.step = step
