"""Choose the windows of a step, in an order that does not depend on the number of ranks.

Sample `index` of the global batch of `step` is one window of the token stream, by a pure function
of (seed, step, index); a rank only picks its indices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardwise.errors import ConfigError
from shardwise.train.text import TokenStream

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class WindowSampler:
    """Say which window a sample is; pure integers, the same for any number of ranks.

    A window is `seq + 1` tokens and starts at a multiple of `seq`. Every `num_windows //
    eval_windows`-th window is held out. Training walks all other windows in a new random order
    each epoch.
    """

    num_windows: int
    eval_windows: int
    seed: int

    @classmethod
    def over(cls, num_tokens: int, seq: int, eval_windows: int, seed: int) -> WindowSampler:
        """Cut a stream of num_tokens into windows.

        **Raises** ConfigError when the stream is too short to train on after holding windows out.
        """
        num_windows = (num_tokens - 1) // seq
        if num_windows < max(1, 2 * eval_windows):
            raise ConfigError(
                f"data: expected at least {max(1, 2 * eval_windows)} windows of seq {seq} "
                f"(eval_windows {eval_windows} are held out), got {num_tokens} tokens = "
                f"{num_windows} windows; give more text, or a smaller seq or eval_windows"
            )
        return cls(num_windows, eval_windows, seed)

    @property
    def train_windows(self) -> int:
        """Number of windows that are trained on."""
        return self.num_windows - self.eval_windows

    def train_window(self, step: int, index: int, global_batch: int) -> int:
        """Return the window of sample `index` in step `step` (from 1)."""
        epoch, position = divmod((step - 1) * global_batch + index, self.train_windows)
        rank_among_train = permute(position, self.train_windows, _mix(self.seed) ^ epoch)
        if self.eval_windows == 0:
            return rank_among_train
        stride = self.num_windows // self.eval_windows
        block, offset = divmod(rank_among_train, stride - 1)
        if block >= self.eval_windows:
            return rank_among_train + self.eval_windows
        return block * stride + offset

    def eval_window(self, index: int) -> int:
        """Return the held-out window `index` of `eval_windows`."""
        stride = self.num_windows // self.eval_windows
        return index * stride + stride - 1


def rank_indices(micro_batch: int, number: int, rank: int, world_size: int) -> range:
    """Return which indices of the global batch a rank takes in micro-batch `number` (from 0).

    Over all ranks and micro-batches these cover each index of the global batch once.
    """
    start = (number * world_size + rank) * micro_batch
    return range(start, start + micro_batch)


def read_windows(
    stream: TokenStream, windows: Sequence[int], seq: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and targets of windows, both int64 [len(windows), seq]; targets are one ahead."""
    rows = [stream.tokens[window * seq : window * seq + seq + 1] for window in windows]
    tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
    return tokens[:, :-1], tokens[:, 1:]


def permute(position: int, size: int, key: int) -> int:
    """Return where a keyed random permutation of range(size) sends `position`, in O(1) memory.

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
