"""Integers: every element has one place in the full buffer, and one rank that owns it."""

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwise.layout.segments import balance_costs, build_layout, flat_layout, rows_layout
from shardwise.layout.units import find_device, partition_into_units

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=6)
num_ranks = st.integers(1, 17)
kinds = st.sampled_from(["rows", "flat", "matrices"])


def laid_out(kind, shapes, num_ranks):
    """Build a layout; of ``matrices``, every parameter of two dims has an owner."""
    matrices = [index for index, shape in enumerate(shapes) if len(shape) == 2]
    owners = [None] * len(shapes)
    chosen = balance_costs([prod(shapes[index]) for index in matrices], num_ranks)
    for index, owner in zip(matrices, chosen, strict=True):
        owners[index] = owner
    return build_layout(kind, shapes, num_ranks, owners)


@given(kinds, shapes, num_ranks)
def test_the_pieces_of_the_ranks_hold_every_element_exactly_once(kind, shapes, num_ranks):
    layout = laid_out(kind, shapes, num_ranks)
    for index, shape in enumerate(shapes):
        owned = []
        for rank in range(num_ranks):
            piece = layout.piece(index, rank)
            assert piece.numel == piece.hi - piece.lo >= 0
            owned += range(piece.lo, piece.hi)
        assert owned == list(range(prod(shape)))  # in rank order too


@given(shapes, num_ranks)
def test_rows_are_cut_where_torch_chunk_cuts(shapes, num_ranks):
    layout = rows_layout(shapes, num_ranks)
    for index, shape in enumerate(shapes):
        whole = torch.arange(prod(shape)).reshape(shape or (1,))
        chunks = list(torch.chunk(whole, num_ranks, dim=0))
        chunks += [whole[:0]] * (num_ranks - len(chunks))
        for rank, chunk in enumerate(chunks):
            piece = layout.piece(index, rank)
            assert list(range(piece.lo, piece.hi)) == chunk.flatten().tolist()


@given(shapes, num_ranks)
def test_flat_ranks_own_equal_ranges_but_for_less_than_one_element_each(shapes, num_ranks):
    layout = flat_layout(shapes, num_ranks)
    owned = [
        sum(layout.piece(i, rank).numel for i in range(len(shapes))) for rank in range(num_ranks)
    ]
    assert sum(owned) == layout.numel
    assert all(n <= layout.shard_numel(0) for n in owned)
    assert 0 <= layout.full_numel - layout.numel < num_ranks
    assert max(owned) - min(owned) < max(num_ranks, 1) or num_ranks == 1


@given(kinds, shapes, num_ranks)
def test_a_full_buffer_is_as_long_as_all_shards_together(kind, shapes, num_ranks):
    layout = laid_out(kind, shapes, num_ranks)
    assert layout.numel == sum(map(prod, shapes))
    if kind != "matrices":  # in which matrices begin at multiples of some elements
        assert layout.full_numel == sum(layout.shard_numels)
    assert layout.shard_numels == tuple(map(layout.shard_numel, range(num_ranks)))
    assert min(sum(layout.shard_numels), layout.full_numel) >= layout.numel


@given(kinds, shapes, num_ranks)
def test_gathering_every_share_in_rank_order_puts_every_element_in_its_place(
    kind, shapes, num_ranks
):
    layout = laid_out(kind, shapes, num_ranks)
    values = [torch.arange(prod(s)) + 1000 * i for i, s in enumerate(shapes)]
    shards = torch.full((num_ranks, max(layout.shard_numels)), -1)
    for rank in range(num_ranks):
        for index, value in enumerate(values):
            piece = layout.piece(index, rank)
            assert 0 <= piece.shard_offset <= layout.shard_numel(rank)  # of empty ones too
            shards[rank, piece.shard_offset : piece.shard_offset + piece.numel] = value[
                piece.lo : piece.hi
            ]
    full = torch.full((layout.full_numel,), -1)
    for segment in layout.segments:
        for rank in range(num_ranks):
            begin, end = (segment.full_offset + at for at in segment.share(rank))
            full[begin:end] = shards[rank, segment.shard_offset :][: end - begin]
    for index, value in enumerate(values):
        begin = layout.full_offset(index)
        assert torch.equal(full[begin : begin + value.numel()], value)


@given(shapes, num_ranks)
def test_a_matrix_lies_whole_on_one_rank_and_the_rest_is_flat(shapes, num_ranks):
    layout = laid_out("matrices", shapes, num_ranks)
    for index, shape in enumerate(shapes):
        held = [layout.piece(index, rank).numel for rank in range(num_ranks)]
        owner = layout.owner(index)
        assert (owner is not None) is (len(shape) == 2)
        for rank in range(num_ranks):
            local = layout.local_shape(index, rank)
            assert prod(local) == held[rank]
            if owner is not None:
                assert local == (shape if rank == owner else (0, shape[1]))


@given(st.lists(st.integers(0, 99), max_size=9), num_ranks)
def test_the_longest_go_first_so_that_no_rank_has_a_whole_one_more_than_another(costs, num_ranks):
    owners = balance_costs(costs, num_ranks)
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(num_ranks)]
    assert sum(loads) == sum(costs)
    assert max(loads) - min(loads) <= max(costs, default=0)
    assert owners == balance_costs(costs, num_ranks)


# Units.


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)


