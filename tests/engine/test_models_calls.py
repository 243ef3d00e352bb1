"""Ways to call a unit: twice, nested, evaluated, with inputs and outputs of every shape."""

from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import Block, Stack
from oracle import assert_same_bits
from ranks import on_ranks, run_ranks
from shardwise import shard
from trainer import (
    SPREAD,
    STAGES,
    compare,
    full_grads,
    full_parameters,
    make_steps,
    mean_square,
    sample,
)

Pair = namedtuple("Pair", "first second")


class CalledTwice(Stack):
    """Each block runs twice, and the first once more at the end."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(block(x))
        return self.head(self.blocks[0](x))


class Looped(Stack):
    """All blocks run in turn, and again."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


class Siamese(Stack):
    """A block sees two inputs that do not depend on each other, one of them without gradient."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks[0](x), self.blocks[0](x.flip(0))
        return self.head(self.blocks[1](first) * self.blocks[1](second.detach()))


SEVERAL_TIMES = [CalledTwice, Looped, Siamese]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("make_model", SEVERAL_TIMES)
def test_a_unit_may_run_several_times_in_a_step(make_model: Any, world_size: int) -> None:
    settings = sample(2 * SEVERAL_TIMES.index(make_model) + world_size // 2)
    run_ranks(compare, world_size, make_model, settings)


class Outer(nn.Module):
    """A unit with parameters of its own around a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x)))


class Nested(Stack):
    block_class = Outer


def test_units_may_be_nested() -> None:
    settings = [{**options, "units": ["Outer", "Block"]} for options in SPREAD]
    for world_size in (1, 3):
        run_ranks(compare, world_size, Nested, settings)


def test_the_whole_model_may_be_one_unit() -> None:
    run_ranks(compare, 3, Stack, [{**options, "units": []} for options in SPREAD])


@dataclass
class Output:
    hidden: Tensor
    extra: dict[str, Any]
    nothing: Tensor | None = None


class Plain:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden
        self.nothing = None


WRAPS: dict[str, Any] = {
    "dict": (lambda x: {"hidden": x, "none": None, "n": 3}, lambda o: o["hidden"]),
    "list": (lambda x: [None, x, 2.5], lambda o: o[1]),
    "tuple": (lambda x: (x, (x.detach(), None)), lambda o: o[0]),
    "namedtuple": (lambda x: Pair([x], None), lambda o: o.first[0]),
    "dataclass": (lambda x: Output(x, {"k": [x * 2]}), lambda o: o.hidden + o.extra["k"][0]),
    "object": (Plain, lambda o: o.hidden),
}


class WrappingBlock(Block):
    """Returns its output inside something else; `kind` is set by the model."""

    kind = "dict"

    def forward(self, x: Tensor) -> Any:
        return WRAPS[self.kind][0](super().forward(x))


class Wrapping(Stack):
    block_class = WrappingBlock

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        for block in self.blocks:
            block.kind = kind

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = WRAPS[self.kind][1](block(x))
        return WRAPS[self.kind][0](self.head(x))


def wrapped_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return WRAPS[model.kind][1](model(batch)).square().mean()


@pytest.mark.parametrize("kind", sorted(WRAPS))
def test_outputs_may_come_in_a(kind: str) -> None:
    run_ranks(compare, 2, partial(Wrapping, kind), SPREAD[1::2], wrapped_loss)


class ModelOutputs(Stack):
    """Hugging Face's ModelOutput, which is a dict and a dataclass."""

    def forward(self, x: Tensor) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        hidden = super().forward(x)
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=None)


def model_output_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).last_hidden_state.square().mean()


def test_outputs_may_come_in_model_outputs_of_transformers() -> None:
    pytest.importorskip("transformers", reason="the test extra has transformers")
    run_ranks(compare, 2, ModelOutputs, STAGES, model_output_loss)


