"""A source of any format becomes a checkpoint that verifies, and loads on any number of ranks."""

import errno
import weakref
from contextlib import closing
from functools import partial

import pytest
import torch

import shardwise
from checkpoint.disk import Fault, FaultyFiles
from checkpoint.saving import Setting, build, differences, plain, take_step, truth_of
from convert.sources import MemorySource, all_bits, odd_tensors, source_of, whole_tensors
from ranks import run_ranks
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import take_lock
from shardwise.checkpoint.read import Checkpoint
from shardwise.checkpoint.source import OptimizerInfo
from shardwise.checkpoint.verify import verify
from shardwise.convert.importing import import_source, without_prefix
from shardwise.convert.pieces import PieceSource, flat_piece
from shardwise.errors import CheckpointError, ConfigError, DamagedCheckpoint

FILES = Files()


def plain_run():
    """Train without Shardwise for two steps."""
    run = plain(3)
    for step in range(2):
        tokens = torch.arange(12).view(4, 3) % 11 + step % 2
        run.model(tokens % 11).pow(2).mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.optimizer.param_groups[0]["lr"] = 0.0123
    return run


def load_and_gather(rank, _, path, setting):
    run = build(setting, seed=9)
    loaded = shardwise.load(path, run.model, run.optimizer, extra=run.extra)
    assert loaded.step == 2
    return truth_of(run)


@pytest.mark.parametrize(
    "setting", [Setting(1, 0), Setting(3, 3, "rows"), Setting(3, 1, "flat", "linear")], ids=str
)
def test_a_plain_run_goes_on_sharded_with_every_bit_of_its_state(tmp_path, setting):
    run = plain_run()
    key = next(iter(run.optimizer.state))
    name = next(n for n, p in run.model.named_parameters() if p is key)
    source = source_of(run.model, run.optimizer, {name: {"odd": (1, 2)}})
    source.step = 2
    source.extra = {key: value.state_dict() for key, value in run.extra.items()}
    written = import_source(source, tmp_path / "ours", files=FILES)
    assert written.path == tmp_path / "ours"
    expected = truth_of(run)
    names = [name, "head.weight"] if name == "embedding.weight" else [name]
    expected |= {f"state {n} odd": (1, 2) for n in names}
    for truth in run_ranks(load_and_gather, setting.num_ranks, written.path, setting):
        assert not differences(truth, expected)


def train_and_save(rank, _, path, setting):
    run = build(setting)
    for step in range(2):
        take_step(run, step)
    shardwise.save(path, run.model, run.optimizer, step=2, extra=run.extra)
    return truth_of(run)


def test_a_sharded_checkpoint_becomes_one_of_a_single_rank(tmp_path):
    saved = run_ranks(train_and_save, 3, tmp_path / "run", Setting(3, 3, "flat"))
    with closing(Checkpoint(FILES, tmp_path / "run" / "step-00000002")) as source:
        written = import_source(source, tmp_path / "whole", files=FILES)
    assert verify(FILES, written.path).ok
    (truth,) = run_ranks(load_and_gather, 1, written.path, Setting(1, 2))
    assert not differences(truth, saved[0])


def test_all_of_a_source_comes_back_to_the_bit(tmp_path):
    groups = (
        {"lr": torch.tensor(0.1), "betas": (0.9, 0.999), "params": ["plain", "half"]},
        {"lr": 1e-9, "foreach": None, "params": []},
    )
    state = {"plain": {"limit": torch.tensor([1.0, 2.0]), "note": "text"}}
    source = MemorySource(
        odd_tensors(), tied={"other": "plain"}, optimizer=OptimizerInfo("Any", groups, state)
    )
    source.add("optimizer", "plain", torch.randn(11, 4), "exp_avg")
    source.add("buffer", "mean", torch.randn(3))
    source.extra = {"loader": {"at": 7, "perm": torch.randperm(9)}, "none": None}
    told = []
    written = import_source(source, tmp_path / "ours", files=FILES, progress=told.append)

    assert verify(FILES, written.path).ok
    with closing(Checkpoint(FILES, written.path)) as ours:
        infos = [info for info in ours.tensors if info.name]
        assert sorted(infos, key=str) == sorted(source.tensors, key=str)
        found = {i.key: ours.read(i, 0, i.numel).view(i.shape) for i in infos}
        assert all_bits(found) == all_bits(whole_tensors(source))
        assert (ours.step, ours.tied) == (None, {"other": "plain"})
        assert ours.optimizer is not None
        assert str(ours.optimizer) == str(source.optimizer)
        assert str(ours.extra) == str(source.extra)
        assert ours.values_of(0)["generators"] == {}
    assert sum(told) == sum(t.nbytes for t in whole_tensors(source).values())


def test_tensors_of_groups_and_of_state_never_share_a_place(tmp_path):
    group = {"params": ["0"], "lr": torch.tensor(0.5)}
    state = {"0": {"lr": torch.tensor(2.0)}}
    source = MemorySource({"0": torch.ones(3)}, optimizer=OptimizerInfo("Own", (group,), state))
    written = import_source(source, tmp_path / "ours", files=FILES)
    with closing(Checkpoint(FILES, written.path)) as ours:
        assert (ours.optimizer.groups[0]["lr"], ours.optimizer.state["0"]["lr"]) == (0.5, 2.0)


def test_a_given_step_wins_and_names_the_folder(tmp_path):
    source = MemorySource({"w": torch.ones(3)})
    source.step = 5
    assert import_source(source, tmp_path / "a", files=FILES).path == tmp_path / "a"
    written = import_source(source, tmp_path / "run", files=FILES, step=7)
    assert written.path == tmp_path / "run" / "step-00000007"
    steps = [Checkpoint(FILES, path).step for path in (tmp_path / "a", written.path)]
    assert steps == [5, 7]


