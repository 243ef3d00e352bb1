"""The samples of each rank and step on any number of ranks, and token files of any size."""

import multiprocessing
import pickle
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from ranks import on_ranks, run_ranks
from roundings import assert_all_rounded_alike, of_gradient
from shardwise import accumulate, shard
from shardwise.data import Samples, TokenFiles
from shardwise.data.order import BatchShare, SampleOrder
from shardwise.errors import ConfigError, StateError


@given(size=st.integers(1, 500), data=st.data(), seed=st.integers(0, 99))
def test_each_epoch_takes_each_sample_once_with_blocks_and_without(size, data, seed):
    order = SampleOrder(size, seed, data.draw(st.none() | st.integers(1, size)))
    for epoch in range(2):
        taken = [order.sample(epoch * size + place) for place in range(size)]
        assert sorted(taken) == list(range(size))


def test_each_epoch_and_each_seed_has_an_order_of_its_own():
    orders = (SampleOrder(50, seed, None) for seed in range(10))
    taken = {tuple(map(o.sample, range(first, first + 50))) for o in orders for first in (0, 50)}
    assert len(taken) == 20


def test_blocks_keep_reads_in_a_few_regions_and_mix_them():
    order = SampleOrder(100_000, seed=3, block=50)
    taken = [order.sample(place) for place in range(16 * 50)]
    assert len({sample // 50 for sample in taken}) == 16
    assert len({sample // 50 for sample in taken[:64]}) > 8
    assert sorted(taken) != list(range(16 * 50))


@given(micro_batch=st.integers(1, 5), num_micro_batches=st.integers(1, 20), ranks=st.integers(1, 8))
def test_the_ranks_take_each_sample_of_a_step_once_in_as_many_passes(
    micro_batch, num_micro_batches, ranks
):
    shares = [
        BatchShare(micro_batch * num_micro_batches, micro_batch, rank, ranks)
        for rank in range(ranks)
    ]
    counted = [
        index
        for share in shares
        for number in range(share.num_passes)
        if share.counts(number)
        for index in share.indices(number)
    ]
    assert sorted(counted) == list(range(micro_batch * num_micro_batches))
    passes = [(share, number) for share in shares for number in range(share.num_passes)]
    weights = sum(share.counts(number) / share.divisor for share, number in passes)
    assert weights / ranks == pytest.approx(1)


class Items:
    """A dataset that notes what is read; item i is i."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.tensor([float(index)])


def loader_of(kind, samples):
    if kind == "stateful":
        stateful = pytest.importorskip("torchdata.stateful_dataloader")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about torchdata's own calls
            return stateful.StatefulDataLoader(
                Items(), batch_sampler=samples, num_workers=1, multiprocessing_context="fork"
            )
    return DataLoader(Items(), batch_sampler=samples)


def take(rank, world_size, state, num, kind):
    """Take steps; return (step, sample) of all that counts, and the position."""
    # Ranks of tests are daemons, which may not start a loader's workers.
    multiprocessing.current_process()._config["daemon"] = False
    samples = Samples(60, global_batch=6, micro_batch=2, seed=5)
    if state is not None:
        samples.load_state_dict(state)
    taken = []
    for step in samples.steps(loader_of(kind, samples)):
        for micro in step:
            taken += [(step.number, int(item)) for item in micro.batch if micro.weight]
        if step.number == (state or {"step": 0})["step"] + num:
            break
    return taken, samples.state_dict()


def all_taken(results):
    return Counter(pair for taken, _ in results for pair in taken)


@pytest.mark.parametrize("kind", ["plain", "stateful"])
def test_no_sample_is_lost_or_seen_twice_when_the_number_of_ranks_changes(kind):
    alone = run_ranks(take, 1, None, 9, "plain")
    first = run_ranks(take, 2, None, 4, kind)
    second = run_ranks(take, 3, first[0][1], 3, kind)
    third = run_ranks(take, 1, second[0][1], 2, kind)
    parts = all_taken(first) + all_taken(second) + all_taken(third)
    assert parts == all_taken(alone) and max(parts.values()) == 1
    assert third[0][1]["step"] == 9


def test_a_position_of_other_samples_is_refused():
    state = Samples(40, global_batch=6, micro_batch=2).state_dict()
    for key, samples in (
        ("num_samples", Samples(41, global_batch=6, micro_batch=2)),
        ("global_batch", Samples(40, global_batch=8, micro_batch=2)),
        ("seed", Samples(40, global_batch=6, micro_batch=2, seed=1)),
        ("shuffle", Samples(40, global_batch=6, micro_batch=2, shuffle=False)),
        ("shuffle", Samples(40, global_batch=6, micro_batch=2, shuffle=1)),
    ):
        with pytest.raises(StateError, match=f"samples: {key} was "):
            samples.load_state_dict(state)


def test_sizes_that_do_not_fit_and_a_step_that_is_left_early_are_refused():
    with pytest.raises(ConfigError, match="a multiple of micro_batch, got 40 samples, 7 and 2"):
        Samples(40, global_batch=7, micro_batch=2)
    with pytest.raises(ConfigError, match="shuffle: expected 1 to 40, got 41"):
        Samples(40, global_batch=6, micro_batch=2, shuffle=41)
    samples = Samples(40, global_batch=6, micro_batch=2)
    with pytest.raises(StateError, match="step 1 was left before its last pass"):
        for step in samples.steps(loader_of("plain", samples)):
            next(iter(step))
    assert samples.state_dict()["step"] == 0
    first = next(samples.steps(loader_of("plain", samples)))
    assert [samples.step for _ in first] == [0, 0, 1], "a loop may save in the last pass"
    with pytest.raises(StateError, match="step 1 is iterated again"):
        list(first)
    steps = samples.steps(loader_of("plain", samples), until=3)
    assert [(step.number, len(list(step))) for step in steps] == [(2, 3), (3, 3)]


@pytest.mark.parametrize("samples", [Samples(40, global_batch=6, micro_batch=2)], ids=["alone"])
@on_ranks(2)
def test_samples_made_before_the_process_group_are_refused(samples):
    with pytest.raises(StateError, match="divided over 1 ranks, and there are 2: make Samples af"):
        next(samples.steps(iter(samples)))


@on_ranks(3)
def test_a_pass_without_weight_takes_no_sample_of_another_step():
    """Take a step whose next one has a sample that is not finite."""
    samples = Samples(40, global_batch=8, micro_batch=2, shuffle=False)
    data = torch.arange(40.0).index_fill(0, torch.arange(8, 40), torch.inf)
    step = next(samples.steps(data[mine] for mine in samples))
    mine = torch.stack([micro.batch.sum() * micro.weight for micro in step]).sum()
    torch.distributed.all_reduce(mine)
    assert float(mine) / 3 == pytest.approx(sum(range(8)) / 4)


def weights_after(rank, world_size, seeds_draws):
    """Train with dropout, over four micro-batches a step."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    model = shard(net.double(), stage=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    samples = Samples(40, global_batch=8, micro_batch=2, seeds_draws=seeds_draws)
    for step in samples.steps(loader_of("plain", samples)):
        for micro in step:
            with accumulate(model, last=micro.last):
                (model(micro.batch.double()).square().mean() * micro.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step.number == 3:
            break
    return {name: param.full_tensor().detach() for name, param in model.named_parameters()}


def test_a_loop_takes_the_same_steps_on_any_number_of_ranks_also_with_empty_passes():
    alone = run_ranks(weights_after, 1, True)[0]
    roundings = 3 * of_gradient(1, 4, over=8)
    for ranks in (2, 3):
        assert_all_rounded_alike(run_ranks(weights_after, ranks, True)[0], alone, roundings)


@pytest.fixture
def files(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(21, dtype=np.uint16))
    (tmp_path / "b.bin").write_bytes(np.arange(100, 112, dtype=np.uint16).tobytes())
    yield [tmp_path / "a.npy", tmp_path / "b.bin"]


def test_windows_start_at_multiples_with_targets_ahead_and_span_no_files(files):
    tokens = TokenFiles(files, 10, dtype="uint16")
    assert (len(tokens), tokens.num_tokens) == (2 + 1, 33)
    found = [(ids.tolist(), targets.tolist()) for ids, targets in map(tokens.__getitem__, range(3))]
    starts = (0, 10, 100)
    assert found == [([*range(s, s + 10)], [*range(s + 1, s + 11)]) for s in starts]
    assert torch.equal(pickle.loads(pickle.dumps(tokens))[2][0], tokens[2][0])
    assert len(pickle.dumps(tokens)) < 2000
    with pytest.raises(IndexError):
        tokens[3]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("raw.bin", b"\0\0", "a raw file needs dtype"),
        ("gone.npy", None, "no token file"),
        ("bad.npy", b"no numpy", "no token file"),
        ("float.npy", np.zeros(4), "expected one row of integers, got float64"),
        ("square.npy", np.zeros((4, 4), dtype=int), r"got int64 \[4, 4\]"),
        ("short.npy", np.zeros(4, dtype=int), "4 tokens are no window of seq 4"),
        ("huge.npy", b"\x93NUMPY\x02\0\xff\xff\xff\x7f{", "a header of 2147483647 bytes"),
        ("zip.npy", b"PK\x03\x04" + bytes(99), "expected what numpy.save"),
        ("cut.npy", b"\x93NUMPY\x01\0\x76\0{'descr'", "its header is damaged, or it was cut short"),
        ("deep.npy", b"\x93NUMPY\x01\0\xe8\x03" + b"(" * 1000, "its header is damaged"),
        (
            "claim.npy",
            b"\x93NUMPY\x01\0\x44\0"
            + b"{'descr': '<u2', 'fortran_order': False, 'shape': (9"
            + b"9" * 10
            + b",)}\n",
            "its header is damaged, or it was cut short",
        ),
    ],
)
def test_a_file_that_is_no_row_of_tokens_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    with pytest.raises(ConfigError, match=rf"{name}: .*{message}"):
        TokenFiles([path], 4)
