"""The order of samples, and the division of a step's samples over ranks: integers only.

Note [Samples of a step]
~~~~~~~~~~~~~~~~~~~~~~~~
Sample ``index`` of the global batch of a step is a pure function of (seed, step, index). The ranks
divide the global batch by micro-batches. Another number of ranks between two steps therefore skips
no sample and repeats none. If the micro-batches do not divide evenly, every rank still runs the
same number of passes, as each pass has collectives of all ranks; the last pass of some ranks has
the weight 0, and samples as input that other passes of the step have too: a value that is not
finite there would spoil the step anyway.

Note [Random numbers of a micro-batch]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Generators that follow the rank would give other dropout masks on other numbers of ranks. So they
are seeded before each pass, from (seed, step, micro-batch). Ranks that share a micro-batch (tensor,
context and pipeline axes) get different seeds, by their place among these.
"""

import hashlib
import math
from dataclasses import dataclass

_MASK = (1 << 64) - 1
_OPEN_BLOCKS = 16


@dataclass(frozen=True)
class SampleOrder:
    """Walks ``num_samples`` samples in a new random order each epoch.

    With ``block``, 16 blocks of so many consecutive samples are read at a time, in random order:
    reads of a large file then stay within a few regions.
    """

    num_samples: int
    seed: int
    block: int | None = None

    def sample(self, position: int) -> int:
        """Return the sample at a position (from 0) of the walk over all epochs. **Cost** O(1)."""
        epoch, place = divmod(position, self.num_samples)
        key = _mix(self.seed) ^ epoch
        if self.block is None:
            return permute(place, self.num_samples, key)
        num_blocks = self.num_samples // self.block
        first_of_rest = num_blocks * self.block
        if place >= first_of_rest:  # the end that fills no block comes last
            num_rest = self.num_samples - first_of_rest
            return first_of_rest + permute(place - first_of_rest, num_rest, key)
        group, inside = divmod(place, _OPEN_BLOCKS * self.block)
        first = group * _OPEN_BLOCKS
        num_open = min(_OPEN_BLOCKS, num_blocks - first)
        number, offset = divmod(
            permute(inside, num_open * self.block, _mix(key + 1 + group)), self.block
        )
        return permute(first + number, num_blocks, key) * self.block + offset


@dataclass(frozen=True)
class BatchShare:
    """A rank's micro-batches of a step: see Note [Samples of a step].

    ``part`` of ``num_parts`` is the rank's place on the data-parallel axes; sizes are in samples.
    ``global_batch`` is a multiple of ``micro_batch``.
    """

    global_batch: int
    micro_batch: int
    part: int
    num_parts: int

    @property
    def num_passes(self) -> int:
        """Forward and backward passes of each rank in a step."""
        return math.ceil(self.num_micro_batches / self.num_parts)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step over all ranks."""
        return self.global_batch // self.micro_batch

    @property
    def divisor(self) -> float:
        """The divisor of a micro-batch's mean loss, so that the ranks' mean is that of the step."""
        return self.num_micro_batches / self.num_parts

    def micro_batch_of(self, number: int) -> int:
        """Return the micro-batch, among all of the step, of this rank's pass `number` (from 0)."""
        return number * self.num_parts + self.part

    def counts(self, number: int) -> bool:
        """True if a pass has a micro-batch; otherwise its weight is 0."""
        return self.micro_batch_of(number) < self.num_micro_batches

    def indices(self, number: int) -> range:
        """Return a pass's samples as indices of the global batch.

        A pass without a micro-batch gets those of another pass.
        """
        start = self.micro_batch_of(number) % self.num_micro_batches * self.micro_batch
        return range(start, start + self.micro_batch)


def seed_of(seed: int, number: int, what: str) -> int:
    """Return the seed of generator ``number`` for a purpose.

    Torch uses 32 bits, so the number is added: seeds of different numbers always differ.
    """
    digest = hashlib.blake2b(f"{what} of seed {seed}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") + number


def seed_draws(seed: int, step: int, micro_batch: int, peer: int) -> None:
    """Seed torch's generators for a pass: see Note [Random numbers of a micro-batch].

    ``peer`` is the rank's place among those that share the micro-batch.
    """
    import torch

    torch.manual_seed(seed_of(seed, peer, f"step {step}, micro-batch {micro_batch}"))


def permute(position: int, size: int, key: int) -> int:
    """Return the image of `position` under a keyed random permutation of range(size).

    **Cost** O(1) memory.

    **Source** Feistel network with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite
    domains", 2002), four rounds.
    """
    half_bits = max(1, math.ceil((size - 1).bit_length() / 2))
    mask = (1 << half_bits) - 1
    while True:
        left, right = position >> half_bits, position & mask
        for round_number in range(4):
            left, right = right, left ^ (_mix(_mix(key + round_number) ^ right) & mask)
        position = (left << half_bits) | right
        if position < size:
            return position


def _mix(value: int) -> int:
    """Scramble 64 bits (the finalizer of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