class Kept(bytearray):
    """Memory of a tensor that tells when it is gone."""


class OneAtATime(MemorySource):
    """A source that counts how many of its large tensors are in memory when it is read."""

    def __init__(self, params):
        super().__init__(params)
        self.given = []
        self.alive = []

    def read(self, tensor, lo, hi):
        self.alive.append(sum(ref() is not None for ref in self.given))
        memory = Kept(super().read(tensor, lo, hi).numpy().tobytes())
        self.given.append(weakref.ref(memory))
        return torch.frombuffer(memory, dtype=torch.float32)


def test_one_large_tensor_is_in_memory_at_a_time(tmp_path):
    source = OneAtATime({f"w{n}": torch.randn(9 << 18) for n in range(4)})
    import_source(source, tmp_path / "ours", files=FILES)
    assert source.alive == [0, 0, 0, 0]


def test_an_import_that_fails_leaves_nothing(tmp_path):
    class Damaged(MemorySource):
        def read(self, tensor, lo, hi):
            raise DamagedCheckpoint(f"weights.bin: tensor '{tensor.name}' is damaged")

    source = Damaged({"w": torch.ones(3)})
    with pytest.raises(DamagedCheckpoint, match=r"^weights.bin: tensor 'w' is damaged"):
        import_source(source, tmp_path / "ours", files=FILES)
    files = FaultyFiles(FILES, Fault(0, errno.ENOSPC, "write", lasting=True))
    with pytest.raises(CheckpointError, match=f"errno {errno.ENOSPC}"):
        import_source(MemorySource({"w": torch.ones(3)}), tmp_path / "ours", files=files)
    assert list(tmp_path.iterdir()) == []


def test_what_no_checkpoint_can_hold_is_refused_by_name(tmp_path):
    source = MemorySource({"w": torch.ones(3)})
    source.extra = {"hook": print}
    with pytest.raises(CheckpointError, match=r"extra\['hook'\]"):
        import_source(source, tmp_path / "ours", files=FILES)
    twice = MemorySource({"w": torch.ones(3)})
    twice.add("buffer", "w", torch.ones(3))
    with pytest.raises(CheckpointError, match=r"memory cannot be saved: .*two have one name"):
        import_source(twice, tmp_path / "ours", files=FILES)
    long = MemorySource({"w" * 5000: torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"www.* cannot be saved: .*4096"):
        import_source(long, tmp_path / "ours", files=FILES)


def named_source(prefix):
    torch.manual_seed(0)
    groups = ({"lr": 0.5, "params": [f"{prefix}w", f"{prefix}module.v"]},)
    source = MemorySource(
        {
            f"{prefix}w": torch.randn(3, 2),
            f"{prefix}module.v": torch.randn(2),
            "free": torch.ones(1),
        },
        tied={f"{prefix}head": f"{prefix}w"},
        optimizer=OptimizerInfo("AdamW", groups, {f"{prefix}w": {"odd": 1}}),
    )
    source.add("buffer", f"{prefix}mean", torch.randn(3))
    source.add("optimizer", f"{prefix}w", torch.randn(3, 2), "exp_avg")
    source.extra = {"module.x": torch.arange(4)}
    return source


def in_pieces(source):
    index = {t: [flat_piece(0, t.numel, partial(source.read, t))] for t in source.tensors}
    of = source.step, source.optimizer, source.extra, source.tied
    return PieceSource(source.where, index, *of)


def test_a_prefix_is_dropped_from_every_name_and_only_once():
    found, wanted = without_prefix(in_pieces(named_source("module.")), "module."), named_source("")
    assert list(found.tensors) == wanted.tensors
    assert (found.tied, found.optimizer) == (wanted.tied, wanted.optimizer)
    assert all_bits(whole_tensors(found)) == all_bits(whole_tensors(wanted))
    assert list(found.extra) == ["module.x"]


def test_a_prefix_that_is_not_there_or_that_tells_names_apart_is_refused():
    for prefix in ("model.", ""):
        with pytest.raises(ConfigError, match=rf"begins with '{prefix}'.* free, module.head"):
            without_prefix(in_pieces(named_source("module.")), prefix)
    both = MemorySource({"module.w": torch.ones(1), "w": torch.ones(1)})
    with pytest.raises(ConfigError, match=r"'module.w' and 'w' would be one name"):
        without_prefix(in_pieces(both), "module.")
    both = MemorySource({"module.w": torch.ones(1)}, tied={"w": "module.w"})
    with pytest.raises(ConfigError, match=r"'module.w' and 'w' would be one name"):
        without_prefix(in_pieces(both), "module.")


def test_a_source_without_tensors_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="memory holds no tensors"):
        import_source(MemorySource(), tmp_path / "ours", files=FILES, step=1)
    assert list(tmp_path.iterdir()) == []


def test_a_step_is_only_imported_into_a_folder_that_no_run_holds(tmp_path):
    class Asking(MemorySource):
        def read(self, tensor, lo, hi):
            with pytest.raises(CheckpointError, match="saves checkpoints there"):
                take_lock(FILES, tmp_path / "run", "other")
            asked.append(tensor.name)
            return super().read(tensor, lo, hi)

    asked = []
    lock = take_lock(FILES, tmp_path / "run", "other")
    with pytest.raises(CheckpointError, match=r"run other\) saves checkpoints there"):
        import_source(Asking({"w": torch.ones(3)}), tmp_path / "run", files=FILES, step=1)
    lock.release()
    import_source(Asking({"w": torch.ones(3)}), tmp_path / "run", files=FILES, step=1)
    assert asked == ["w"]
    take_lock(FILES, tmp_path / "run", "other").release()
