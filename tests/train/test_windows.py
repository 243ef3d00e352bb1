"""The data order: a pure function of seed, step and index, the same for any number of ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.train.text import TokenStream, WindowSampler, permute, rank_indices, read_windows


@given(size=st.integers(1, 400), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


def test_permute_depends_on_its_key() -> None:
    orders = {tuple(permute(i, 50, key) for i in range(50)) for key in range(20)}
    assert len(orders) == 20


@given(
    micro_batch=st.integers(1, 5),
    accumulation=st.integers(1, 4),
    world_size=st.integers(1, 8),
)
def test_the_ranks_cover_the_global_batch_once(
    micro_batch: int, accumulation: int, world_size: int
) -> None:
    seen = [
        index
        for number in range(accumulation)
        for rank in range(world_size)
        for index in rank_indices(micro_batch, number, rank, world_size)
    ]
    assert seen == list(range(micro_batch * accumulation * world_size))


@given(seed=st.integers(0, 1000), step=st.integers(1, 50))
def test_a_step_sees_the_same_windows_on_1_2_3_and_4_ranks(seed: int, step: int) -> None:
    sampler = WindowSampler(num_windows=97, eval_windows=5, seed=seed)
    seen = []
    for world_size in (1, 2, 3, 4):
        accumulation = 24 // (2 * world_size)
        seen.append(
            sorted(
                sampler.train_window(step, index, 24)
                for number in range(accumulation)
                for rank in range(world_size)
                for index in rank_indices(2, number, rank, world_size)
            )
        )
    assert seen[0] == seen[1] == seen[2] == seen[3]


@given(data=st.data(), seed=st.integers(0, 1000))
def test_an_epoch_is_every_window_but_the_held_out(data: st.DataObject, seed: int) -> None:
    eval_windows = data.draw(st.integers(0, 20))
    num_windows = data.draw(st.integers(max(1, 2 * eval_windows), 90))
    sampler = WindowSampler(num_windows, eval_windows, seed)
    held_out = {sampler.eval_window(index) for index in range(eval_windows)}
    trained = [sampler.train_window(1, i, sampler.train_windows) for i in range(num_windows)]
    assert len(held_out) == eval_windows
    assert sorted([*held_out, *trained[: sampler.train_windows]]) == list(range(num_windows))


def test_another_epoch_has_another_order() -> None:
    sampler = WindowSampler(num_windows=60, eval_windows=0, seed=0)
    first, second = ([sampler.train_window(step, i, 60) for i in range(60)] for step in (1, 2))
    assert first != second
    assert sorted(first) == sorted(second)


def test_targets_are_one_token_ahead() -> None:
    stream = TokenStream(np.arange(100, dtype=np.uint8), 0.0)
    ids, targets = read_windows(stream, [0, 8], 10)
    assert ids.tolist() == [list(range(10)), list(range(80, 90))]
    assert targets.tolist() == [list(range(1, 11)), list(range(81, 91))]


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at least 8 windows of seq 16"):
        WindowSampler.over(num_tokens=100, seq=16, eval_windows=4, seed=0)
