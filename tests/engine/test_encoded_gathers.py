"""Gathers of encoded blocks: the values of every rank against `block_codes`, to the bit."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from block_codes import ODD_SHAPES, cuts_of, decoded
from ranks import run_ranks
from shardwise import Precision, shard
from shardwise.comm import coalesced, collectives

KINDS = ("int8", "fp8", "int4")
BLOCK = 16


class Odd(nn.Module):
    """Shapes that no number of ranks divides: one row, none, several dims, one dim."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in ODD_SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.norm = nn.Parameter(torch.randn(19))
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {n: p.detach().clone() for n, p in self.named_parameters(recurse=False)}
        return x * sum(p.sum() for p in self.parameters())


def seen_by_ranks(
    rank: int, num_ranks: int, cases: list[tuple[int, str, str, Any]], is_nccl: bool = False
) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if is_nccl:
            patch.setattr(collectives, "_transport", lambda axis, device: coalesced)
        return [*seen_in(cases)]


def seen_in(cases: list[tuple[int, str, str, Any]]) -> Iterator[Any]:
    for stage, layout, kind, dtype in cases:
        torch.manual_seed(3)
        model = Odd()
        master = torch.float32 if dtype else None
        precision = Precision(param=dtype, master=master, gather=kind, block=BLOCK)
        shard(model, stage=stage, layout=layout, precision=precision)
        model(torch.ones(2)).sum().backward()
        exact = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
        yield exact, dict(model.seen)


CASES = [
    (stage, layout, kind, dtype)
    for stage, dtype in ((1, None), (3, None), (2, torch.bfloat16), (3, torch.float16))
    for layout in ("rows", "flat")
    for kind in KINDS
]


@pytest.mark.parametrize(
    ("num_ranks", "is_nccl"), [(1, False), (2, False), (3, False), (7, False), (3, True)]
)
def test_layers_read_what_the_encoding_says_on_every_rank(num_ranks, is_nccl):
    """To the bit; the shards themselves stay as they are, and so do tensors of one dim.

    pytorch/ao #3982, #3983: a crash where rows do not divide, or a rank has none.
    """
    torch.manual_seed(3)
    start = {n: p.detach() for n, p in Odd().named_parameters()}
    shapes = {n: tuple(p.shape) for n, p in start.items()}
    cases = CASES[:: 5 if num_ranks == 7 else 1]  # of each kind and layout, where ranks are many
    for rank in run_ranks(seen_by_ranks, num_ranks, cases, is_nccl):
        for (_, layout, kind, dtype), (exact, seen) in zip(cases, rank, strict=True):
            cuts = cuts_of(layout, shapes, num_ranks)
            for name, value in start.items():
                assert torch.equal(exact[name], value), name
                flat = value.reshape(-1).numpy()
                coded = value.dim() > 1
                wanted = decoded(flat, kind, BLOCK, cuts[name]) if coded else flat
                cast = torch.from_numpy(np.ascontiguousarray(wanted)).to(dtype or torch.float32)
                assert torch.equal(seen[name].reshape(-1), cast), (layout, kind, dtype, name)