class OtherBlock(Block):
    pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(2, 1, bias=False)


def owned(units):
    return {unit.name: [spec.name for spec in unit.params] for unit in units}


BLOCKS = {f"blocks.{i}": [f"blocks.{i}.linear.{p}" for p in ("weight", "bias")] for i in range(3)}
ROOT = {"": ["embed.weight", "head.weight"]}


def test_like_children_of_a_module_list_are_found_as_units():
    assert owned(partition_into_units(Net(), None)) == ROOT | BLOCKS


def test_children_of_different_classes_are_not_taken_for_units():
    net = Net()
    net.blocks[1] = OtherBlock()
    assert list(owned(partition_into_units(net, None))) == [""]


def test_a_layer_outside_the_blocks_that_is_as_large_as_one_is_a_unit_too():
    net = Net()
    net.embed = nn.Embedding(3, 2)
    units = owned(partition_into_units(net, None))
    assert units == {"": ["head.weight"], "embed": ["embed.weight"]} | BLOCKS
    net._no_split_modules = ["Block"]
    assert owned(partition_into_units(net, None)) == units
    assert owned(partition_into_units(net, [Block])) == ROOT | BLOCKS  # whoever chooses has chosen


def test_only_the_outermost_module_list_gives_units():
    inner = [nn.ModuleList([Block(), Block()]) for _ in range(2)]
    net = nn.ModuleDict({"outer": nn.ModuleList(inner)})
    assert list(owned(partition_into_units(net, None))) == ["", "outer.0", "outer.1"]


def test_units_chosen_by_class_class_name_or_instance_are_the_same():
    net = Net()
    for choice in ([Block], ["Block"], list(net.blocks), [Block, "Block", net.blocks[0]]):
        assert owned(partition_into_units(net, choice)) == ROOT | BLOCKS


def test_a_class_takes_its_subclasses_and_a_class_name_does_not():
    net = Net()
    net.blocks[1] = OtherBlock()
    assert list(owned(partition_into_units(net, [Block]))) == ["", *BLOCKS]
    assert list(owned(partition_into_units(net, ["Block"]))) == ["", "blocks.0", "blocks.2"]


def test_one_instance_alone_may_be_a_unit():
    net = Net()
    units = owned(partition_into_units(net, [net.head]))
    assert units["head"] == ["head.weight"] and list(units) == ["", "head"]


def test_an_empty_choice_leaves_everything_to_the_root():
    units = owned(partition_into_units(Net(), []))
    assert list(units) == [""] and len(units[""]) == 8


def test_the_hints_of_hugging_face_models_are_followed():
    net = Net()
    net._no_split_modules = ["Embedding", "Block"]
    units = owned(partition_into_units(net, None))
    assert units == {"": ["head.weight"], "embed": ["embed.weight"]} | BLOCKS


def test_hints_that_match_nothing_do_not_hide_the_module_list():
    net = Net()
    net._no_split_modules = ["Absent"]
    assert owned(partition_into_units(net, None)) == ROOT | BLOCKS


def test_a_weight_tied_across_units_belongs_to_the_root_and_inside_one_to_that_unit():
    net = Net()
    net.blocks[0].extra = net.embed.weight
    net.blocks[1].linear.tied = net.blocks[1].linear.weight
    net.blocks[2].linear.weight = net.blocks[1].linear.weight
    units = partition_into_units(net, None)
    by_name = {
        spec.name: (u.name, [use.name for use in spec.uses]) for u in units for spec in u.params
    }
    assert by_name["embed.weight"] == ("", ["embed.weight", "blocks.0.extra"])
    assert by_name["blocks.1.linear.weight"] == (
        "",
        ["blocks.1.linear.weight", "blocks.1.linear.tied", "blocks.2.linear.weight"],
    )


def test_a_weight_tied_between_nested_units_belongs_to_the_lowest_unit_over_both():
    class Nest(nn.Module):
        def __init__(self):
            super().__init__()
            self.middle = nn.Sequential(Block(), Block())
            self.middle[1].linear.weight = self.middle[0].linear.weight

    units = owned(partition_into_units(Nest(), [nn.Sequential, Block]))
    assert units["middle"] == ["middle.0.linear.weight"]
    assert units["middle.0"] == ["middle.0.linear.bias"]


def test_a_module_used_twice_is_one_unit_with_two_names():
    net = Net()
    net.again = net.blocks[0]
    units = partition_into_units(net, None)
    first = next(u for u in units if u.module is net.blocks[0])
    assert [use.name for use in first.params[0].uses] == ["blocks.0.linear.weight"]
    assert sum(u.module is net.blocks[0] for u in units) == 1


def test_every_parameter_has_exactly_one_unit():
    net = Net()
    net.blocks[0].extra = net.embed.weight
    for choice in (None, [Block], [Block, nn.Linear], [Net]):
        units = partition_into_units(net, choice)
        ids = [id(spec.param) for unit in units for spec in unit.params]
        assert sorted(ids) == sorted(id(p) for p in net.parameters())


def test_the_device_is_that_of_the_parameters_and_meta_does_not_count():
    net = Net()
    assert find_device(partition_into_units(net, None)) == torch.device("cpu")
    net.head.to("meta")
    assert find_device(partition_into_units(net, None)) == torch.device("cpu")
    assert find_device(partition_into_units(net.to("meta"), None)) is None