class KeywordBlock(Block):
    def forward(self, *, hidden: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
        return {"x": super().forward(hidden["x"]) * scale}


class Keywords(Stack):
    block_class = KeywordBlock

    def forward(self, x: Tensor) -> Tensor:
        hidden = {"x": x}
        for block in self.blocks:
            hidden = block(hidden=hidden, scale=0.5)
        return self.head(hidden["x"])


def test_inputs_may_come_by_keyword_and_in_dicts() -> None:
    run_ranks(compare, 3, Keywords, SPREAD)


class InPlace(Stack):
    """Changes the units' outputs, and views of them, in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x += 1
        x = self.blocks[1](x.relu_())
        x[:, :3].mul_(2)
        x = self.blocks[2](x)
        x.view(-1)[::2].add_(0.5)
        return self.head(x)


class ViewBlock(Block):
    """Its output is a view."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1).view(x.shape)


class ViewsInPlace(InPlace):
    block_class = ViewBlock


class ChunkBlock(Block):
    """Its outputs are two views of one tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().forward(x).unsafe_chunk(2, dim=1)


class ChunksInPlace(Stack):
    block_class = ChunkBlock

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            first, second = block(x)
            x = torch.cat([first.mul_(2), second.add_(1)], dim=1)
        return self.head(x)


IN_PLACE = [InPlace, ViewsInPlace, ChunksInPlace]


@pytest.mark.parametrize("make_model", IN_PLACE)
def test_outputs_and_views_of_them_may_be_changed_in_place(make_model: Any) -> None:
    run_ranks(compare, 2, make_model, sample(2 * IN_PLACE.index(make_model)))


def two_forwards_loss(model: nn.Module, batch: Tensor) -> Tensor:
    first, second = model(batch), model(batch * 0.5)
    return (first * second).mean()


def dropped_forward_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Run a forward whose graph is dropped, and one that is kept a while but not used."""
    model(batch * 2)
    kept = model(batch * 3)
    loss = mean_square(model, batch)
    del kept
    return loss


@pytest.mark.parametrize("loss_fn", [two_forwards_loss, dropped_forward_loss])
def test_several_forwards_may_come_before_one_backward(loss_fn: Any) -> None:
    for num_micro_batches in (1, 2):
        run_ranks(compare, 2, Stack, SPREAD, loss_fn, num_micro_batches=num_micro_batches)


def gradients_of_two_backwards(model: nn.Module, batch: Tensor, kind: str) -> Any:
    """Backpropagate twice before anything is stepped."""
    if kind == "two graphs":
        mean_square(model, batch).backward()
        mean_square(model, batch * 0.5).backward()
    elif kind == "two graphs, then two backwards":
        first, second = mean_square(model, batch), mean_square(model, batch * 0.5)
        first.backward()
        second.backward()
    elif kind == "the latest graph first":
        first, second = mean_square(model, batch), mean_square(model, batch * 0.5)
        second.backward()
        first.backward()
    elif kind == "one graph":
        loss = mean_square(model, batch)
        loss.backward(retain_graph=True)
        loss.backward()
    elif kind == "two losses of one forward":
        out = model(batch)
        out.square().mean().backward(retain_graph=True)
        (out * 0.1).mean().backward()
    else:
        out = model(batch)
        out.backward(torch.full_like(out, 0.25))
    return full_grads(model)


TWO_BACKWARDS = [
    "two graphs",
    "two graphs, then two backwards",
    "the latest graph first",
    "one graph",
    "two losses of one forward",
    "a gradient is given",
]


@pytest.mark.parametrize("kind", TWO_BACKWARDS)
@on_ranks(2)
def test_gradients_add_up_over(kind):
    """Every rank has the same batch, so that the mean is the plain gradient, to the bit at N=2."""
    batch = torch.linspace(-1, 1, 24).view(3, 8)
    torch.manual_seed(0)
    expected = gradients_of_two_backwards(Stack(), batch, kind)
    for options in SPREAD:
        torch.manual_seed(0)
        model = shard(Stack(), **options)
        grads = gradients_of_two_backwards(model, batch, kind)
        assert_same_bits(grads, expected)


def evaluating_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Evaluate before and after the training forward, whose backward is still to come."""
    model.eval()
    with torch.no_grad():
        before = model(batch)
    with torch.inference_mode():
        model(batch * 2)
    model.train()
    loss = mean_square(model, batch)
    with torch.no_grad():
        after = model(batch)
    assert torch.equal(before, after)
    return loss


def test_evaluation_between_and_inside_steps_changes_nothing() -> None:
    for world_size in (1, 3):
        run_ranks(compare, world_size, Stack, SPREAD, evaluating_loss)


class NormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class NormalisedUnits(Stack):
    block_class = NormBlock


@on_ranks(2)
def test_batch_norm_keeps_its_statistics(rank, world_size):
    """Feed every rank the same batches, then the plain model has the same statistics."""
    steps = [[by_rank[:1] * world_size for by_rank in m] for m in make_steps(1, 3)]
    for options in SPREAD:
        found = []
        for is_sharded in (False, True):
            torch.manual_seed(0)
            model = NormalisedUnits()
            if is_sharded:
                shard(model, **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for (by_rank,) in steps:
                mean_square(model, by_rank[rank]).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append({**full_parameters(model), **dict(model.named_buffers())})
        assert_same_bits(found[1], found[0])


def train_with_user_hooks(model: nn.Module, batch: Tensor) -> tuple[Any, Any]:
    """Hang every kind of hook on a block; return what they saw, and the gradients."""
    seen: list[Any] = []
    block = model.blocks[1]
    block.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    block.register_forward_hook(lambda m, args, out: out + 1)
    block.register_forward_hook(lambda m, args, out: seen.append(("out", out.sum().item())))
    block.register_full_backward_pre_hook(lambda m, g: seen.append(("pre", g[0].sum().item())))
    block.register_full_backward_hook(lambda m, i, o: seen.append(("in", i[0].sum().item())))
    model.register_full_backward_hook(lambda m, i, o: seen.append(("root", o[0].sum().item())))
    model.blocks[2].register_forward_hook(
        lambda m, args, out: seen.append(("weight", tuple(m.up.weight.shape)))
    )
    mean_square(model, batch).backward()
    return seen, full_grads(model)


@on_ranks(2)
def test_hooks_of_the_user_see_and_change_what_they_would_without_shards():
    batch = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
    torch.manual_seed(0)
    seen, grads = train_with_user_hooks(Stack(), batch)
    assert len(seen) == 5
    for options in SPREAD:
        torch.manual_seed(0)
        seen_sharded, grads_sharded = train_with_user_hooks(shard(Stack(), **options), batch)
        assert seen_sharded == seen
        assert_same_bits(grads_sharded, grads)
