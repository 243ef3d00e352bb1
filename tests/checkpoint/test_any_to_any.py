"""What was saved under one setting is loaded under another: every bit of it, and training goes on.

A setting is a number of ranks, a stage, a layout, a partition into units and a precision. Some
pairs of them are drawn by a fixed seed; `campaigns/any_to_any.py` takes all that there are.
"""

import pickle
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import shardwise
from ranks import run_sizes
from roundings import assert_rounded_alike
from saving import (
    NET_ROUNDINGS,
    Setting,
    all_settings,
    build,
    differences,
    state_folder,
    take_step,
    truth_of,
)

NUM_PAIRS = 18
REPLICATED = (
    Setting(4, 3, "rows", "found", "fp32", 2),
    Setting(4, 1, "flat", "linear", "fp32", 2),
    Setting(4, 3, "flat", "root", "bf16", 2),
)


def draw_pairs(seed=175):
    """Draw pairs so that each setting's parts appear on both sides; large sizes only rarely."""
    draw = random.Random(seed)
    settings = all_settings()
    weights = [{1: 8, 2: 10, 3: 6, 4: 2, 5: 1, 8: 1}[s.num_ranks] for s in settings]
    pairs = [(REPLICATED[0], Setting(3)), (Setting(3), REPLICATED[0])]
    pairs += [(REPLICATED[1], REPLICATED[2]), (REPLICATED[2], Setting(2, 0, "flat", "linear"))]
    pairs += [(Setting(8, 3, "flat", "linear"), Setting(1)), (Setting(5), Setting(8, 3, "flat"))]
    savers = [saver for saver, _ in pairs] + draw.choices(settings, weights, k=9)
    while len(pairs) < NUM_PAIRS:
        pair = (draw.choice(savers), *draw.choices(settings, weights))
        if pair not in pairs:
            pairs.append(pair)
    return pairs


PAIRS = draw_pairs()


def write_truth(path, before, loss, after):
    """Write tensors as files have them: a pickle of a hundred takes as long as the run itself."""
    states = {"before": before, "after": after}
    items = [(when, key, value) for when, state in states.items() for key, value in state.items()]
    save_file({f"{w} {k}": v for w, k, v in items if isinstance(v, Tensor)}, f"{path}-tensors")
    rest = [item for item in items if not isinstance(item[2], Tensor)]
    path.write_bytes(pickle.dumps((loss, rest)))


def read_truth(path):
    states = {"before": {}, "after": {}}
    loss, rest = pickle.loads(path.read_bytes())
    tensors = load_file(f"{path}-tensors").items()
    for when, key, value in [*rest, *((*name.split(" ", 1), tensor) for name, tensor in tensors)]:
        states[when][key] = value
    return states["before"], loss, states["after"]


def train_and_save(rank, world_size, jobs):
    for number, (setting, root) in enumerate(jobs):
        folder = state_folder(root, setting)
        run = build(setting, seed=number % 7)
        for step in range(3):
            take_step(run, step)
        extra = {**run.extra, "mine": (rank, torch.arange(5) + rank), "all": {"epoch": 2}}
        shardwise.save(folder / "saved", run.model, run.optimizer, step=3, extra=extra)
        now = truth_of(run)
        loss = take_step(run, 3, norm=False)
        write_truth(folder / f"truth-{rank}", now, loss, truth_of(run))


def load_and_compare(rank, world_size, jobs):
    return [
        compare(rank, saver, loader, root, used=number % 2 == 1)
        for number, (saver, loader, root) in enumerate(jobs)
    ]


def compare(rank, saver, loader, root, used):
    """Load and return what differs from the truth; a ``used`` model has trained before."""
    folder = state_folder(root, saver)
    from_rank = rank % saver.num_ranks
    before, loss, after = read_truth(folder / f"truth-{from_rank}")
    run = build(loader, seed=11)
    if used:
        take_step(run, 50)
    loaded = shardwise.load(folder / "saved", run.model, run.optimizer, step=3, extra=run.extra)
    problems = differences(truth_of(run), before)
    here, mine = loaded.extra["mine"]
    if here != from_rank or not torch.equal(mine, torch.arange(5) + from_rank):
        problems.append(f"own extra state: {loaded.extra['mine']}")
    if loaded.extra["all"] != {"epoch": 2} or loaded.step != 3:
        problems.append(f"extra state: {loaded.extra['all']}, step {loaded.step}")
    if saver.precision == loader.precision:
        problems += _compare_next_step(run, saver, loader, loss, after)
    return problems


def _compare_next_step(run, saver, loader, loss, after):
    found = take_step(run, 3, norm=False)
    same_ranks = (saver.num_ranks, saver.num_replicas) == (loader.num_ranks, loader.num_replicas)
    if same_ranks:
        problems = differences(truth_of(run), after)
        return problems if found == loss else [*problems, f"loss {found} instead of {loss}"]
    if saver.precision != "fp32":  # sums over other parts of a batch: bf16 has 8 bits for them
        return []
    ours = truth_of(run)
    ours["loss"], after["loss"] = found, loss
    problems = []
    for key, expected in after.items():  # the moments show what the gradients were
        if key == "loss" or key.startswith("param ") or key.endswith(" exp_avg"):
            try:
                assert_rounded_alike(ours[key], expected, NET_ROUNDINGS, key)
            except AssertionError as error:
                problems.append(f"after one step: {error}")
    return problems


def save_each(settings, root):
    """Train and save under each setting, all of one size in one call."""
    jobs = {}
    for setting in dict.fromkeys(settings):
        state_folder(root, setting).mkdir()
        jobs.setdefault(setting.num_ranks, ([],))[0].append((setting, root))
    run_sizes(train_and_save, jobs)


def load_each(pairs, root):
    """Load each pair; return what was wrong with it, by pair."""
    jobs = {}
    for saver, loader in pairs:
        jobs.setdefault(loader.num_ranks, ([],))[0].append((saver, loader, root))
    found = {}
    for size, by_rank in run_sizes(load_and_compare, jobs).items():
        for number, (saver, loader, _) in enumerate(jobs[size][0]):
            found[saver, loader] = [
                f"rank {rank}: {problem}"
                for rank, problems in enumerate(by_rank)
                for problem in problems[number]
            ]
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("any_to_any")
    save_each([saver for saver, _ in PAIRS], root)
    return load_each(PAIRS, root)


def test_the_pairs_have_every_part_of_a_setting_on_both_sides():
    assert len(set(PAIRS)) == NUM_PAIRS
    for side in zip(*PAIRS, strict=True):
        assert {s.num_ranks for s in side} == {1, 2, 3, 4, 5, 8}
        assert {s.stage for s in side} == {0, 1, 2, 3}
        assert {s.layout for s in side} == {"rows", "flat"}
        assert {s.units for s in side} == {"found", "linear", "root"}
        assert {s.precision for s in side} == {"fp32", "bf16"}
        assert {s.num_replicas for s in side} == {1, 2}
    assert any(a.num_ranks == b.num_ranks and a.layout != b.layout for a, b in PAIRS)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}-to-{pair[1]}")
def test_every_bit_of_the_state_comes_back_and_training_goes_on(results, pair):
    assert not results[pair], "\n".join(results[pair])
