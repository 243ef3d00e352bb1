"""The tables of precisions and optimizers, held against the engine and against real optimizers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwise import config
from shardwise.errors import ConfigError
from shardwise.plan.sizes import DTYPE_BYTES, OPTIMIZERS, PRECISIONS, row_of

OF_TORCH = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgd_momentum": lambda params: torch.optim.SGD(params, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,
}
SHAPES = [(), (1,), (7,), (5, 3), (64, 96), (4, 3, 5)]


def test_every_dtype_has_the_size_that_torch_gives_it():
    for name, size in DTYPE_BYTES.items():
        dtype = torch.float8_e4m3fn if name == "float8" else getattr(torch, name)
        assert dtype.itemsize == size


def test_the_precisions_of_the_engine_are_rows_with_the_same_dtypes():
    assert set(config.PRECISIONS) < set(PRECISIONS)
    bf16 = torch.bfloat16
    engine = config.PRECISIONS | {"pure_bf16": config.Precision(bf16, bf16, bf16)}
    assert {n for n, row in PRECISIONS.items() if row.engine_runs_it} == set(engine)
    for name, precision in engine.items():
        own = [precision.param, precision.master, precision.reduce]
        row = PRECISIONS[name]
        expected = [dtype or torch.float32 for dtype in own]
        assert [getattr(torch, d) for d in (row.compute, row.master, row.reduce)] == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OF_TORCH)
def test_the_bytes_of_torch_optimizers_are_those_of_their_state(name, dtype):
    for shape in SHAPES:
        if name == "muon" and len(shape) != 2:
            continue  # it takes matrices alone
        param = nn.Parameter(torch.ones(shape, dtype=getattr(torch, dtype)))
        param.grad = torch.ones_like(param)
        optimizer = OF_TORCH[name]([param])
        optimizer.step()
        state = [v for v in optimizer.state[param].values() if isinstance(v, torch.Tensor)]
        row = OPTIMIZERS[name]
        assert row.tensor_bytes(shape, dtype) == sum(t.nbytes for t in state), shape
        if not row.factored:
            steps = 4 * row.has_step
            assert row.state_bytes(param.numel(), dtype) == row.tensor_bytes(shape, dtype) - steps


def test_quantized_moments_have_a_scale_per_block():
    assert OPTIMIZERS["adamw_8bit"].state_bytes(1024, "float32") == 2 * (1024 + 4 * 4)
    assert OPTIMIZERS["adamw_4bit"].state_bytes(1024, "float32") == 2 * (512 + 8 * 4)
    assert OPTIMIZERS["adamw_4bit"].state_bytes(1, "float32") == 2 * (1 + 4)
    for name in ("adamw_bf16_moments", "lion"):  # which has one moment in the master's dtype
        assert OPTIMIZERS[name].state_bytes(10, "float32") == 40


@given(st.sampled_from(sorted(OPTIMIZERS)), st.integers(0, 10**18), st.integers(0, 10**18))
def test_state_of_the_whole_is_at_most_that_of_its_parts(name, one, two):
    row = OPTIMIZERS[name]
    whole = row.state_bytes(one + two, "float32")
    parts = row.state_bytes(one, "float32") + row.state_bytes(two, "float32")
    assert whole <= parts <= whole + row.num_like * 5  # a byte and a scale that are not full


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("adamW", r"one of .*did you mean 'adamw'"),
        ("adamw8bit", r"one of .*did you mean 'adamw_8bit'"),
        ("q", r"one of adamw, .*adafactor$"),  # near none
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, told):
    with pytest.raises(ConfigError, match=f"^optimizer='{name}': expected {told}"):
        row_of(OPTIMIZERS, name, "optimizer")
