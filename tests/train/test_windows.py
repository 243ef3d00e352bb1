"""The data order: a pure function of seed, step and index, the same for any number of ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data import TokenFiles
from shardwise.errors import ConfigError
from shardwise.train.text import WindowSampler


@given(data=st.data(), seed=st.integers(0, 1000))
def test_an_epoch_is_every_window_but_the_held_out(data, seed):
    eval_windows = data.draw(st.integers(0, 20))
    num_windows = data.draw(st.integers(max(1, 2 * eval_windows), 90))
    sampler = WindowSampler(num_windows, eval_windows, seed)
    held_out = {sampler.eval_window(index) for index in range(eval_windows)}
    trained = [sampler.train_window(1, i, sampler.train_windows) for i in range(num_windows)]
    assert len(held_out) == eval_windows
    assert sorted([*held_out, *trained[: sampler.train_windows]]) == list(range(num_windows))


def test_another_epoch_has_another_order():
    sampler = WindowSampler(num_windows=60, eval_windows=0, seed=0)
    first, second = ([sampler.train_window(step, i, 60) for i in range(60)] for step in (1, 2))
    assert first != second
    assert sorted(first) == sorted(second)


def test_too_little_text_is_an_error(tmp_path):
    np.save(tmp_path / "few.npy", np.zeros(100, dtype=np.uint8))
    with pytest.raises(ConfigError, match="at least 8 windows of seq 16"):
        WindowSampler.over(TokenFiles([tmp_path / "few.npy"], 16), eval_windows=4, seed=0)
